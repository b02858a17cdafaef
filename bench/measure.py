"""Timing: wall and CPU seconds of a call and of the process tree, medians, interleaving."""

import dataclasses
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

Mark = TypeVar("Mark")
Result = TypeVar("Result")

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Sample:
    """One timed call. cpu_s counts this process and everything below it."""

    seconds: float
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Series:
    """Repeated measurements of one thing, in one unit."""

    unit: str
    values: tuple[float, ...]
    cpu_s: float | None = None

    @property
    def median(self) -> float:
        """Median of the values."""
        return statistics.median(self.values)

    @property
    def low(self) -> float:
        """Smallest value."""
        return min(self.values)

    @property
    def high(self) -> float:
        """Largest value."""
        return max(self.values)

    def as_json(self) -> dict[str, Any]:
        """The values and their median."""
        return dataclasses.asdict(self) | {"median": self.median, "low": self.low, "high": self.high}

    def scaled(self, factor: float, unit: str) -> "Series":
        """The same measurements in another unit."""
        return Series(unit, tuple(value * factor for value in self.values), self.cpu_s)

    def rate(self, nbytes: int) -> "Series":
        """Seconds per nbytes as GB/s (1e9 bytes)."""
        return Series("GB/s", tuple(nbytes / value / 1e9 for value in self.values), self.cpu_s)


def text(series: Series | None) -> str:
    """Median (min-max) unit, in three digits."""
    if series is None:
        return "-"
    span = f" ({digits(series.low)}-{digits(series.high)})" if len(series.values) > 1 else ""
    return f"{digits(series.median)}{span} {series.unit}"


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table for a page; numbers are right-aligned."""
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def digits(value: float) -> str:
    """Three digits of a number."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def seconds(samples: list[Sample]) -> Series:
    """Wall seconds of samples, with the median of their CPU seconds."""
    return Series("s", tuple(s.seconds for s in samples), statistics.median(s.cpu_s for s in samples))


def timed(call: Callable[[], object]) -> Sample:
    """Wall and CPU seconds of one call."""
    cpu_s = tree_cpu_s()
    start = time.perf_counter()
    call()
    stop = time.perf_counter()
    return Sample(stop - start, tree_cpu_s() - cpu_s)


def interleave(
    repeat: int, yardstick: Callable[[], Mark], measured: Callable[[], Result]
) -> tuple[list[Mark], list[Result]]:
    """Results of both, with a yardstick before and after each measurement: the speed of a shared machine varies."""
    marks: list[Mark] = [yardstick()]
    results: list[Result] = []
    for _ in range(repeat):
        results.append(measured())
        marks.append(yardstick())
    return marks, results


def descendants(root: int) -> Iterator[int]:
    """Process ids of root and everything below it."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _stat_fields(int(entry.name))):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    queue = [root]
    while queue:
        pid = queue.pop()
        yield pid
        queue += children.get(pid, [])


def tree_cpu_s(root: int | None = None) -> float:
    """CPU seconds of a process (this one) and everything below it, with reaped processes."""
    total = 0.0
    for pid in descendants(root or os.getpid()):
        if fields := _stat_fields(pid):
            total += sum(int(ticks) for ticks in fields[11:15]) * _TICK_S
    return total


def running_cpu_s(root: int) -> float:
    """CPU seconds of the living threads below root, to the nanosecond: for measuring almost nothing."""
    total_ns = 0
    for pid in descendants(root):
        for task in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            total_ns += int(task.read_text().split()[0])
    return total_ns / 1e9


def own_memory_nbytes(pid: int) -> int:
    """RssAnon + RssFile of a process: its own memory, without its mapped arena."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return sum(int(status[key].split()[0]) * 1024 for key in ("RssAnon", "RssFile"))


def _stat_fields(pid: int) -> list[str]:
    """Fields of /proc/pid/stat from the state (third) on; none if the process has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
