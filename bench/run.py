"""One run: the sections in order on one node, each failure kept to its own row."""

import contextlib
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console

from bench import ckptd_rows, mesh, states, status
from bench.ckptd_rows import Bench
from bench.large import measure as large
from bench.launch import Job, measure
from bench.node import Node
from bench.peer_report import PeerResult
from bench.peers import CKPTD, DEEPSPEED, OVERLAPPED, Kind
from bench.report import Report, Row, failed, ratio
from bench.training import Training
from bench.yardsticks import Yardsticks
from ckptd.shared.base.errors import CkptdError

STATE_NBYTES = 2 << 30
SECTIONS = (
    "yardsticks",
    "steady",
    "many",
    "cold",
    "first",
    "arena",
    "slowdown",
    "overlap",
    "status",
    "large",
    "mesh",
    "peers",
)
_LOST_BAR_S, _DURABLE_BAR_S = 0.2, 1.0  # per save of a state of STATE_NBYTES, by one rank
_BALANCE_BAR = 1.01
_OVERLAPPED_BAR = 0.2  # of what the best peer costs
_OPERATIONAL = (CkptdError, OSError, RuntimeError)


@dataclass(frozen=True, slots=True)
class Run:
    """Runs the sections and fills a report."""

    report: Report
    asked_nbytes: int
    repeat: int
    only: frozenset[str]
    console: Console

    def rows(self, node: Node, shm_dir: Path, disk_dir: Path) -> None:
        """The speed budget, on one node, which is not running before and after."""
        state = states.realistic(self.asked_nbytes)
        node.start()
        spare_nbytes = ckptd_rows.MANY_COUNT * ckptd_rows.MANY_NBYTES
        sticks = Yardsticks(states.nbytes_of(state), shm_dir, disk_dir, spare_nbytes)
        with contextlib.closing(sticks):
            self._rows(Bench(node, sticks, state, self.asked_nbytes, self.repeat), Training())
        node.close()

    def peers(self, job: Job, kinds: Sequence[Kind], counts: Sequence[int]) -> None:
        """Each way of saving for each number of ranks, and the bars between them."""
        for ranks in counts:
            for kind in kinds:
                self.console.log(f"{kind.name}, ranks: {ranks}")
                self.report.peers.append(measure(job, kind, ranks))
        self.report.rows.extend(against_peers(self.report.peers, full=self.asked_nbytes >= STATE_NBYTES))

    def status(self, shm_dir: Path) -> None:
        """The time and size of the status of a large job, with separate daemons."""
        self.console.log("status")
        try:
            self.report.rows.extend(status.measure(shm_dir, self.repeat))
        except _OPERATIONAL as error:
            self.report.rows.append(failed("status", f"{type(error).__name__}: {error}"))

    def large(self, shm_dir: Path) -> None:
        """What a job of many nodes costs the daemon that coordinates it."""
        for nodes in large.SIZES:
            self.console.log(f"large: {nodes:,} nodes")
            try:
                with tempfile.TemporaryDirectory(prefix="large-", dir=shm_dir) as base:
                    self.report.rows.extend(large.rows(large.run(Path(base), nodes), nodes))
            except _OPERATIONAL as error:
                self.report.rows.append(failed(f"{nodes:,} nodes", f"{type(error).__name__}: {error}"))

    def mesh(self, node: Node) -> None:
        """The ways to divide the writes of replicas. node is not running before and after."""
        node.start()
        for result in mesh.measure(node, self.repeat):
            self.console.log(f"{result.stage}, {result.way}")
            self.report.mesh.append(result)
            if result.way == "rows":
                name = f"16 plans, rows of {result.stage}: most bytes of a rank by mean"
                self.report.rows.append(Row(name, None, result.ratio, bar=_BALANCE_BAR))
        node.close()

    def _rows(self, bench: Bench, training: Training) -> None:
        self.console.log("yardsticks")
        repeat = self.repeat if "yardsticks" in self.only else 1
        self.report.yardsticks.update(bench.yardsticks.survey(repeat, list(states.tensors(bench.state))))
        sections: dict[str, Callable[[Bench], list[Row]]] = {
            "steady": ckptd_rows.steady,
            "many": ckptd_rows.many_tensors,
            "cold": ckptd_rows.cold,
            "first": ckptd_rows.first,
            "arena": ckptd_rows.arena_restore,
            "slowdown": lambda bench: ckptd_rows.drain_slowdown(bench, training),
            "overlap": lambda bench: ckptd_rows.overlapped(bench, training),
        }
        for name, section in sections.items():
            if name in self.only:
                self.console.log(name)
                self._guarded(bench.node, name, partial(self._section, section, bench))

    def _section(self, section: Callable[[Bench], list[Row]], bench: Bench) -> None:
        self.report.rows.extend(section(bench))

    def _guarded(self, node: Node, name: str, measure: Callable[[], None]) -> None:
        """Runs one section. If it fails, its row has the reason and the next one gets a new daemon."""
        try:
            measure()
        except _OPERATIONAL as error:
            self.report.rows.append(failed(name, f"{type(error).__name__}: {error}"))
            node.stop()
            node.start()


def against_peers(peers: Sequence[PeerResult], *, full: bool) -> list[Row]:
    """Training time that ckptd's saves cost, beside that of others in the same run.

    full: the state has the size that bars in seconds are meant for; for another they are facts.
    """
    rows = []
    ran = {(peer.name, peer.ranks): peer for peer in peers if not peer.why}
    if staged := ran.get((CKPTD, 1)):
        for what, series, bar in (
            ("time lost per save", staged.lost, _LOST_BAR_S),
            ("save call -> durable", staged.durable, _DURABLE_BAR_S),
        ):
            rows.append(Row(f"in a training loop: {what}", series, series.median, "s", bar=bar if full else None))
    others = [peer for peer in ran.values() if peer.ranks == 1 and not peer.name.startswith("ckptd")]
    if (overlapped := ran.get((OVERLAPPED, 1))) and others:
        best = min(others, key=lambda peer: peer.lost.median)
        name = "training time lost per overlapped save"
        rows.append(ratio(name, overlapped.lost, best.lost, best.name, bar=_OVERLAPPED_BAR))
    if fast := ran.get((DEEPSPEED, 2)):
        for one in (peer for name in (CKPTD, OVERLAPPED) if (peer := ran.get((name, 2)))):
            name = f"training time lost per save, 2 ranks: {one.name}"
            rows.append(ratio(name, one.lost, fast.lost, fast.name, bar=1.0))
    return rows
