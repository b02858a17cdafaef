"""The phases of a job of real daemons: wall time of each, memory and idle CPU of its daemons, and the bars of these."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from bench.large.daemon import Sample
from bench.nodes.job import DRAINED, KEPT, RealJob, Shape
from ckptd.shared.protocol.messages import Milestone, Tier

RSS_BAR_MIB, IDLE_BAR_PERCENT = 60.0, 0.2  # of a daemon that coordinates nothing
MOVED_BAR = 1.05  # times what ranks of another world need


class Row(NamedTuple):
    """One figure. bar: what it must not exceed; None: it is a fact."""

    name: str
    value: float
    unit: str
    note: str = ""
    bar: float | None = None

    @property
    def missed(self) -> bool:
        """Whether the bar was not kept."""
        return self.bar is not None and self.value > self.bar


def run(base: Path, store: Path, shape: Shape, *, idle_s: float = 20.0, show: Callable[[Row], None]) -> list[Row]:
    """All phases, one after the other; each row is shown when it is there. Raises RuntimeError: see RealJob.

    idle_s: how long nothing is said, to see what daemons use then; 0: it is not measured.
    """
    rows: list[Row] = []

    def add(row: Row) -> None:
        rows.append(row)
        show(row)

    def timed(name: str, phase: Callable[[], None], note: str = "") -> None:
        began = time.monotonic()
        phase()
        add(Row(name, time.monotonic() - began, "s", note))

    with RealJob(base, store, shape) as job:
        timed("start of the daemons", job.start_daemons, f"{shape.nodes} interpreters at once, until all answer")
        timed("connect", job.connect, "with the start of the ranks' processes")
        _save(job, DRAINED, (Milestone.STAGED, Milestone.DURABLE), add)
        _save(job, KEPT, (Milestone.STAGED, Milestone.PROTECTED), add)
        if idle_s:
            _used(job, idle_s, add)
        lost = job.one_of_each_set()
        nodes = "node" if len(lost) == 1 else "nodes"
        timed(f"loss of {len(lost)} {nodes} noticed", lambda: job.lose(lost), "one of each set, with its memory")
        timed("restart of their daemons", job.start_daemons)
        timed("connect again", job.connect, "all ranks in new processes, as after a failure")
        timed("load", job.load, f"of {len(lost)} ranks from parity")
        tiers, rebuilt = job.compare(), {Tier.ARENA: len(job.ranks) - len(lost), Tier.REBUILT: len(lost)}
        if tiers != rebuilt:
            raise RuntimeError(f"ranks have read from {_text(tiers)}, and should have from {_text(rebuilt)}")
        fewer = max(1, 3 * shape.nodes // 4)
        job.shrink(fewer)
        timed(f"connect of {fewer} ranks", job.connect)
        timed(f"load of {fewer} ranks", job.load, "each its share of what all saved, from the nodes that have it")
        needed = job.check_shares()
        note = f"of {needed / 2**20:.1f} MiB that ranks needed of other nodes"
        add(Row("bytes moved", job.pulled() / needed, "times", note, MOVED_BAR))
    return rows


def _save(job: RealJob, step: int, milestones: tuple[Milestone, ...], add: Callable[[Row], None]) -> None:
    job.prepare(step)
    began = time.monotonic()
    job.hand_over()
    for milestone in milestones:
        job.reach(step, milestone)
        add(Row(f"step {step} {milestone}", time.monotonic() - began, "s", "since the first rank handed over"))


def _used(job: RealJob, seconds: float, add: Callable[[Row], None]) -> None:
    """Nothing is said for so long: of the coordinator, and of the others the one that uses most and their mean."""
    before = job.samples()
    time.sleep(seconds)
    after = job.samples()
    shares = [100 * (now.cpu_s - then.cpu_s) / seconds for then, now in zip(before, after, strict=True)]
    others = len(shares) - 1
    add(Row("memory of a daemon", max(map(_rss, after[1:])), "MiB", "the most; without its arena", RSS_BAR_MIB))
    add(Row("idle CPU of a daemon", sum(shares[1:]) / others, "%", f"of a core, mean of {others}", IDLE_BAR_PERCENT))
    add(Row("memory of the coordinator", _rss(after[0]), "MiB"))
    add(Row("idle CPU of the coordinator", shares[0], "%", "of a core"))


def _text(tiers: dict[Tier, int]) -> str:
    return ", ".join(f"{tier} {count}" for tier, count in sorted(tiers.items()))


def _rss(sample: Sample) -> float:
    return sample.rss_mib
