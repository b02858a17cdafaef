"""What the division of a run's time needs to know of it: marks that rise, and what lay between them. Pure."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from typing import Final, NamedTuple

from ckptd.history.runs import Life, Run

CHUNK: Final = 64  # intervals whose usual duration of a step is sought together
_Duration = tuple[float, float]  # when, and how long


class Interval(NamedTuple):
    """Between two marks of a run: what happened in it."""

    start: float
    stop: float
    first: int  # the step before its first one
    last: int
    stall_s: float
    restore_s: float

    @property
    def work_s(self) -> float:
        """Without stalls and restores."""
        return max(0.0, self.stop - self.start - self.stall_s - self.restore_s)

    @property
    def steps(self) -> int:
        """In it; at least one."""
        return self.last - self.first


class Times(Life, kw_only=True):
    """Of a run: a mark or a duration is added in about constant time.

    What is divided is dropped, so its size does not grow while ``divide`` is called. Durations between two marks are
    added up when there are many.
    """

    at: float  # up to which the time is divided: the begin of the run at first
    step: int = -1  # that was reached then: the one that was loaded
    divided: bool = False  # some of it is
    reached: int = -1  # the last step known to have been done before the run
    top: int = -1  # the last step of the run, also of marks that are dropped
    marks: list[tuple[float, int]]  # time and step, both rising
    stalls: list[_Duration]
    restores: list[_Duration]

    def mark(self, at: float, step: int) -> None:
        """The run had reached the step. One that an earlier mark has too adds nothing."""
        self.top = max(self.top, step)
        place = bisect_right(self.marks, (at, step))
        if step <= (self.marks[place - 1][1] if place else self.step):
            return
        above = bisect_right(self.marks, step, place, key=lambda mark: mark[1])
        self.marks[place:above] = [(at, step)]

    def stall(self, at: float, seconds: float) -> None:
        """The training waited."""
        self._keep(self.stalls, at, seconds)

    def restore(self, at: float, seconds: float) -> None:
        """A load ended."""
        self._keep(self.restores, at, seconds)

    def _keep(self, durations: list[_Duration], at: float, seconds: float) -> None:
        durations.append((at, seconds))
        if len(durations) >= 2 * (len(self.marks) + CHUNK):
            between: dict[int, _Duration] = {}
            for begin, duration in sorted(durations):
                place = bisect_left(self.marks, (begin, -1))
                between[place] = (begin, between.get(place, (0.0, 0.0))[1] + duration)
            durations[:] = between.values()

    def intervals(self, most: int | None = None) -> list[Interval]:
        """Up to each mark, or to the first ones."""
        stalls, restores = _Sums(self.stalls), _Sums(self.restores)
        found: list[Interval] = []
        at, step = self.at, self.step
        for mark_at, mark_step in self.marks[:most]:
            stop = max(at, mark_at)
            stall = min(stalls.until(stop), stop - at)
            found.append(Interval(at, stop, step, mark_step, stall, min(restores.until(stop), stop - at - stall)))
            at, step = stop, mark_step
        return found

    def drop(self, intervals: list[Interval]) -> None:
        """The first ones are divided for good."""
        self.at, self.step, self.divided = intervals[-1].stop, intervals[-1].last, True
        del self.marks[: len(intervals)]
        for durations in (self.stalls, self.restores):
            durations[:] = [one for one in durations if one[0] > self.at]


def times_of(run: Run) -> Times:
    """Of a whole run."""
    found = Times(
        began=run.began, last=run.last, ended=run.ended, how=run.how, over=run.over, at=run.began,
        step=run.restores[run.loads - 1].step if run.loads else -1, reached=run.reached,
        marks=[], stalls=[], restores=[],
    )  # fmt: skip
    for mark in run.marks:
        found.mark(mark.at, mark.step)
    found.stalls = [(save.began, save.stall_s) for save in run.saves if save.staged_s is not None]
    found.restores = [(one.at, one.seconds) for one in run.restores]
    return found


class _Sums:
    """Of durations, by when they were."""

    def __init__(self, durations: Iterable[_Duration]) -> None:
        self._left = sorted(durations, reverse=True)

    def until(self, at: float) -> float:
        """Of those that were not asked for before."""
        found = 0.0
        while self._left and self._left[-1][0] <= at:
            found += self._left.pop()[1]
        return found
