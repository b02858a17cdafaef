"""Where the time of a job went: its wall time in spans, each of one kind. Pure. docs/history.md defines the kinds."""

import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from ckptd.history.runs import CLOSED, Run
from ckptd.history.spread import percentile
from ckptd.history.times import CHUNK, Interval, Times, times_of
from ckptd.shared.protocol.status import Goodput

SLOW: Final = 2.0  # times the usual duration of a step: what takes longer is no training


class Kind(enum.StrEnum):
    """What a span of time was used for."""

    TRAINING = "training"  # steps that count
    REPEATED = "repeated"  # steps whose result was lost, or that had been done before
    STALL = "stall"  # the training waited for a save
    RESTORE = "restore"
    START = "start"  # from the end of a run to the first step of the next
    UNEXPLAINED = "unexplained"
    IDLE = "idle"  # from the end of a run that closed to the begin of the next: no user wanted to train


class Span(NamedTuple):
    """Of wall time. run: its place in the list of runs."""

    start: float
    stop: float
    kind: Kind
    run: int


def step_s(runs: Iterable[Run]) -> float | None:
    """Usual duration of a step of these runs, without stalls; None: no run has two marks."""
    known = [seconds for run in runs for seconds in _durations(times_of(run).intervals()[1:])]
    return percentile(known, 0.5) if known else None


def _durations(intervals: Iterable[Interval]) -> list[float]:
    """Of a step in each."""
    return [one.work_s / one.steps for one in intervals if one.work_s > 0]


class Course(msgspec.Struct, kw_only=True):
    """What is handed on where the division of a job's time continues."""

    known: list[float] = []  # durations of a step of the last intervals that were divided
    own: bool = False  # these are of the present run

    def divided(self, times: Times, intervals: Sequence[Interval]) -> Iterator[tuple[Kind, float]]:
        """The next intervals of the run: up to CHUNK.

        What a step takes usually is known from these and the CHUNK before: so a run is divided before it is over.
        """
        first = not times.divided
        own = _durations(intervals[first:])
        beside = self.known if self.own or not own else []
        usual = percentile([*beside, *own], 0.5) if beside or own else None
        if own:
            self.known, self.own = own, True
        for place, one in enumerate(intervals):
            begins = first and place == 0
            trained = min(one.work_s, usual * one.steps if begins else SLOW * usual * one.steps) if usual else 0.0
            other = Kind.START if begins and usual else Kind.UNEXPLAINED
            again = trained * max(0, min(one.last, times.reached) - one.first) / one.steps
            yield from ((other, one.work_s - trained), (Kind.RESTORE, one.restore_s), (Kind.REPEATED, again))
            yield from ((Kind.TRAINING, trained - again), (Kind.STALL, one.stall_s))
        times.divided = True


def spans(runs: Sequence[Run]) -> list[Span]:
    """The wall time from the begin of the first run to the end of the last, without a gap."""
    course = Course()
    ends = [*(run.began for run in runs[1:]), *(run.end for run in runs[-1:])]
    return [
        span
        for place, (run, stop) in enumerate(zip(runs, ends, strict=True))
        for span in of_run(times_of(run), stop, course, place)
    ]


def of_run(times: Times, stop: float, course: Course, place: int = 0) -> list[Span]:
    """What is left of the run's time until stop, when the next one begins. course: is the next run's then."""
    after = Kind.IDLE if times.how == CLOSED else Kind.START
    found = list(_laid_out(_parts(times, min(times.end, stop), course), times.at, stop, place, after))
    course.own = False
    return found


def first_chunk(times: Times, course: Course) -> list[Span]:
    """Divides the next CHUNK intervals of the run for good, if so many and half as many more are known; else none."""
    if len(times.marks) < CHUNK + CHUNK // 2:
        return []
    intervals = times.intervals(CHUNK)
    found = list(_laid_out(course.divided(times, intervals), intervals[0].start, intervals[-1].stop, 0, Kind.START))
    times.drop(intervals)
    return found


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
    total = sum(sums.values()) - sums[Kind.IDLE]
    return Goodput(
        total_s=total, training_s=sums[Kind.TRAINING], stall_s=sums[Kind.STALL], restore_s=sums[Kind.RESTORE],
        repeated_s=sums[Kind.REPEATED], start_s=sums[Kind.START], unexplained_s=sums[Kind.UNEXPLAINED],
        idle_s=sums[Kind.IDLE],
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


def _laid_out(parts: Iterable[tuple[Kind, float]], start: float, stop: float, run: int, after: Kind) -> Iterator[Span]:
    """One after the other. after: what is left until stop."""
    for kind, seconds in parts:
        end = min(start + seconds, stop)
        if end > start:
            yield Span(start, end, kind, run)
            start = end
    if stop > start:
        yield Span(start, stop, after, run)


def _parts(times: Times, end: float, course: Course) -> Iterator[tuple[Kind, float]]:
    intervals = times.intervals()
    if not intervals and not times.divided:
        restored = min(sum(seconds for _, seconds in times.restores), max(0.0, end - times.began))
        yield Kind.START, end - times.began - restored
        yield Kind.RESTORE, restored
        return
    left = end - (intervals[-1].stop if intervals else times.at)
    last = intervals[not times.divided :][-(CHUNK // 2) :]
    for place in range(0, len(intervals), CHUNK):
        yield from course.divided(times, intervals[place : place + CHUNK])
    yield from _tail(times, last, left)


def _tail(times: Times, last: Sequence[Interval], left: float) -> Iterator[tuple[Kind, float]]:
    """After the last mark: training, at most as long as usual until the next one."""
    usual = percentile([one.stop - one.start for one in last] or [0.0], 0.5)
    trained = min(left, SLOW * usual)
    if times.failed:
        yield Kind.REPEATED, trained
    elif not times.over:
        yield Kind.TRAINING, trained
    yield Kind.UNEXPLAINED, left if times.over and not times.failed else left - trained
