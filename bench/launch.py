"""One row: starts its ranks as torchrun would, watches the machine's memory, ends whatever they leave behind.

Each row has processes of its own, so that threads, memory and shared memory of one do not taint the next.
"""

import bisect
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.measure import Series
from bench.peer_report import PeerResult
from bench.peers import Kind

_END_S = 5.0
_PERIOD_S = 0.05
_SHM = Path("/dev/shm")  # noqa: S108  (looked at; ours bear our name)
_SOCKETS = Path("/tmp/ckpt_sock")  # noqa: S108  (DLRover's; likewise)


@dataclass(frozen=True, slots=True)
class Job:
    """What every row measures. nbytes: of all ranks' states; shm, disk: directories for rows to make theirs in."""

    nbytes: int
    repeat: int
    threads: int
    shm: Path
    disk: Path
    deadline_s: float = 240.0  # for one row


def measure(job: Job, kind: Kind, ranks: int) -> PeerResult:
    """The row, or why there is none."""
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
    """Of each save what the slowest rank saw."""
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
    """A name that nobody else has, and directories of that name."""

    name: str
    shm: Path
    disk: Path

    @property
    def result(self) -> Path:
        """Where ranks write what they found, each with its number as a suffix."""
        return self.disk / "result"


@contextlib.contextmanager
def _row(job: Job) -> Iterator["_Places"]:
    """What one row has to itself. At the end nothing of its name is left."""
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
        with contextlib.suppress(OSError):  # somebody else's sockets may lie there
            _SOCKETS.rmdir()


def _run(job: Job, kind: Kind, ranks: int, places: "_Places") -> str:
    """Runs all ranks to their end; why there is no result, empty when there is."""
    command = [sys.executable, "-W", "ignore", "-m", "bench.rank", kind.name]
    command += ["--nbytes", str(job.nbytes), "--repeat", str(job.repeat), "--threads", str(job.threads)]
    command += ["--shm", str(places.shm), "--disk", str(places.disk), "--result", str(places.result)]
    port, log = _free_port(), places.disk / "log"
    processes: list[subprocess.Popen[bytes]] = []
    with log.open("wb") as output:
        try:
            for rank in range(ranks):
                group = processes[0].pid if processes else 0
                environment = os.environ | _torchrun(rank, ranks, port, places.name)
                processes.append(
                    subprocess.Popen(command, env=environment, stdout=output, stderr=output, process_group=group)
                )
            problem = _wait(processes, job.deadline_s)
        finally:
            _end_group(processes)
    return f"{problem}: {_last_words(log)}" if problem else ""


def _torchrun(rank: int, ranks: int, port: int, name: str) -> dict[str, str]:
    """The variables that torchrun sets."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": name,
        "OMP_NUM_THREADS": "1",
    }


def _wait(processes: list[subprocess.Popen[bytes]], patience_s: float) -> str:
    """Until all have ended, or one has failed: then the others would wait for it. What went wrong."""
    deadline = time.monotonic() + patience_s
    while any(process.poll() is None for process in processes):
        if any(process.poll() for process in processes):
            break
        if time.monotonic() > deadline:
            return f"it did not end in {patience_s:g} s"
        time.sleep(_PERIOD_S)
    return "it failed" if any(process.poll() for process in processes) else ""


def _end_group(processes: list[subprocess.Popen[bytes]]) -> None:
    """Ends the ranks and what they started, which lives in their process group."""
    if not processes:
        return
    group = processes[0].pid  # kept by the kernel as long as the group has members
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, number)
        deadline = time.monotonic() + _END_S
        while _group_lives(group, processes) and time.monotonic() < deadline:
            time.sleep(_PERIOD_S)
    for process in processes:
        process.wait()


def _group_lives(group: int, processes: list[subprocess.Popen[bytes]]) -> bool:
    for process in processes:
        process.poll()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, 0)
        return True
    return False


def _last_words(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line]
    return (errors or lines or ["it said nothing"])[-1].strip()[:200]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


class _Memory:
    """Anonymous and shared memory of the whole machine over time: each page counts once, whoever maps it."""

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
        """Bytes beyond those in use when it began: the most until it ended, and those at the end."""
        start, stop = bisect.bisect_left(self._times, began), bisect.bisect_left(self._times, ended)
        during = self._nbytes[start:stop]
        before = self._nbytes[max(0, start - 1)]
        return (max(during) - before, during[-1] - before) if during else (0, 0)


def _in_use_nbytes() -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return sum(int(fields[key].split()[0]) for key in ("AnonPages", "Shmem")) * 1024
