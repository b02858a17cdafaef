"""How many bytes of replicated tensors each save compares: all of them, or a sample that changes with each save."""

from collections import deque
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ckptd.shared.base.ids import SaveId
from ckptd.shared.format.replica_attestations import Where
from ckptd.shared.protocol.messages import Cadence, Milestone
from ckptd_client._local.save_record import SaveRecord

if TYPE_CHECKING:
    from ckptd_client._state.replica_slices import Stream

_RECENT = 16  # saves whose streams are kept
_MAX_NOT_DURABLE = 64  # saves compared in full, kept while none of them is durable
_NAMED = 8  # keys in a sentence


class Verify(NamedTuple):
    """The saves that compare all bytes of replicas: those that may be drained, or one of every so many."""

    drained: bool = True
    every: int = 0  # 0: not by count


DRAINED = Verify()
_NEVER, _EACH = Verify(drained=False), Cadence()


class Sample(NamedTuple):
    """The bytes of replicated tensors that a save compares."""

    turn: int = 0  # count of saves, the same on all ranks
    checked: Collection[bytes] = ()  # cuts of streams that were compared completely before
    whole: bool = False  # all bytes of all streams
    due: bool = False  # by the cadence, as far as this rank knows, not by request


class Sampling:
    """The streams of one client whose bytes were compared in saves that all ranks staged."""

    def __init__(self, verify: Verify = _NEVER, cadence: Cadence = _EACH) -> None:
        self._verify, self._cadence = verify, cadence
        self._last: SaveRecord | None = None  # the newest staged save that seemed due for a drain
        self._due: list[SaveRecord] = []  # others whose milestone is not known yet
        self._not_durable: list[tuple[SaveRecord, bool]] = []  # compared in full and not yet durable; with Sample.due
        self._pending: list[tuple[Stream, int, SaveRecord]] = []  # a part that was compared, and in which save
        self._covered: dict[bytes, set[int]] = {}
        self._checked: set[bytes] = set()
        self._recent: deque[tuple[SaveId, Sequence[Stream]]] = deque(maxlen=_RECENT)

    def restarted(self) -> "Sampling":
        """The state for a new incarnation: nothing was compared."""
        return Sampling(self._verify, self._cadence)

    def next(self, save: SaveId, *, drain: bool = False) -> Sample:
        """The sample of the save. It proves something only once the save is staged: every rank has attested then.

        drain: it will be drained, whatever the cadence says.
        """
        self._update()
        due = self._verify.drained and self._may_be_due(save.step)
        # If its drain is late, the newest save when the store is free is drained in its place.
        whole = due or (self._verify.drained and (drain or any(owed for _, owed in self._not_durable)))
        if self._verify.every:
            whole = (save.counter - 1) % self._verify.every == 0
        return Sample(save.counter, self._checked, whole, due and not drain)

    def _may_be_due(self, step: int) -> bool:
        """Whether the coordinator may find a save of that step due, as far as this rank knows the other saves.

        The rule of ckptd.core.coordinator.drains; a cadence of seconds depends on the coordinator's clock. A rank that
        does not know yet that a save was staged takes the next one for due as well, which costs a comparison. No rank
        takes a save for staged that was not, so all ranks compare the saves that are due.
        """
        steps, last = self._cadence.steps, self._last
        return not steps or last is None or step < last.step or step // steps != last.step // steps

    def _update(self) -> None:
        """Applies the milestones of earlier saves."""
        due = [handle for handle in self._due if handle.known_milestone is not None]
        self._due = [handle for handle in self._due if handle.known_milestone is None and not handle.ended]
        durable = [handle.save_id for handle, _ in self._not_durable if handle.known_milestone is Milestone.DURABLE]
        newer = [
            one for one in self._not_durable if not (durable and one[0].save_id <= max(durable)) and not one[0].in_vain
        ]
        self._not_durable = [*newer[:1], *newer[1:][-_MAX_NOT_DURABLE:]] if any(due for _, due in newer) else []
        self._last = max([*due, *([self._last] if self._last else [])], key=lambda h: h.save_id, default=None)
        staged = [(stream, part) for stream, part, handle in self._pending if handle.known_milestone is not None]
        for stream, part in staged:
            covered = self._covered.setdefault(stream.cut, set())
            covered.add(part)
            if len(covered) == stream.parts:
                self._checked.add(stream.cut)
        self._pending = [one for one in self._pending if one[2].known_milestone is None and not one[2].ended]

    def record(self, streams: Sequence["Stream"], sample: Sample, handle: SaveRecord) -> None:
        """Records that a save compared this sample of these streams."""
        self._recent.append((handle.save_id, streams))
        if sample.due:
            self._due.append(handle)
        if sample.whole and self._verify.drained:
            self._not_durable.append((handle, sample.due))
        for stream in (stream for stream in streams if stream.cut not in self._checked):
            parts = range(stream.parts) if sample.whole else [sample.turn % stream.parts]
            self._pending += [(stream, part, handle) for part in parts]

    def names(self, save: SaveId, where: Where) -> list[str]:
        """Keys of tensors among which a save's replicas differ; empty if they are not known."""
        streams = [stream for known, found in self._recent if known == save for stream in found]
        differing = [stream for stream in streams if stream.members == where.members]
        return [name for stream in differing for name in stream.names_in(where.parts, streams)]


def listed(names: Sequence[str]) -> str:
    """The first keys of a list, and their number, for a sentence."""
    more = f", ... ({len(names)} in all)" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
