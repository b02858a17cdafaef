"""One run: the sections in order on one node, each failure kept to its own row."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console

from bench import ckptd_rows, states
from bench.ckptd_rows import Bench
from bench.measure import Series
from bench.node import Node
from bench.peers import Ckptd, DcpAsync, DcpAsyncReused, Loop, Peer, TorchSave
from bench.report import PeerResult, Report, Row, failed, ratio
from bench.training import Touching, Training
from bench.yardsticks import Yardsticks
from ckptd.protocol.errors import CkptdError

STATE_NBYTES = 2 << 30
SECTIONS = ("yardsticks", "steady", "many", "cold", "arena", "slowdown", "overlap", "peers")
_LOST_BAR_S, _DURABLE_BAR_S = 0.2, 1.0  # per save of a state of STATE_NBYTES
_OVERLAPPED = "ckptd, overlapped"
_PROBED_SAVES = 3  # before tensors are copied late
_FIRST_PROBED = 1000  # steps that the loop does not use
_OPERATIONAL = (CkptdError, OSError, RuntimeError)


@dataclass(frozen=True, slots=True)
class Run:
    """Fills a report. node is not running before and after."""

    report: Report
    node: Node
    asked_nbytes: int
    state: states.State
    repeat: int
    only: frozenset[str]
    console: Console

    def all(self, shm_dir: Path, disk_dir: Path) -> None:
        """Every chosen section; rows before peers, so that the peers find the yardsticks' memory free."""
        training = Training()
        self.node.start()
        if self.only - {"peers"}:
            spare_nbytes = ckptd_rows.MANY_COUNT * ckptd_rows.MANY_NBYTES
            sticks = Yardsticks(states.nbytes_of(self.state), shm_dir, disk_dir, spare_nbytes)
            with contextlib.closing(sticks):
                self._rows(sticks, training)
        if "peers" in self.only:
            self._peers(Loop(self.state, training, Touching(states.tensors(self.state)), disk_dir))
        self.node.close()

    def _rows(self, sticks: Yardsticks, training: Training) -> None:
        self.console.log("yardsticks")
        survey = sticks.survey(self.repeat if "yardsticks" in self.only else 1, list(states.tensors(self.state)))
        self.report.yardsticks.update(survey)
        sections: dict[str, Callable[[Bench], list[Row]]] = {
            "steady": ckptd_rows.steady,
            "many": ckptd_rows.many_tensors,
            "cold": ckptd_rows.cold,
            "arena": ckptd_rows.arena_restore,
            "slowdown": lambda bench: ckptd_rows.drain_slowdown(bench, training),
            "overlap": lambda bench: ckptd_rows.overlapped(bench, training),
        }
        bench = Bench(self.node, sticks, self.state, self.asked_nbytes, self.repeat)
        for name, section in sections.items():
            if name in self.only:
                self.console.log(name)
                self._guarded(name, partial(self._section, section, bench))

    def _section(self, section: Callable[[Bench], list[Row]], bench: Bench) -> None:
        self.report.rows.extend(section(bench))

    def _peers(self, loop: Loop) -> None:
        def ckptd() -> None:
            with self.node.client("peers") as client:
                client.prepare(self.state)
                result = loop.run(Ckptd(client), self.repeat)
            self.report.peers.append(result)
            self.report.rows.extend(self._peer_rows(result))

        def overlapped() -> None:
            with self.node.client("overlapped") as client:
                client.prepare(self.state)
                client.attach(loop.optimizer)
                for step in range(_PROBED_SAVES):
                    client.save(self.state, _FIRST_PROBED + step)
                    loop.optimizer.step()
                client.wait("durable")
                result = loop.run(Ckptd(client, _OVERLAPPED), self.repeat)
            self.report.peers.append(result)

        self.console.log("peers: ckptd")
        self._guarded("ckptd in the training loop", ckptd)
        self.console.log(f"peers: {_OVERLAPPED}")
        self._guarded("an overlapped save in the training loop", overlapped)
        self.node.stop()
        for kind in (TorchSave, DcpAsync, DcpAsyncReused):
            self.console.log(f"peers: {kind.name}")
            peer: Peer = kind()
            with contextlib.closing(peer):
                self.report.peers.append(loop.run(peer, self.repeat))
        self.report.rows.extend(self._against_peers())

    def _against_peers(self) -> list[Row]:
        """Training time lost per overlapped save, beside the best peer of this run."""
        found = next((peer for peer in self.report.peers if peer.name == _OVERLAPPED), None)
        others = [peer for peer in self.report.peers if not peer.name.startswith("ckptd")]
        if found is None or not others:
            return []
        best = min(others, key=lambda peer: peer.lost.median)
        return [ratio("training time lost per overlapped save", found.lost, best.lost, best.name, bar=0.2)]

    def _peer_rows(self, result: PeerResult) -> list[Row]:
        """The two bars that are seconds; they are meant for the full state and are facts for another."""
        judged = states.nbytes_of(self.state) >= STATE_NBYTES

        def row(name: str, series: Series, bar: float) -> Row:
            return Row(name, series, series.median, "s", bar=bar if judged else None)

        return [
            row("in a training loop: time lost per save", result.lost, _LOST_BAR_S),
            row("in a training loop: save call -> durable", result.durable, _DURABLE_BAR_S),
        ]

    def _guarded(self, name: str, measure: Callable[[], None]) -> None:
        """Runs one section. If it fails, its row says why and the next one gets a new daemon."""
        try:
            measure()
        except _OPERATIONAL as error:
            self.report.rows.append(failed(name, f"{type(error).__name__}: {error}"))
            self.node.stop()
            self.node.start()
