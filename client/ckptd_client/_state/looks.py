"""How much of what replicas hold each save looks at: all of it, or a part that is another one in each save."""

from collections import deque
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ckptd.shared.base.ids import SaveId
from ckptd.shared.format.replica_shares import Where
from ckptd.shared.protocol.messages import Cadence, Milestone
from ckptd_client.handle import SaveHandle

if TYPE_CHECKING:
    from ckptd_client._state.replica_shares import Stream

_RECENT = 16  # saves of which it is known what they shared
_OWED = 64  # saves that are looked at as long as none of them is durable
_NAMED = 8  # keys in a sentence


class Verify(NamedTuple):
    """In which saves all that replicas share is compared: those that may be drained, or one of every so many."""

    drained: bool = True
    every: int = 0  # 0: not by count


DRAINED = Verify()
_NEVER, _EACH = Verify(drained=False), Cadence()


class Look(NamedTuple):
    """What a save looks at of tensors that replicas hold too."""

    turn: int = 0  # count of saves, the same on all ranks
    checked: Collection[bytes] = ()  # cuts of streams of which all was looked at before
    whole: bool = False  # all bytes of all streams
    due: bool = False  # for the cadence, as far as is known here, and not because it was asked for


class Looks:
    """Which streams one client has looked at, byte by byte, in saves that all ranks staged."""

    def __init__(self, verify: Verify = _NEVER, cadence: Cadence = _EACH) -> None:
        self._verify, self._cadence = verify, cadence
        self._last: SaveHandle | None = None  # the newest known to be staged of those that seemed due for a drain
        self._due: list[SaveHandle] = []  # others of which that is still to be heard
        self._owed: list[tuple[SaveHandle, bool]] = []  # looked at in full and not yet durable; with Look.due
        self._pending: list[tuple[Stream, int, SaveHandle]] = []  # a part that was looked at, and in which save
        self._covered: dict[bytes, set[int]] = {}
        self._checked: set[bytes] = set()
        self._recent: deque[tuple[SaveId, Sequence[Stream]]] = deque(maxlen=_RECENT)

    def begun(self) -> "Looks":
        """Those of the incarnation that begins now: nothing was looked at."""
        return Looks(self._verify, self._cadence)

    def next(self, save: SaveId, *, drain: bool = False) -> Look:
        """What the save looks at. One in which a rank said nothing proves nothing: it must be staged.

        drain: it will be drained, whatever the cadence says.
        """
        self._hear()
        due = self._verify.drained and self._may_be_due(save.step)
        # One whose drain is late gives its turn to whichever is the newest when the store is free.
        whole = due or (self._verify.drained and (drain or any(owed for _, owed in self._owed)))
        if self._verify.every:
            whole = (save.counter - 1) % self._verify.every == 0
        return Look(save.counter, self._checked, whole, due and not drain)

    def _may_be_due(self, step: int) -> bool:
        """Whether the coordinator may find a save of that step due, for all that is known of the others here.

        As ckptd.core.coordinator.cadence: that of seconds is its clock's. Who has not heard yet that one was staged
        takes the next for due as well, which costs a look; nobody has heard of what did not happen, so all look where
        it counts.
        """
        steps, last = self._cadence.steps, self._last
        return not steps or last is None or step < last.step or step // steps != last.step // steps

    def _hear(self) -> None:
        """Takes in what has become of earlier saves."""
        due = [handle for handle in self._due if handle.known_milestone is not None]
        self._due = [handle for handle in self._due if handle.known_milestone is None and not handle.ended]
        durable = [handle.save_id for handle, _ in self._owed if handle.known_milestone is Milestone.DURABLE]
        newer = [one for one in self._owed if not (durable and one[0].save_id <= max(durable)) and not one[0].in_vain]
        self._owed = [*newer[:1], *newer[1:][-_OWED:]] if any(due for _, due in newer) else []
        self._last = max([*due, *([self._last] if self._last else [])], key=lambda h: h.save_id, default=None)
        staged = [(stream, part) for stream, part, handle in self._pending if handle.known_milestone is not None]
        for stream, part in staged:
            covered = self._covered.setdefault(stream.cut, set())
            covered.add(part)
            if len(covered) == stream.parts:
                self._checked.add(stream.cut)
        self._pending = [one for one in self._pending if one[2].known_milestone is None and not one[2].ended]

    def looked(self, streams: Sequence["Stream"], look: Look, handle: SaveHandle) -> None:
        """A save said of these streams what it saw."""
        self._recent.append((handle.save_id, streams))
        if look.due:
            self._due.append(handle)
        if look.whole and self._verify.drained:
            self._owed.append((handle, look.due))
        for stream in (stream for stream in streams if stream.cut not in self._checked):
            parts = range(stream.parts) if look.whole else [look.turn % stream.parts]
            self._pending += [(stream, part, handle) for part in parts]

    def names(self, save: SaveId, where: Where) -> list[str]:
        """Keys of the tensors in which a save's replicas differ, or some of them do; empty when that is not known."""
        streams = [stream for known, found in self._recent if known == save for stream in found]
        return [
            name for stream in streams if stream.sum == where.replicas for name in stream.names_in(where.parts, streams)
        ]


def listed(names: Sequence[str]) -> str:
    """The first of many keys, for a sentence."""
    more = f", ... ({len(names)} in all)" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
