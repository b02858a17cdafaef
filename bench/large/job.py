"""The job that is measured: the real daemons, the ranks on them, and the process that plays the other nodes."""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Self

import msgspec
import zmq

from bench.large.daemon import RealDaemon
from bench.large.plan import RANKS_PER_NODE, STEP, Command, Connect, Done, End, Load, Lose, Plan, Stage, node_name
from bench.large.rank import Rank, Saving, until
from ckptd.shared.base.ids import JobKey
from ckptd.shared.format.schemes import Scheme
from ckptd.shared.protocol import messages as m
from ckptd.shared.protocol.status import JobStatus
from ckptd.shared.protocol.topology import TICKET_NBYTES, Peer, Rendezvous


class LargeJob:
    """Use with ``with``. real: so many daemons are; the first of them coordinates. Methods block until all is done."""

    def __init__(self, base: Path, nodes: int, *, real: int = 1, timeout_s: float, settings: tuple[str, ...]) -> None:
        self._base, self.nodes, self._timeout_s = base, nodes, timeout_s
        self._stack = contextlib.ExitStack()
        self.daemons = [
            RealDaemon(base / node_name(n), node_name(n), "--peer-address", "127.0.0.1", *settings) for n in range(real)
        ]
        self.ranks: list[Rank] = []
        self._session = 0
        self.patience_s = 300.0

    def __enter__(self) -> Self:
        try:
            self._set_up()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _set_up(self) -> None:
        store = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="store-", dir=self._base))
        self.job = JobKey(store, "large")
        for daemon in self.daemons:
            self._stack.callback(daemon.kill)
            daemon.start()
        peers = [daemon.peer() for daemon in self.daemons]
        self._crowd = self._stack.enter_context(_process())
        real = len(peers)
        self._write(Plan(self.job, peers, real, self.nodes - real, self._timeout_s))
        self._peers = [*peers, *msgspec.json.decode(self._read(), type=list[Peer])]
        context = self._stack.enter_context(zmq.Context())
        for number, daemon in enumerate(self.daemons):
            for rank in range(number * RANKS_PER_NODE, (number + 1) * RANKS_PER_NODE):
                self.ranks.append(Rank(context, daemon.arena, rank, self.job, Saving()))
        for rank_ in self.ranks:
            self._stack.callback(rank_.close)

    # --- the crowd

    def _write(self, item: object) -> None:
        assert self._crowd.stdin is not None  # noqa: S101 - a pipe
        self._crowd.stdin.write(msgspec.json.encode(item) + b"\n")
        self._crowd.stdin.flush()

    def _read(self) -> bytes:
        assert self._crowd.stdout is not None  # noqa: S101 - a pipe
        line = self._crowd.stdout.readline()
        if not line:
            raise RuntimeError("the process that plays nodes has ended")
        return line

    def _do(self, command: Command, also: Callable[[], bool] = lambda: True) -> Done:
        """The crowd carries it out, while something holds of the ranks on real daemons."""
        self._write(command)
        poller = zmq.Poller()
        poller.register(_fd(self._crowd.stdout), zmq.POLLIN)
        deadline = time.monotonic() + self.patience_s
        ready = over = False
        while not (ready and over):
            if time.monotonic() >= deadline:
                raise RuntimeError(f"{type(command).__name__}: not within {self.patience_s:.0f} s")
            ready = ready or bool(poller.poll(5))
            time.sleep(0.005 if ready else 0)
            for rank in self.ranks:
                rank.turn()
            over = over or also()
        return msgspec.json.decode(self._read(), type=Done)

    # --- phases

    def connect(self) -> Done:
        """All ranks, in a session of their own."""
        self._session += 1
        session = f"s{self._session}"
        homes = [peer.node for peer in self._peers for _ in range(RANKS_PER_NODE)]
        rendezvous = Rendezvous(self._peers[0], os.urandom(TICKET_NBYTES), Scheme.XOR, 8)
        for rank in self.ranks:
            rank.start(session)
        for rank in self.ranks:
            rank.attach(rendezvous, len(homes))
        return self._do(Connect(session, rendezvous, homes), self._all_in)

    def _all_in(self) -> bool:
        return all(m.Attached in rank.told for rank in self.ranks)

    def stage(self) -> Done:
        """One save of all ranks."""
        done = self._do(Stage(STEP))
        for rank in self.ranks:
            rank.prepare(STEP)
            rank.hand_over()
        until(self._staged, self.ranks, self.patience_s, "staged")
        return done

    def _staged(self) -> bool:
        return all(m.Progress in rank.told for rank in self.ranks)

    def load(self) -> Done:
        """All ranks load the newest."""
        going = list(self.ranks)
        for rank in going:
            rank.ask_load()

        def over() -> bool:
            going[:] = [rank for rank in going if rank.goes_on()]
            return not going

        return self._do(Load(), over)

    def lose(self, number: int) -> Done:
        """A node; a spare one takes its place in the next session."""
        spare = node_name(len(self._peers) + 1000)
        done = self._do(Lose(node_name(number), spare))
        lost = next(place for place, peer in enumerate(self._peers) if peer.node == node_name(number))
        self._peers[lost] = msgspec.structs.replace(self._peers[lost], node=spare, arena=f"crowd-{spare}")
        name = node_name(number)
        self._serve_ranks(self._timeout_s - 1.0)  # a status asks all nodes that drain, which is no cost of a loss
        self.await_status(lambda job: any(n.node == name and not n.reachable for n in job.nodes), "the loss")
        return done

    def end_ranks(self) -> Done:
        """Their processes."""
        for rank in self.ranks:
            rank.end()
        return self._do(End())

    def come_back(self) -> None:
        """The coordinator's daemon was started again: its ranks call it, and the nodes say what they have."""
        for rank in self.ranks[:RANKS_PER_NODE]:
            rank.come_back()
        self.await_status(self._whole, "the return of all nodes")
        until(self._all_in, self.ranks, self.patience_s, "the return of the ranks")

    def _whole(self, job: JobStatus) -> bool:
        reached = len(job.nodes) == len(self._peers) and all(node.reachable for node in job.nodes)
        return reached and any(c.ranks == c.world_size and c.milestone is not None for c in job.checkpoints)

    def await_status(self, holds: Callable[[JobStatus], bool], what: str) -> None:
        """Asks the coordinator once a second. Raises RuntimeError when it takes too long."""
        deadline = time.monotonic() + self.patience_s
        while not any(holds(job) for job in self.daemons[0].status().jobs):
            if time.monotonic() >= deadline:
                raise RuntimeError(f"{what}: not within {self.patience_s:.0f} s")
            self._serve_ranks(1.0)

    def _serve_ranks(self, seconds: float) -> None:
        until_ = time.monotonic() + seconds
        while time.monotonic() < until_:
            for rank in self.ranks:
                rank.turn()
            time.sleep(min(1.0, seconds))


def _fd(pipe: IO[bytes] | None) -> int:
    assert pipe is not None  # noqa: S101 - a pipe
    return pipe.fileno()


@contextlib.contextmanager
def _process() -> "Iterator[subprocess.Popen[bytes]]":
    command = [sys.executable, "-m", "bench.large.crowd"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()
