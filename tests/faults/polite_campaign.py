"""``python -m tests.faults.polite_campaign COUNT SEED``: lock-step ranks are told to end, politely, at random moments.

Each time all ranks save at one step, it is durable and the newest on the store, and the next run loads its very bytes.
Episodes of 25 have ranks, daemons and a seed of their own, one more than the last. In one episode of eight a checkpoint
does not fit through the store in the time that is left: then the newest durable one stays, and it is said.
"""

import argparse
import contextlib
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ckptd.arena.ask import Daemon
from ckptd.checkpoint.verify import verify_path
from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.format import arena_paths
from ckptd.store.posix.scan import scan
from ckptd.system.files import FileLayer
from tests.cluster import Node
from tests.faults.campaigns import OverdueError, ended_by_signals, no_longer_than
from tests.faults.nodes.clusters import Cluster, Ranks, Zygote, a_cluster
from tests.faults.ranks import RankError, daemons
from tests.signals import send

JOB = "job"
EPISODE = 25
TRAINER = "tests.faults.nodes.polite_trainer:PoliteTrainer"
WIDTHS = (16, 64, 160)
HOMES = ("aa", "ab", "aab", "abb", "aabb")
KINDS = ("TERM one", "USR1 one", "TERM all", "USR1 all", "ckptd drain", "daemon one", "daemon all", "everything")
_TRAIN_S, _CALL_S, _EPISODE_S = 20.0, 90.0, 900
_TIGHT = 8  # one episode of so many
_TIGHT_COUNT = 2  # each has ranks and machines of its own
_GRACE_S = 1.0  # of a daemon in such an episode
_BUSY_S = 20.0  # more, where other tests keep the cores: alone it is one
_SLOW = {"CKPTD_STOP_DRAIN_S": str(_GRACE_S), "CKPTD_DRAIN_BANDWIDTH": "1K"}


@dataclass
class Counts:
    """Of one episode, or of all."""

    kills: Counter[str] = field(default_factory=Counter)
    durable: int = 0  # the same step on all ranks, durable, the newest, loaded bit for bit
    kept: int = 0  # too much for the time: the newest durable one was loaded, and it was said
    findings: list[str] = field(default_factory=list)

    def add(self, other: "Counts") -> None:
        """Those of an episode."""
        self.kills.update(other.kills)
        self.durable, self.kept = self.durable + other.durable, self.kept + other.kept
        self.findings += other.findings

    def __str__(self) -> str:
        kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(self.kills.items()))
        head = f"{self.kills.total()} polite kills: {self.durable} durable at one step, {self.kept} kept and said"
        return f"{head}, {len(self.findings)} findings ({kinds})"


class OwnNode(Node):
    """A node whose daemon its ranks start, so that SIGTERM is all that it may get."""

    def __init__(self, name: str, store: str) -> None:
        super().__init__(store)
        self._name = name
        self.settings: dict[str, str] = {}  # of daemons that ranks will start which are forked from now on

    def environ(self, **extra: str) -> dict[str, str]:
        """With what the daemon is to know."""
        return super().environ(CKPTD_NODE=self._name, CKPTD_PEER_TIMEOUT_S="2", **self.settings, **extra)

    def pids(self) -> list[int]:
        """Of the daemon, if one runs."""
        status = self.try_status()
        return [status.pid] if status is not None else []

    def said(self) -> str:
        """The daemons' log, as long as the arena lives."""
        with contextlib.suppress(OSError), open(os.path.join(self.arena, arena_paths.LOG), encoding="utf-8") as file:
            return file.read()
        return ""


class Episode:
    """One job on ranks that stay, told to end again and again."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self._cluster, self._dice, self._name = cluster, random.Random(seed), f"seed {seed}"
        self._homes = self._dice.choice(HOMES)
        self._shape = self._dice.choice(("ddp", "fsdp2"))
        self._width = self._dice.choice(WIDTHS)
        self._saved: tuple[int, list[str]] | None = None  # step and digests of the last one
        self.counts = Counts()
        for name in sorted(set(self._homes)):  # no daemon runs yet
            cluster.nodes[name] = OwnNode(name, cluster.store)

    def ranks(self) -> Ranks:
        """Forked once; their sizes are widths here."""
        ranks = self._cluster.ranks(self._homes, JOB, (self._width,), TRAINER)
        ranks.call("build", self._shape, timeout_s=_CALL_S)
        return ranks

    def play(self, count: int) -> None:
        """So many polite kills, and a last load."""
        ranks = self.ranks()
        for number in range(count):
            self._now = f"{self._name}, kill {number} ({self._shape}, {self._homes})"
            self._load(ranks)
            kind = self._dice.choice(KINDS)
            self._now += f", {kind}"
            began = time.monotonic()
            ranks.start("train", _TRAIN_S)
            time.sleep(self._dice.random() ** 2 * 0.6)
            self._tell(ranks, kind)
            self._judge(ranks.results(_CALL_S))
            self.counts.kills[kind] += 1
            ranks.call("leave", timeout_s=_CALL_S)
            if os.environ.get("POLITE_TIMES"):
                print(f"{self._now}: {time.monotonic() - began:.2f} s", flush=True)
        self._now = f"{self._name}, end"
        self._load(ranks)
        ranks.call("leave", timeout_s=_CALL_S)
        ranks.kill()
        if problems := verify_path(os.path.join(self._cluster.store, JOB)).problems:
            self._find("damaged", str(problems))

    def _load(self, ranks: Ranks) -> None:
        """What the last run saved, bit for bit."""
        every, attach = self._dice.choice((1, 20, 1_000_000)), self._dice.random() < 0.3
        found = ranks.call("enter", JOB, every, attach, timeout_s=_CALL_S)
        if self._saved is None:
            return
        step, digests = self._saved
        if {one["step"] for one in found} != {step}:
            self._find("lost", f"step {step} was durable, loaded are {[one['step'] for one in found]}")
        elif [one["digest"] for one in found] != digests:
            self._find("bytes", f"step {step} is not what was saved")

    def _tell(self, ranks: Ranks, kind: str) -> None:
        """The notice."""
        number = signal.SIGUSR1 if kind.startswith("USR1") else signal.SIGTERM
        nodes = [self._cluster.nodes[name] for name in sorted(set(self._homes))]
        if kind == "ckptd drain":
            with Daemon(self._dice.choice(nodes).arena) as daemon:
                daemon.drain(JobKey(self._cluster.store, JOB), preempt=True)
            return
        if kind.startswith("daemon") or kind == "everything":
            for node in [self._dice.choice(nodes)] if kind == "daemon one" else nodes:
                for pid in node.pids():
                    send(pid, signal.SIGTERM)
        if not kind.startswith("daemon"):
            told = [self._dice.choice(ranks.all)] if kind.endswith("one") else ranks.all
            for rank in told:
                send(rank.pid, number)
                time.sleep(self._dice.random() * 0.02)

    def _judge(self, said: list[dict[str, Any]]) -> None:
        """One step, durable, the newest."""
        before = len(self.counts.findings)
        steps = {one["step"] for one in said}
        if len(steps) != 1 or None in steps:
            self._find("steps", f"{[one['step'] for one in said]}; {[one['logs'][-3:] for one in said]}")
            return
        if texts := [one["said"] for one in said if one["said"]]:
            self._find("not durable", f"step {steps}: {texts[0]}; {said[0]['logs'][-3:]}")
        (step,) = steps
        newest = self._newest()
        if newest is None or newest.step != step:
            self._find("not the newest", f"step {step} was saved, the store has {newest}")
        if len(self.counts.findings) == before:
            self.counts.durable += 1
        self._saved = (step, [one["digest"] for one in said])

    def _newest(self) -> SaveId | None:
        """On the store."""
        found = scan(FileLayer(), JobKey(self._cluster.store, JOB)).committed
        return max((one.committed.save for one in found), default=None)

    def play_tight(self, count: int) -> None:
        """Everything is told to end when the store has become too slow, and the memory goes with the machines."""
        nodes = [self._cluster.nodes[name] for name in sorted(set(self._homes))]
        for number in range(count):
            self._now = f"{self._name}, tight kill {number} ({self._shape}, {self._homes})"
            self._at_speed(nodes, {})
            self._save_once()
            self._lose(nodes)
            self._at_speed(nodes, _SLOW)
            self._end_slowly(nodes)
            self._lose(nodes)
            self.counts.kills["tight"] += 1
        self._at_speed(nodes, {})
        ranks = self.ranks()
        self._load(ranks)
        ranks.kill()

    def _save_once(self) -> None:
        """What the last one left is there; another one becomes durable."""
        ranks = self.ranks()
        self._load(ranks)
        ranks.start("train", _TRAIN_S)
        time.sleep(0.2)
        self._tell(ranks, "TERM all")
        self._judge(ranks.results(_CALL_S))
        self.counts.kills["TERM all"] += 1
        ranks.call("leave", timeout_s=_CALL_S)
        ranks.kill()

    def _end_slowly(self, nodes: list[OwnNode]) -> None:
        ranks = self.ranks()
        self._load(ranks)
        newest = self._newest()
        ranks.start("train", _TRAIN_S, wait=False)
        time.sleep(0.3 + self._dice.random() * 0.3)
        pids = [pid for node in nodes for pid in node.pids()]
        self._tell(ranks, "everything")
        said = ranks.results(_CALL_S)
        steps = {one["step"] for one in said}
        if len(steps) != 1 or None in steps:
            self._find("steps", f"{[one['step'] for one in said]}; {[one['logs'][-3:] for one in said]}")
        for pid in [pid for node in nodes for pid in node.pids() if pid not in pids]:
            pids.append(pid)  # the ranks were slower than the daemons, and started others
            send(pid, signal.SIGTERM)
        self._await_end(pids)
        ranks.kill()
        if self._newest() != newest:
            self._find("removed", f"{newest} was durable, the store has {self._newest()}")
        (step,) = steps if len(steps) == 1 else (None,)
        if not any("not durable" in line and f"step={step}" in line for n in nodes for line in n.said().splitlines()):
            self._find("silent", f"no log says that step {step} is not durable: {[n.said()[-600:] for n in nodes]}")
        self.counts.kept += 1

    def _at_speed(self, nodes: list[OwnNode], settings: dict[str, str]) -> None:
        for node in nodes:
            node.settings = settings

    def _await_end(self, pids: list[int]) -> None:
        deadline = time.monotonic() + _GRACE_S + _BUSY_S
        while any(os.path.exists(f"/proc/{pid}") for pid in pids):
            if time.monotonic() > deadline:
                self._find("stays", f"daemons {pids} live {_GRACE_S + _BUSY_S:g} s after SIGTERM")
                return
            time.sleep(0.02)

    def _lose(self, nodes: list[OwnNode]) -> None:
        """The memory goes with the machines."""
        for node in nodes:
            for pid in daemons(node.arena):
                send(pid, signal.SIGKILL)
            node.lose_arena()

    def _find(self, kind: str, text: str) -> None:
        self.counts.findings.append(f"{kind}: {self._now}: {text}")


@contextlib.contextmanager
def _told(counts: Counts, cluster: Cluster, seed: int) -> Iterator[None]:
    """What does not end in time, or raises, is a finding, with what the daemons say."""
    try:
        with no_longer_than(_EPISODE_S):
            yield
    except (OverdueError, AssertionError, OSError, RankError) as error:
        logs = [node.said()[-1500:] for node in cluster.nodes.values() if isinstance(node, OwnNode)]
        counts.findings.append(f"stuck: seed {seed}: {type(error).__name__}: {error}; {logs}")


def episode(seed: int, count: int, zygote: Zygote, *, tight: bool = False) -> Counts:
    """So many polite kills of this seed."""
    with a_cluster(zygote, "") as cluster:
        played = Episode(cluster, seed)
        with _told(played.counts, cluster, seed):
            if tight:
                played.play_tight(min(count, _TIGHT_COUNT))
            else:
                played.play(count)
    return played.counts


def main() -> int:
    """The exit status is 1 when a promise is broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int)
    parser.add_argument("seed", type=int, nargs="?", default=0)
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no episode after so long")
    args = parser.parse_args()
    total, began, seed = Counts(), time.monotonic(), args.seed
    with ended_by_signals():
        zygote = Zygote()
        try:
            while total.kills.total() < args.count and time.monotonic() - began < 60 * args.minutes:
                count = min(EPISODE, args.count - total.kills.total())
                counts = episode(seed, count, zygote, tight=seed % _TIGHT == _TIGHT - 1)
                total.add(counts)
                print(f"seed {seed}: {counts}", flush=True)
                for text in counts.findings:
                    print(f"  BROKEN {text[:2000]}", flush=True)
                seed += 1
        finally:
            zygote.close()
            print(f"{total}\n{time.monotonic() - began:.0f} s", flush=True)
    return 1 if total.findings else 0


if __name__ == "__main__":
    sys.exit(main())
