"""What the ranks of a node staged and gave up, and wait for: one report for ranks that do so together. Pure."""

from ckptd.core import events as ev
from ckptd.core.actions import Action, ToNode
from ckptd.core.node.membership import Membership
from ckptd.core.node.ranks import LocalRanks
from ckptd.core.node.slots import SlotTable
from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.protocol.node_messages import StagedSegment

TOGETHER_S = 1.0  # ranks that save together: a part of a node's ranks makes no save complete
_ENDED_S = 0.02  # ranks that end together
ALLOCATED_S = 0.1  # ranks whose memory is allocated: their coordinator names ranks that are silent for seconds


class Delivery:
    """What the coordinator is to know of slots and segments here, and does not know yet.

    Staged segments are reported once every rank of this node has staged that save, at the latest after ``TOGETHER_S``,
    and before any other report: of a rank that staged and then ended the coordinator learns the first thing first.
    So are ranks that have ended, when none of their session is left here.
    A coordinator on this node learns each at once.
    """

    def __init__(self, job: JobKey, node: str, ranks: LocalRanks, slots: SlotTable, membership: Membership) -> None:
        self._job, self._node = job, node
        self._ranks, self._slots, self._membership = ranks, slots, membership
        self._staged: dict[tuple[SaveId, str], ev.SegmentsStaged] = {}  # by save and session
        self._released: dict[SaveId, list[int]] = {}
        self._gone: dict[str, list[int]] = {}  # by session
        self._saving, self._allocating, self._ending = _Wait(TOGETHER_S), _Wait(ALLOCATED_S), _Wait(_ENDED_S)

    def staged(self, event: ev.SegmentStaged) -> None:
        """A rank sealed its segment."""
        key = (event.save, event.session)
        before = self._staged.get(key)
        others = before.segments if before is not None else ()
        stall_s, stalls_s, late = (before.stall_s, before.stalls_s, before.late_nbytes) if before else (0.0, 0.0, 0)
        late_s = before.late_s if before is not None else 0.0
        self._staged[key] = ev.SegmentsStaged(
            job=self._job,
            session=event.session,
            save=event.save,
            world_size=event.world_size,
            segments=(*others, StagedSegment(event.rank, event.nbytes, event.attestations)),
            drain=event.drain or (before is not None and before.drain),
            stall_s=max(stall_s, event.stall_s),
            stalls_s=stalls_s + event.stall_s,
            late_nbytes=late + event.late_nbytes,
            late_s=max(late_s, event.late_s),
        )

    def released(self, rank: int, save: SaveId) -> None:
        """A slot no longer holds the segment."""
        self._released.setdefault(save, []).append(rank)

    def gone(self, event: ev.RankGone) -> list[Action]:
        """A rank's process ended."""
        self._gone.setdefault(event.session, []).append(event.rank)
        return []

    def reported_with(self, actions: list[Action], now: float | None = None) -> list[Action]:
        """These actions, between the reports that must come first and others that are due. now: None, no clock."""
        here = self._membership.coordinator == self._node
        gone = self._ranks_gone(at_once=any(map(_is_report, actions)), now=now)
        others = [*gone, *actions]
        first = self._segments(at_once=here or any(map(_is_report, others)), now=now)
        rides = here or bool(first) or any(map(_is_report, others))
        report = self._membership.report
        return [*map(report, first), *others, *map(report, self._slots_awaited(at_once=rides, now=now))]

    def _ranks_gone(self, *, at_once: bool, now: float | None) -> list[Action]:
        at_once = at_once or self._membership.tells_itself or self._ending.is_over(now, waits=bool(self._gone))
        over = [session for session in sorted(self._gone) if at_once or not self._ranks.of(session)]
        facts = [ev.RanksGone(job=self._job, session=s, ranks=tuple(self._gone.pop(s))) for s in over]
        self._ending.waits(bool(self._gone))
        return [action for fact in facts for action in self._membership.report_gone(fact)]

    def _segments(self, *, at_once: bool, now: float | None) -> list[ev.Fact]:
        at_once = at_once or bool(self._released) or self._saving.is_over(now, waits=bool(self._staged))
        whole = [key for key in self._staged if at_once or self._all_staged(*key)]
        facts: list[ev.Fact] = [self._staged.pop(key) for key in sorted(whole)]
        facts += [ev.SegmentsReleased(job=self._job, save=s, ranks=tuple(r)) for s, r in self._released.items()]
        self._released.clear()
        self._saving.waits(bool(self._staged))
        return facts

    def _slots_awaited(self, *, at_once: bool, now: float | None) -> list[ev.SlotsAwaited]:
        changed = self._ranks.slots_changed
        over = self._allocating.is_over(now, waits=changed)
        self._allocating.waits(changed and not (at_once or over))
        return [self._ranks.slots_awaited()] if changed and (at_once or over) else []

    def _all_staged(self, save: SaveId, session: str) -> bool:
        ranks = {rank for rank, local in self._ranks.admitted.items() if local.session == session}
        return ranks <= {slot.rank for slot in self._slots.holding(save)}

    def next_deadline(self) -> float | None:
        """When what waits is reported; in the past while the clock was not read."""
        waits = (self._saving, self._allocating, self._ending)
        return min((wait.until for wait in waits if wait.until is not None), default=None)


class _Wait:
    """For others, from the first look at the clock on. ``until``: in the past while the clock was not read."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self.until: float | None = None  # None: nothing waits

    def waits(self, something: bool) -> None:
        """Whether something waits after this turn."""
        if not something:
            self.until = None
        elif self.until is None:
            self.until = float("-inf")

    def is_over(self, now: float | None, *, waits: bool) -> bool:
        """Whether what waits has waited long enough. now: None in a turn that has no clock."""
        if now is None or not waits:
            return False
        if self.until is None or self.until == float("-inf"):
            self.until = now + self._patience_s
        return now >= self.until


def _is_report(action: Action) -> bool:
    return isinstance(action, ToNode) and isinstance(action.message, ev.Report)
