"""The phases of a large job, and what each costs its coordinator: CPU seconds, wall time, memory, long turns."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.large.job import LargeJob
from bench.large.plan import Done
from bench.measure import Series
from bench.report import Row
from ckptd.daemon.pace import LONG_S

_TIMEOUT_S = 10.0  # of a peer, the default of daemons
_RSS_BAR_MIB = 300.0
_BARS = {"connect": 3.0, "load": 2.0, "loss": 3.0, "restart": 3.0}  # seconds of the coordinator's CPU
SIZES = (1000,)
_BARS_FOR, _MORE_FOR = 1000, 4000  # nodes; four times as much for as many


@dataclass(frozen=True, slots=True)
class Phase:
    """What one phase cost the coordinator. long_turns: above LONG_S; longest_s: since its daemon started."""

    name: str
    wall_s: float
    cpu_s: float
    rss_mib: float
    descriptors: int
    long_turns: int
    longest_s: float
    played: Done | None = None

    def __str__(self) -> str:
        text = (
            f"{self.name:10s} {self.wall_s:7.2f} {self.cpu_s:8.2f} {self.rss_mib:8.1f} {self.descriptors:6d}"
            f" {self.long_turns:6d} {1000 * self.longest_s:8.0f}"
        )
        if self.played is not None:
            tiers = " ".join(f"{tier} {count}" for tier, count in sorted(self.played.tiers.items()))
            text += f" {self.played.cpu_s:8.2f} {self.played.downs:6d} {tiers}"
        return text


HEAD = "phase         wall s  coord s  RSS MiB    fds  turns  longest ms  crowd s  downs"


class Meter:
    """Takes phases of one job."""

    def __init__(self, job: LargeJob) -> None:
        self._job = job
        self.phases: list[Phase] = []

    def phase(self, name: str, run: Callable[[], Done | None], *, fresh: bool = False) -> None:
        """fresh: the daemon is started in it, so that all that it has used counts."""
        daemon = self._job.daemons[0]
        before, turns = (0.0, 0) if fresh else (daemon.sample().cpu_s, daemon.status().long_turns)
        began = time.monotonic()
        played = run()
        wall_s, after = time.monotonic() - began, daemon.sample()
        status = daemon.status()
        self.phases.append(
            Phase(
                name, wall_s, after.cpu_s - before, after.rss_mib, after.descriptors, status.long_turns - turns,
                status.longest_turn_s, played,
            )
        )  # fmt: skip
        print(self.phases[-1], flush=True)


def run(base: Path, nodes: int, *, patience_s: float = 300.0, idle_s: float = 10.0, real: int = 2) -> list[Phase]:
    """All phases. base: a directory on tmpfs. Raises RuntimeError when one does not end in time."""
    with LargeJob(base, nodes, real=real, timeout_s=_TIMEOUT_S, settings=("--connect-timeout-s", "600s")) as job:
        job.patience_s = patience_s
        meter = Meter(job)
        print(f"{nodes} nodes x 8 ranks\n{HEAD}", flush=True)
        meter.phase("connect", job.connect)
        _idle(meter, job, idle_s)
        meter.phase("stage", job.stage)
        meter.phase("load", job.load)
        meter.phase("loss", lambda: _loss(job, real - (-nodes // 8)))
        meter.phase("restart", lambda: _restart(job), fresh=True)
        return meter.phases


def _idle(meter: Meter, job: LargeJob, seconds: float) -> None:
    """Nothing is said: of the coordinator, and of a daemon that coordinates nothing."""
    others = job.daemons[1:]
    before = [daemon.sample().cpu_s for daemon in others]

    def wait() -> None:
        time.sleep(seconds)

    meter.phase("idle", wait)
    for daemon, cpu_s in zip(others, before, strict=True):
        now = daemon.sample()
        share = 100 * (now.cpu_s - cpu_s) / seconds
        print(f"{daemon.node}: {share:.2f} % of a core idle, {now.rss_mib:.1f} MiB, {now.descriptors} fds", flush=True)


def _loss(job: LargeJob, number: int) -> Done:
    """A node of a set without real ones goes, its job is started again on a spare one, and loads."""
    job.lose(number)
    job.end_ranks()
    job.connect()
    return job.load()


def _restart(job: LargeJob) -> None:
    job.daemons[0].kill()
    job.daemons[0].start()
    job.come_back()


def rows(phases: list[Phase], nodes: int) -> list[Row]:
    """For the report; bars are those of the size."""
    factor = {_BARS_FOR: 1, _MORE_FOR: 4}.get(nodes)
    made = []
    for phase in (phase for phase in phases if phase.name in _BARS):
        name = f"{nodes:,} nodes x 8 ranks, {phase.name}: CPU of the coordinator"
        note = f"{phase.wall_s:.1f} s in all; {phase.long_turns} turns above {1000 * LONG_S:.0f} ms"
        series = Series("s", (phase.cpu_s,))
        made.append(Row(name, series, phase.cpu_s, "s", bar=factor and factor * _BARS[phase.name], note=note))
    most = max(phase.rss_mib for phase in phases)
    bar = _RSS_BAR_MIB if factor else None
    made.append(Row(f"{nodes:,} nodes: memory of the coordinator", None, most, "MiB", bar=bar))
    turns = sum(phase.long_turns for phase in phases)
    made.append(Row(f"{nodes:,} nodes: turns of its loop above 50 ms", None, turns, "", bar=0 if factor else None))
    return made
