"""``ckptd status --nodes`` of a job of many nodes in the middle of a drain: two real daemons, the others are played.

One of the two coordinates, the other one answers. Measures its answer, and the complete command.
"""

import contextlib
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

from bench.large.job import LargeJob
from bench.large.plan import RANKS_PER_NODE
from bench.measure import Series
from bench.report import Row
from ckptd.shared.base.errors import CkptdError
from ckptd.shared.protocol.status import JobStatus

NODES = 1000
_BAR_S = 1.0
_REAL = 2
_SETTLE_S, _TIMEOUT_S = 300.0, 60.0  # of a peer: long, because the cores are busy
_SETTINGS = ("--drain-bandwidth", "16", "--peer-timeout-s", f"{_TIMEOUT_S:.0f}s", "--connect-timeout-s", "600s")


def measure(base: Path, repeat: int, nodes: int = NODES) -> list[Row]:
    """The rows. base: a directory on tmpfs. Raises RuntimeError if the job is not admitted."""
    with LargeJob(base, nodes, real=_REAL, timeout_s=_TIMEOUT_S, settings=_SETTINGS) as job:
        job.patience_s = _SETTLE_S
        job.connect()
        job.stage()
        _await_drain(job)
        asked = job.daemons[-1]
        answers, commands, before_s = [], [], _children_cpu_s()
        for _ in range(repeat):
            start = time.perf_counter()
            told = asked.status(nodes=True).jobs[0]
            answers.append(time.perf_counter() - start)
            missing = [node.node for node in told.nodes if node.report is None]
            if missing or len(told.nodes) != nodes:
                raise RuntimeError(f"{len(missing)} of {len(told.nodes)} nodes did not answer: {missing[:4]}")
            commands.append(_command(asked.arena))
        cpu_s = (_children_cpu_s() - before_s) / repeat  # before the other processes end and count
    answered, typed = Series("s", tuple(answers)), Series("s", tuple(commands))
    what = f"status of {nodes:,} nodes x {RANKS_PER_NODE} ranks"
    return [
        Row(f"{what}: the daemon's answer", answered, answered.median, "s", bar=_BAR_S),
        Row(f"{what}: the command", typed, typed.median, "s", bar=_BAR_S, note=f"{cpu_s:.2f} s of a processor"),
    ]


def _children_cpu_s() -> float:
    """CPU seconds of processes that have ended: the commands, while the daemons run."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _command(arena: str) -> float:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("CKPTD_")}
    start = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "ckptd", "status", "--nodes", "--arena", arena],
        check=True, stdout=subprocess.DEVNULL, env=environ,
    )  # fmt: skip
    return time.perf_counter() - start


def _await_drain(job: LargeJob) -> None:
    """Waits until every node that is played has reported its progress."""
    deadline = time.monotonic() + _SETTLE_S
    told: JobStatus | None = None
    while time.monotonic() < deadline:
        with contextlib.suppress(CkptdError):
            told = next(iter(job.daemons[-1].status(nodes=True).jobs), None)
        if told is not None and sum(node.drain_nbytes_done > 0 for node in told.nodes) >= job.nodes - _REAL:
            return
        time.sleep(1.0)
    raise RuntimeError(f"no drain of {job.nodes} nodes within {_SETTLE_S:.0f} s: {told and told.checkpoints[:1]}")
