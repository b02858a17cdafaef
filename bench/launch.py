"""One row: starts its ranks, watches the machine's memory, and removes all that they leave.

Each row has processes of its own, so that threads, memory and shared memory of one do not taint the next.
"""

import bisect
import contextlib
import importlib.util
import json
import os
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import torchrun
from bench.measure import Series
from bench.peer_report import PeerResult
from bench.peers import Kind

_PERIOD_S = 0.05
_SHM = Path("/dev/shm")  # noqa: S108  (looked at; ours bear our name)
_SOCKETS = Path("/tmp/ckpt_sock")  # noqa: S108  (DLRover's; likewise)


@dataclass(frozen=True, slots=True)
class Job:
    """The parameters of all rows. nbytes: of all ranks' states; shm, disk: parents of the rows' directories."""

    nbytes: int
    repeat: int
    threads: int
    shm: Path
    disk: Path
    deadline_s: float = 240.0  # for one row


def measure(job: Job, kind: Kind, ranks: int) -> PeerResult:
    """The row, or the reason why there is none."""
    if kind.needs and importlib.util.find_spec(kind.needs) is None:
        return PeerResult.absent(kind, ranks, f"not installed: {kind.install}")
    with _row(job) as places:
        watch = _Memory()
        with watch:
            problem = _run(job, kind, ranks, places)
        if problem:
            return PeerResult.absent(kind, ranks, problem)
        found = [json.loads(places.result.with_suffix(f".{rank}").read_text()) for rank in range(ranks)]
    return _result(kind, found, watch)


def _result(kind: Kind, found: list[dict[str, Any]], watch: "_Memory") -> PeerResult:
    """For each save the values of the slowest rank."""
    first, *steady = zip(*(one["saves"] for one in found), strict=True)

    def slowest(key: str) -> Series:
        return Series("s", tuple(max(save[key] for save in ranks) for ranks in steady))

    cpu = Series("s", tuple(sum(save["cpu_s"] for save in ranks) for ranks in steady))
    ratios = [save["step_ratio"] for ranks in steady for save in ranks if save["step_ratio"] is not None]
    began, ended = min(one["began"] for one in found), max(one["ended"] for one in found)
    peak, held = watch.beyond(began, ended)
    return PeerResult(
        kind.name,
        len(found),
        max(save["block_s"] for save in first),
        slowest("block_s"),
        slowest("lost_s"),
        slowest("durable_s"),
        cpu,
        statistics.median(ratios) if ratios else None,
        peak,
        held,
        max(save["nbytes"] for save in steady[-1]),
        kind.note,
    )


@dataclass(frozen=True, slots=True)
class _Places:
    """A unique name, and directories of that name."""

    name: str
    shm: Path
    disk: Path

    @property
    def result(self) -> Path:
        """The path of the ranks' results, without the number of the rank."""
        return self.disk / "result"


@contextlib.contextmanager
def _row(job: Job) -> Iterator["_Places"]:
    """The directories of one row, removed at the end with all files of its name."""
    name = f"ckptd-bench-{os.getpid()}-{time.monotonic_ns()}"
    shm, disk = job.shm / name, job.disk / name
    try:
        shm.mkdir(mode=0o700)
        disk.mkdir(mode=0o700)
        yield _Places(name, shm, disk)
    finally:
        for path in (shm, disk, _SOCKETS / name):
            shutil.rmtree(path, ignore_errors=True)
        for path in _SHM.glob(f"{name}*"):
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # sockets of other users may be there
            _SOCKETS.rmdir()


def _run(job: Job, kind: Kind, ranks: int, places: "_Places") -> str:
    """Runs all ranks to their end. Why there is no result; empty if there is one."""
    command = [sys.executable, "-W", "ignore", "-m", "bench.rank", kind.name]
    command += ["--nbytes", str(job.nbytes), "--repeat", str(job.repeat), "--threads", str(job.threads)]
    command += ["--shm", str(places.shm), "--disk", str(places.disk), "--result", str(places.result)]
    return torchrun.run(command, ranks, places.disk, job.deadline_s, {})


class _Memory:
    """Anonymous and shared memory of the machine over time; each page counts once."""

    def __init__(self, read: Callable[[], int] | None = None) -> None:
        self._read = read or _in_use_nbytes
        self._times: list[float] = []
        self._nbytes: list[int] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(_PERIOD_S):
            self._times.append(time.monotonic())
            self._nbytes.append(self._read())

    def beyond(self, began: float, ended: float) -> tuple[int, int]:
        """Growth in bytes since it began: the maximum, and at the end."""
        start, stop = bisect.bisect_left(self._times, began), bisect.bisect_left(self._times, ended)
        during = self._nbytes[start:stop]
        before = self._nbytes[max(0, start - 1)]
        return (max(during) - before, during[-1] - before) if during else (0, 0)


def _in_use_nbytes() -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return sum(int(fields[key].split()[0]) for key in ("AnonPages", "Shmem")) * 1024
