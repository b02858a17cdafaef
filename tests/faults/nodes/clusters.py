"""Several daemons on loopback, each with an arena of its own, and ranks that a zygote forks."""

import contextlib
import itertools
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self

from ckptd.shared.protocol.status import JobStatus
from tests import pythons
from tests.cluster import Node, wait_for
from tests.faults.nodes.relay import Relay
from tests.faults.nodes.zygote import PACKET_NBYTES, PROGRAM
from tests.faults.ranks import RankError

KB = 1 << 10
MB = 1 << 20
PEER_TIMEOUT_S = 2.0
SETTLE_S = 30.0
SIZES = (256 * KB, 1 * MB, 64 * KB, 520 * KB)  # of the ranks' shards, in turn
NODE_TRAINER = "tests.faults.nodes.trainer:NodeTrainer"
_LOG_CHARS = 6000


class Zygote:
    """Has ranks forked, and ends them. One for all tests of a session."""

    def __init__(self) -> None:
        clean = pythons.inherited("CKPTD_", "NOTIFY_", "WATCHDOG_")
        self._environ = clean | pythons.ENVIRON | {"GLOO_SOCKET_IFNAME": "lo"}
        self._processes: list[subprocess.Popen[bytes]] = []

    def fork(self, order: dict[str, Any]) -> tuple[int, socket.socket]:
        """A rank's pid, and the socket to speak to it."""
        self._processes = [one for one in self._processes if one.poll() is None]
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            fd = theirs.fileno()
            process = pythons.Popen(
                [sys.executable, "-P", "-W", "ignore", "-c", PROGRAM, str(fd), json.dumps(order)],
                env=self._environ | order["environ"],
                pass_fds=[fd],
            )
        self._processes.append(process)
        return process.pid, ours

    def close(self) -> None:
        """Ends every rank."""
        for process in self._processes:
            process.kill()
            process.wait(60)


class NodeRank:
    """One rank: ``call(name, ...)`` runs a method of its trainer over there; ``start`` and ``result`` split it."""

    def __init__(self, zygote: Zygote, node: Node, order: dict[str, Any]) -> None:
        self.rank = int(order["rank"])
        self.node = node
        self.pid, self._socket = zygote.fork(order)
        self._pidfd = os.pidfd_open(self.pid)

    def start(self, name: str, *args: Any, **named: Any) -> Self:
        """Has the rank begin a call."""
        self._socket.send(json.dumps([name, args, named]).encode())
        return self

    @property
    def done(self) -> bool:
        """Whether the call that was started has ended."""
        return bool(select.select([self._socket], [], [], 0)[0])

    def result(self, timeout_s: float = 60.0) -> Any:
        """What the call that was started returned. Raises RankError."""
        assert select.select([self._socket], [], [], timeout_s)[0], f"rank {self.rank} did not answer in {timeout_s} s"
        said = self._socket.recv(PACKET_NBYTES)
        assert said, f"rank {self.rank} ended in its call"
        good, value, seconds = json.loads(said)
        if not good:
            raise RankError(*value, seconds)
        return value

    def call(self, name: str, *args: Any, timeout_s: float = 60.0, **named: Any) -> Any:
        """Both."""
        return self.start(name, *args, **named).result(timeout_s)

    def kill(self) -> None:
        """SIGKILL, and waits until it is gone. Again does nothing."""
        if self._pidfd < 0:
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        assert select.select([self._pidfd], [], [], 60)[0], "a rank did not end"
        os.close(self._pidfd)
        self._socket.close()
        self._pidfd = -1

    @property
    def alive(self) -> bool:
        """Whether kill was not called."""
        return self._pidfd >= 0


class Ranks:
    """All ranks of one start of a job."""

    def __init__(
        self,
        zygote: Zygote,
        nodes: Sequence[Node],
        job: str,
        meeting: str,
        sizes: Sequence[int],
        *,
        trainer: str = NODE_TRAINER,
    ) -> None:
        self.job = job
        self.all: list[NodeRank] = []
        for rank, node in enumerate(nodes):
            environ = {k: v for k, v in node.environ().items() if k.startswith("CKPTD_")}
            order = {
                "rank": rank,
                "world": len(nodes),
                "nbytes": sizes[rank % len(sizes)],
                "meeting": meeting,
                "trainer": trainer,
                "environ": environ,
            }
            self.all.append(NodeRank(zygote, node, order))

    def __getitem__(self, rank: int) -> NodeRank:
        return self.all[rank]

    def start(self, name: str, *args: Any, **named: Any) -> None:
        """The same call on all ranks, at once."""
        for rank in self.all:
            rank.start(name, *args, **named)

    def results(self, timeout_s: float = 60.0) -> list[Any]:
        """What it returned, by rank. Raises the first RankError once all have answered."""
        answers: list[Any] = []
        errors: list[RankError] = []
        for rank in self.all:
            try:
                answers.append(rank.result(timeout_s))
            except RankError as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return answers

    def call(self, name: str, *args: Any, timeout_s: float = 60.0, **named: Any) -> list[Any]:
        """Both."""
        self.start(name, *args, **named)
        return self.results(timeout_s)

    def connect(self, **settings: Any) -> None:
        """connect on all."""
        self.call("connect", self.job, **settings)

    def save(self, step: int, *milestones: str) -> None:
        """A save of all ranks that reaches these milestones on all."""
        self.call("save", step)
        for milestone in milestones:
            self.call("wait", step, milestone)
            if milestone == "protected":  # durable counts as that, and may come first
                wait_for(lambda: self._is_protected(step), SETTLE_S)

    def _is_protected(self, step: int) -> bool:
        """Whether all sets have encoded it, as the coordinator sees it."""
        job = self.all[0].node.job(self.job)
        return job is not None and any(c.step >= step and c.protected for c in job.checkpoints)

    def load(self) -> list[dict[str, Any]]:
        """What each rank got, which must be all there, of one step, and bit for bit what was saved."""
        self.start("load")
        return self.loaded()

    def loaded(self) -> list[dict[str, Any]]:
        """The same of a load that was started."""
        found = self.results()
        assert all(f is not None and f["intact"] for f in found), found
        assert len({f["step"] for f in found}) == 1, found
        return found

    def kill(self) -> None:
        """SIGKILL to all."""
        for rank in self.all:
            rank.kill()


class Cluster:
    """Daemons by name. A context manager that leaves nothing."""

    program: Sequence[str] = ("-m", "ckptd")  # of a daemon that is behind no relay

    def __init__(
        self, directory: str, zygote: Zygote | None, names: Iterable[str] = "abcd", relayed: str = "", **environ: str
    ) -> None:
        self.relayed = relayed
        self.relays: dict[str, Relay] = {}
        self.directory = directory
        self.store = os.path.join(directory, "store")
        os.mkdir(self.store)
        self._zygote = zygote
        self._environ = {
            "CKPTD_PEER_ADDRESS": "127.0.0.1",
            "CKPTD_PEER_TIMEOUT_S": str(PEER_TIMEOUT_S),
            "CKPTD_REDUNDANCY": "xor",
            "CKPTD_LOG_LEVEL": "debug",
            "CKPTD_CONNECT_TIMEOUT_S": "20",
        } | environ
        self._serial = itertools.count()
        self._ranks: list[Ranks] = []
        self._lost: list[Node] = []
        self.nodes: dict[str, Node] = {}
        try:
            for name in names:
                self.add(name, ready=False)
            for name in names:
                self.await_daemon(name)
        except BaseException:
            self.__exit__(None, None, None)  # nobody else will
            raise

    def add(self, name: str, *, ready: bool = True, **environ: str) -> Node:
        """A machine with an empty arena, and its daemon: behind a relay, if it is one of ``relayed``."""
        node = self.nodes[name] = Node(self.store)
        node.log = os.path.join(self.directory, f"{name}-{next(self._serial)}.log")
        self.start(name, ready=ready, **environ)
        return node

    def start(self, name: str, *, ready: bool = True, **environ: str) -> None:
        """A daemon on the arena that the node has."""
        variables = self._environ | {"CKPTD_NODE": name} | environ
        if name in self.relayed:
            relay = self.relays.get(name) or self.relays.setdefault(name, Relay(self.directory, name))
            relay.forget()
            self.nodes[name].start(ready=ready, program=relay.program, **variables)
        else:
            self.nodes[name].start(ready=ready, program=self.program, **variables)

    def await_daemon(self, name: str) -> None:
        """Until it answers."""
        wait_for(lambda: self.nodes[name].try_status() is not None)

    def restart(self, name: str, **environ: str) -> None:
        """SIGKILL to the daemon; another one on its arena."""
        self.nodes[name].kill()
        self.start(name, **environ)

    def lose(self, name: str) -> None:
        """The machine is gone: its daemon, its ranks, its memory. It may be gone in part already."""
        node = self.nodes[name]
        node.kill()
        for rank in [rank for ranks in self._ranks for rank in ranks.all if rank.node is node]:
            rank.kill()
        node.__exit__(None, None, None)
        del self.nodes[name]  # now: what ends the test meanwhile finds it there
        self._lost.append(node)

    def replace(self, name: str, new: str | None = None) -> None:
        """The machine is lost, and there is another one, under the same or another name."""
        self.lose(name)
        self.add(new or name)

    def ranks(
        self, homes: Iterable[str], job: str = "job", sizes: Sequence[int] = SIZES, trainer: str = NODE_TRAINER
    ) -> Ranks:
        """Ranks of a job, one for each letter: the node where it runs. Not connected yet."""
        meeting = os.path.join(self.directory, f"meeting-{next(self._serial)}")
        made = Ranks(self._zygote, [self.nodes[name] for name in homes], job, meeting, sizes, trainer=trainer)
        self._ranks.append(made)
        return made

    def end(self, ranks: Ranks) -> None:
        """close on all, after which nothing of the job may be in memory once it is durable."""
        ranks.call("close")
        ranks.kill()

    def job(self, name: str, job: str = "job") -> JobStatus | None:
        """The job's part of a node's status."""
        return self.nodes[name].job(job)

    def log(self) -> str:
        """What all daemons said, for a failed test."""
        parts = [*((name, node.log) for name, node in self.nodes.items()), *(("lost", n.log) for n in self._lost)]
        texts = []
        for name, path in parts:
            with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
                texts.append(f"--- {name}\n{file.read()[-_LOG_CHARS:]}")
        return "\n".join(texts)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for ranks in self._ranks:
            ranks.kill()
        for node in self.nodes.values():
            node.__exit__(None, None, None)
        for relay in self.relays.values():
            relay.close()


@contextlib.contextmanager
def a_cluster(
    zygote: Zygote | None, names: Iterable[str] = "abcd", relayed: str = "", **environ: str
) -> Iterator[Cluster]:
    """For a test, or for a module. Without a zygote its ranks are started otherwise."""
    directory = tempfile.mkdtemp(prefix="ckptd-test-")
    try:
        with Cluster(directory, zygote, names, relayed, **environ) as cluster:
            yield cluster
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def within(seconds: float, every_s: float = 0.01) -> Iterator[None]:
    """Rounds of a loop that must end in time."""
    deadline = time.monotonic() + seconds
    while True:
        assert time.monotonic() < deadline, f"not within {seconds} s"
        yield
        time.sleep(every_s)
