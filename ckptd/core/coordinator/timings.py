"""How long the saves, drains and loads of a job take: the last ones, and all of them as distributions. Pure.

Its coordinator sees each milestone of each save. What is found at start, in an arena or on the store, began before this
daemon looked at its clock: it is not counted.
"""

from collections import defaultdict
from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

from ckptd.core.coordinator.distribution import BYTES_PER_S, SECONDS, STALLS, Distribution
from ckptd.core.coordinator.job_state import JobState
from ckptd.core.coordinator.load_round import Loaded
from ckptd.core.coordinator.save_record import Record
from ckptd.core.coordinator.save_states import State
from ckptd.shared.base.ids import SaveId
from ckptd.shared.protocol.messages import Milestone, Tier
from ckptd.shared.protocol.status import Histogram, PaceStatus

DRAIN_RATE = "drain_bytes_per_s"
RESTORE = "restore"
STALL = "stall"
_LAST = 8  # saves whose distance counts


class LastDrain(NamedTuple):
    """One that ended well."""

    seconds: float
    nbytes: int

    @property
    def bytes_per_s(self) -> float:
        """Of all nodes together, from its begin to its commit."""
        return self.nbytes / max(self.seconds, 1e-6)


class Timings:
    """``react`` is called after each event; what it has to look at are saves that moved since."""

    def __init__(self, facts: JobState) -> None:
        self._facts = facts
        self._moves = -1  # of saves, as of the last look
        self._seen: dict[SaveId, Milestone] = {}  # counted up to here
        self._load: Loaded | None = None  # counted last
        self._running: tuple[SaveId, float] | None = None  # the drain that runs, and since when
        self.last_drain: LastDrain | None = None
        self._saves = {milestone: Distribution(SECONDS) for milestone in Milestone}
        self._stalls = Distribution(STALLS)  # of each save, the longest of a rank
        self._rates = Distribution(BYTES_PER_S)
        self._loads: dict[Tier, Distribution] = defaultdict(partial(Distribution, SECONDS))

    def react(self, now: float) -> None:
        """Counts what was reached since the last call."""
        loaded = self._facts.restore.last
        if loaded is not None and loaded is not self._load:
            self._load = loaded
            self._loads[loaded.tier].add(now - loaded.since)
        if self._moves == self._facts.moves:
            return
        self._moves = self._facts.moves
        self._time_drains(now)
        for save in self._seen.keys() - self._facts.records.keys():
            del self._seen[save]
        for record in self._facts.records.values():
            if record.milestone is not None and record.milestone is not self._seen.get(record.save):
                self._count(record, now)

    def _count(self, record: Record, now: float) -> None:
        """A save may reach two milestones at one event; one that is durable may be protected later."""
        assert record.milestone is not None  # noqa: S101 - the caller looked
        before, self._seen[record.save] = self._seen.get(record.save), record.milestone
        found_at_start = record.adopted or (record.milestone is Milestone.DURABLE and not record.drain_since)
        if found_at_start:
            return
        if before is None:
            self._saves[Milestone.STAGED].add(now - record.since)
            self._stalls.add(record.stall_s)
        if record.milestone is not Milestone.STAGED:
            self._saves[record.milestone].add(now - record.since)

    def _time_drains(self, now: float) -> None:
        active = self._facts.active
        if self._running is not None and self._running[0] != active:
            record = self._facts.records.get(self._running[0])
            if record is not None and record.state is State.DURABLE:
                self.last_drain = LastDrain(now - self._running[1], record.nbytes)
                self._rates.add(self.last_drain.bytes_per_s)
        record = self._facts.records.get(active) if active is not None else None
        self._running = (record.save, record.drain_since) if record is not None else None

    def running_s(self, now: float) -> float:
        """How long the drain that runs has taken by now; 0 when none does."""
        return now - self._running[1] if self._running is not None else 0.0

    def resume(self, kept: Iterable[Histogram]) -> None:
        """Continues the counts of an earlier daemon of the job, as ``histograms`` gave them. For the job's journal."""
        for one in kept:
            if one.what in set(Milestone):
                self._saves[Milestone(one.what)].resume(one)
            elif one.what == STALL:
                self._stalls.resume(one)
            elif one.what == DRAIN_RATE:
                self._rates.resume(one)
            elif one.what == RESTORE and one.tier in set(Tier):
                self._loads[Tier(one.tier)].resume(one)

    def histograms(self) -> list[Histogram]:
        """All of them, also those without a value yet: a counter that begins above 0 looks like no increase."""
        saves = [distribution.shown(str(milestone)) for milestone, distribution in self._saves.items()]
        loads = [self._loads[tier].shown(RESTORE, str(tier)) for tier in Tier]
        return [*saves, self._stalls.shown(STALL), self._rates.shown(DRAIN_RATE), *loads]

    def pace(self, now: float) -> PaceStatus:
        """How often a save is due, and how long the store takes for one."""
        ours = self.due_saves()
        last = self.last_drain
        return PaceStatus(
            save_every_s=_rounded(distance_s(ours)),
            save_every_steps=_distance_steps(ours),
            drain_s=_rounded(max(last.seconds if last is not None else 0.0, self.running_s(now))),
            drain_bytes_per_s=round(last.bytes_per_s, 1) if last is not None else None,
            outrun=sum(record.state is State.SUPERSEDED and not record.error for record in ours),
        )

    def due_saves(self) -> list[Record]:
        """Saves of this incarnation that are, or were, to be drained."""
        return [r for r in self._facts.records.values() if r.due and r.save.incarnation == self._facts.incarnation]


def _rounded(seconds: float) -> float | None:
    return round(seconds, 3) or None


def _last(records: Iterable[Record]) -> list[Record]:
    return sorted((record for record in records if record.staged), key=lambda r: r.save)[-_LAST:]


def distance_s(records: Iterable[Record]) -> float:
    """Seconds from one of the last saves to the next; 0: there are not two."""
    began = [record.since for record in _last(records)]
    return (began[-1] - began[0]) / max(1, len(began) - 1) if began else 0.0


def _distance_steps(records: Iterable[Record]) -> int | None:
    steps = [record.save.step for record in _last(records)]
    return max(1, round((steps[-1] - steps[0]) / (len(steps) - 1))) if len(steps) > 1 else None
