"""Where the time of a job went: its wall time in spans, each of one kind. Pure. docs/history.md defines the kinds."""

import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from ckptd.history.runs import Mark, Run
from ckptd.history.spread import percentile
from ckptd.shared.protocol.status import Goodput

SLOW: Final = 2.0  # times the usual duration of a step: what takes longer is no training
CHUNK: Final = 64  # intervals whose usual duration of a step is sought together


class Kind(enum.StrEnum):
    """What a span of time was used for."""

    TRAINING = "training"  # steps that count
    REPEATED = "repeated"  # steps whose result was lost, or that had been done before
    STALL = "stall"  # the training waited for a save
    RESTORE = "restore"
    START = "start"  # from the end of a run to the first step of the next
    UNEXPLAINED = "unexplained"


class Span(NamedTuple):
    """Of wall time. run: its place in the list of runs."""

    start: float
    stop: float
    kind: Kind
    run: int


class _Interval(NamedTuple):
    """Between two marks of a run: what happened in it."""

    start: float
    stop: float
    first: int  # the step before its first one
    last: int
    stall_s: float
    restore_s: float

    @property
    def work_s(self) -> float:
        return max(0.0, self.stop - self.start - self.stall_s - self.restore_s)

    @property
    def steps(self) -> int:
        return self.last - self.first


def step_s(runs: Iterable[Run]) -> float | None:
    """Usual duration of a step of these runs, without stalls; None: no run has two marks."""
    known = [seconds for run in runs for seconds in _durations(_intervals(run)[1:])]
    return percentile(known, 0.5) if known else None


def _durations(intervals: Iterable[_Interval]) -> list[float]:
    """Of a step in each."""
    return [one.work_s / one.steps for one in intervals if one.work_s > 0]


class Course(msgspec.Struct, kw_only=True):
    """Up to where the time of a job is divided for good, and what the division of the rest needs to know of it."""

    reached: int = -1  # the last step of the runs before
    known: list[float] = []  # durations of a step of the last intervals that were divided
    own: bool = False  # these are of the present run
    at: float | None = None  # the mark of the present run up to which its time is divided; None: none of it is
    step: int = -1  # of that mark

    def divided(self, intervals: Sequence[_Interval]) -> Iterator[tuple[Kind, float]]:
        """The next intervals of the present run: up to CHUNK.

        What a step takes usually is known from these and the CHUNK before: so a run is divided before it is over.
        """
        first = self.at is None
        own = _durations(intervals[first:])
        beside = self.known if self.own or not own else []
        usual = percentile([*beside, *own], 0.5) if beside or own else None
        if own:
            self.known, self.own = own, True
        for place, one in enumerate(intervals):
            begins = first and place == 0
            trained = min(one.work_s, usual * one.steps if begins else SLOW * usual * one.steps) if usual else 0.0
            other = Kind.START if begins and usual else Kind.UNEXPLAINED
            again = trained * max(0, min(one.last, self.reached) - one.first) / one.steps
            yield from ((other, one.work_s - trained), (Kind.RESTORE, one.restore_s), (Kind.REPEATED, again))
            yield from ((Kind.TRAINING, trained - again), (Kind.STALL, one.stall_s))
        self.at, self.step = intervals[-1].stop, intervals[-1].last

    def begin(self, run: Run) -> None:
        """Of the run, and not of what was divided before."""
        self.reached = max([self.reached, *(r.step + r.lost_steps for r in run.restores if r.lost_steps is not None)])

    def end(self, run: Run) -> None:
        """The next run begins."""
        self.reached = max(self.reached, run.top, self.step)
        self.own, self.at, self.step = False, None, -1


def spans(runs: Sequence[Run], course: Course | None = None) -> list[Span]:
    """The wall time from the begin of the first run to the end of the last, without a gap. course: it is continued."""
    course = course if course is not None else Course()
    ends = [*(run.began for run in runs[1:]), *(run.end for run in runs[-1:])]
    return [
        span
        for place, (run, stop) in enumerate(zip(runs, ends, strict=True))
        for span in of_run(run, stop, course, place)
    ]


def of_run(run: Run, stop: float, course: Course, place: int = 0) -> list[Span]:
    """The run's time until stop, when the next one begins. course: is continued, and is the next run's then."""
    begin = run.began if course.at is None else course.at
    found = list(_laid_out(_parts(run, min(run.end, stop), course), begin, stop, place))
    course.end(run)
    return found


def first_chunk(run: Run, course: Course) -> list[Span]:
    """Divides the next CHUNK intervals of the run for good, if so many and half as many more are known; else none."""
    intervals = _intervals(run, course)
    if len(intervals) < CHUNK + CHUNK // 2:
        return []
    course.begin(run)
    return list(_laid_out(course.divided(intervals[:CHUNK]), intervals[0].start, intervals[CHUNK - 1].stop, 0))


def totals(found: Iterable[Span], runs: Sequence[Run]) -> Goodput:
    """Sums of spans of these runs."""
    return goodput_of(added({}, found), sum(run.failed for run in runs), step_s(runs))


def added(spent: Mapping[Kind, float], found: Iterable[Span]) -> dict[Kind, float]:
    """Seconds by kind, with those of these spans."""
    sums = dict.fromkeys(Kind, 0.0) | dict(spent)
    for span in found:
        sums[span.kind] += span.stop - span.start
    return sums


def goodput_of(sums: Mapping[Kind, float], failures: int, step_s: float | None) -> Goodput:
    """Of seconds by kind."""
    total = sum(sums.values())
    return Goodput(
        total_s=total, training_s=sums[Kind.TRAINING], stall_s=sums[Kind.STALL], restore_s=sums[Kind.RESTORE],
        repeated_s=sums[Kind.REPEATED], start_s=sums[Kind.START], unexplained_s=sums[Kind.UNEXPLAINED],
        ettr=sums[Kind.TRAINING] / total if total > 0 else None, failures=failures, step_s=step_s,
    )  # fmt: skip


def over_time(found: Sequence[Span], buckets: int) -> list[tuple[float, dict[Kind, float]]]:
    """Begin of each of so many equal parts of the time, and its seconds by kind."""
    if not found or found[-1].stop <= found[0].start:
        return []
    begin = found[0].start
    width = (found[-1].stop - begin) / buckets
    sums = [dict.fromkeys(Kind, 0.0) for _ in range(buckets)]
    for span in found:
        first = min(buckets - 1, int((span.start - begin) / width))
        last = min(buckets - 1, int((span.stop - begin) / width))
        for number in range(first, last + 1):
            low, high = begin + number * width, begin + (number + 1) * width
            high = span.stop if number == buckets - 1 else high
            sums[number][span.kind] += max(0.0, min(span.stop, high) - max(span.start, low))
    return [(begin + number * width, one) for number, one in enumerate(sums)]


def _laid_out(parts: Iterable[tuple[Kind, float]], start: float, stop: float, run: int) -> Iterator[Span]:
    """One after the other; what is left until stop is the way to the next run."""
    for kind, seconds in parts:
        end = min(start + seconds, stop)
        if end > start:
            yield Span(start, end, kind, run)
            start = end
    if stop > start:
        yield Span(start, stop, Kind.START, run)


def _intervals(run: Run, course: Course | None = None) -> list[_Interval]:
    """Up to each mark of a higher step than those before; the first one begins with the run, or where course ends."""
    stalls = _Sums((save.began, save.stall_s) for save in run.saves if save.staged_s is not None)
    restores = _Sums((one.at, one.seconds) for one in run.restores)
    found: list[_Interval] = []
    at, step = run.began, run.restores[-1].step if run.restores else -1
    if course is not None and course.at is not None:
        at, step = course.at, course.step
        stalls.until(at), restores.until(at)
    for mark in _rising(run.marks, step):
        stop = max(at, mark.at)
        stall = min(stalls.until(stop), stop - at)
        found.append(_Interval(at, stop, step, mark.step, stall, min(restores.until(stop), stop - at - stall)))
        at, step = stop, mark.step
    return found


class _Sums:
    """Of durations, by when they were."""

    def __init__(self, durations: Iterable[tuple[float, float]]) -> None:
        self._left = sorted(durations, reverse=True)

    def until(self, at: float) -> float:
        """Of those that were not asked for before."""
        found = 0.0
        while self._left and self._left[-1][0] <= at:
            found += self._left.pop()[1]
        return found


def _rising(marks: Iterable[Mark], step: int) -> Iterator[Mark]:
    for mark in marks:
        if mark.step > step:
            step = mark.step
            yield mark


def _parts(run: Run, end: float, course: Course) -> Iterator[tuple[Kind, float]]:
    intervals = _intervals(run, course)
    if not intervals and course.at is None:
        restored = min(sum(one.seconds for one in run.restores), max(0.0, end - run.began))
        yield Kind.START, end - run.began - restored
        yield Kind.RESTORE, restored
        return
    left = end - (intervals[-1].stop if intervals else course.at or end)
    last = intervals[course.at is None :][-(CHUNK // 2) :]
    course.begin(run)
    for place in range(0, len(intervals), CHUNK):
        yield from course.divided(intervals[place : place + CHUNK])
    yield from _tail(run, last, left)


def _tail(run: Run, last: Sequence[_Interval], left: float) -> Iterator[tuple[Kind, float]]:
    """After the last mark: training, at most as long as usual until the next one."""
    usual = percentile([one.stop - one.start for one in last] or [0.0], 0.5)
    trained = min(left, SLOW * usual)
    if run.failed:
        yield Kind.REPEATED, trained
    elif not run.over:
        yield Kind.TRAINING, trained
    yield Kind.UNEXPLAINED, left if run.over and not run.failed else left - trained
