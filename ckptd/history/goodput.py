"""Where the time of a job went: its wall time in spans, each of one kind. Pure. docs/history.md defines the kinds."""

import enum
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import msgspec

from ckptd.history.runs import Mark, Run
from ckptd.history.spread import percentile

SLOW: Final = 2.0  # times the usual duration of a step: what takes longer is no training


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


class Goodput(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds by what they were used for; ettr: effective training time ratio, training_s / total_s."""

    total_s: float
    training_s: float
    stall_s: float
    restore_s: float
    repeated_s: float
    start_s: float
    unexplained_s: float
    ettr: float | None  # None: no time has passed
    failures: int  # runs that ended without their own doing
    step_s: float | None  # usual duration of a step


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
    known = [one.work_s / one.steps for run in runs for one in _intervals(run)[1:] if one.work_s > 0]
    return percentile(known, 0.5) if known else None


def spans(runs: Sequence[Run]) -> list[Span]:
    """The wall time from the begin of the first run to the end of the last, without a gap."""
    found: list[Span] = []
    usual = step_s(runs)
    reached = -1
    for place, run in enumerate(runs):
        stop = runs[place + 1].began if place + 1 < len(runs) else run.end
        reached = max([reached, *(r.step + r.lost_steps for r in run.restores if r.lost_steps is not None)])
        seconds = step_s([run]) or usual
        found += _laid_out(_of_run(run, min(run.end, stop), reached, seconds), run.began, stop, place)
        reached = max(reached, run.top)
    return found


def totals(found: Iterable[Span], runs: Sequence[Run]) -> Goodput:
    """Sums of spans of these runs."""
    sums = dict.fromkeys(Kind, 0.0)
    for span in found:
        sums[span.kind] += span.stop - span.start
    total = sum(sums.values())
    return Goodput(
        total_s=total, training_s=sums[Kind.TRAINING], stall_s=sums[Kind.STALL], restore_s=sums[Kind.RESTORE],
        repeated_s=sums[Kind.REPEATED], start_s=sums[Kind.START], unexplained_s=sums[Kind.UNEXPLAINED],
        ettr=sums[Kind.TRAINING] / total if total > 0 else None, failures=sum(run.failed for run in runs),
        step_s=step_s(runs),
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


def _intervals(run: Run) -> list[_Interval]:
    """Up to each mark of a higher step than those before; the first one begins with the run."""
    stalls = _Sums((save.began, save.stall_s) for save in run.saves if save.staged_s is not None)
    restores = _Sums((one.at, one.seconds) for one in run.restores)
    found: list[_Interval] = []
    at, step = run.began, run.restores[-1].step if run.restores else -1
    for mark in _rising(run.marks, step):
        stall = min(stalls.until(mark.at), mark.at - at)
        found.append(_Interval(at, mark.at, step, mark.step, stall, min(restores.until(mark.at), mark.at - at - stall)))
        at, step = mark.at, mark.step
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


def _of_run(run: Run, end: float, reached: int, usual: float | None) -> Iterator[tuple[Kind, float]]:
    intervals = _intervals(run)
    if not intervals:
        restored = min(sum(one.seconds for one in run.restores), max(0.0, end - run.began))
        yield Kind.START, end - run.began - restored
        yield Kind.RESTORE, restored
        return
    for place, one in enumerate(intervals):
        trained = min(one.work_s, SLOW * usual * one.steps if place else usual * one.steps) if usual else 0.0
        other = Kind.START if place == 0 and usual else Kind.UNEXPLAINED
        again = trained * max(0, min(one.last, reached) - one.first) / one.steps
        yield from ((other, one.work_s - trained), (Kind.RESTORE, one.restore_s), (Kind.REPEATED, again))
        yield from ((Kind.TRAINING, trained - again), (Kind.STALL, one.stall_s))
    yield from _tail(run, intervals, end)


def _tail(run: Run, intervals: Sequence[_Interval], end: float) -> Iterator[tuple[Kind, float]]:
    """After the last mark: training, at most as long as usual until the next one."""
    left = end - intervals[-1].stop
    usual = percentile([one.stop - one.start for one in intervals[1:]] or [0.0], 0.5)
    trained = min(left, SLOW * usual)
    if run.failed:
        yield Kind.REPEATED, trained
    elif not run.over:
        yield Kind.TRAINING, trained
    yield Kind.UNEXPLAINED, left if run.over and not run.failed else left - trained
