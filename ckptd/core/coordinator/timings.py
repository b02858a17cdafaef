"""How often the saves of a job are due, and how long the store takes for one. Pure."""

from collections.abc import Iterable

from ckptd.core.coordinator.job_state import JobState
from ckptd.core.coordinator.save_record import Record
from ckptd.core.coordinator.save_states import State
from ckptd.shared.protocol.status import PaceStatus

_LAST = 8  # saves whose distance counts


class Timings:
    """Read off the facts."""

    def __init__(self, facts: JobState) -> None:
        self._facts = facts

    def running_s(self, now: float) -> float:
        """How long the drain that runs has taken by now; 0 when none does."""
        active = self._facts.active
        record = self._facts.records.get(active) if active is not None else None
        return record.drained_s(now) if record is not None else 0.0

    def pace(self, now: float) -> PaceStatus:
        """How often a save is due, and how long the store takes for one."""
        ours = self.due_saves()
        last = self._facts.last_drain
        return PaceStatus(
            save_every_s=_rounded(distance_s(ours)),
            save_every_steps=_distance_steps(ours),
            drain_s=_rounded(max(last.seconds if last is not None else 0.0, self.running_s(now))),
            drain_bytes_per_s=round(last.bytes_per_s, 1) if last is not None else None,
            outrun=sum(record.state is State.SUPERSEDED and not record.error for record in ours),
            due_s=round(now - self._facts.due_since, 3) if self._facts.due_since is not None else 0.0,
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
