"""``ckptd status --nodes`` of a job of many nodes in the middle of a drain: two real daemons and a crowd of others.

One of the two coordinates, the other one answers. Measures its answer, and the complete command.
"""

import contextlib
import fcntl
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
import zmq

from bench.crowd import SESSION, Plan, Start, node_name
from bench.measure import Series
from bench.report import Row
from ckptd.arena.ask import Daemon, ask_status
from ckptd.shared.base.errors import CkptdError
from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.format import arena_paths, rank_file
from ckptd.shared.format.slot import SlotState
from ckptd.shared.protocol import messages as m
from ckptd.shared.protocol.status import JobStatus
from ckptd.shared.protocol.topology import TICKET_NBYTES, Peer, Rendezvous, Topology
from tests.slots import write_slot

_R = TypeVar("_R")
NODES, RANKS_PER_NODE = 1000, 8
_BAR_S = 1.0
_REAL = 2
_STEP = 100
_READY_S, _SETTLE_S = 20.0, 300.0
_SETTINGS = (
    *("--redundancy", "none", "--drain-bandwidth", "16"),
    *("--peer-address", "127.0.0.1", "--peer-timeout-s", "60s", "--connect-timeout-s", "600s"),
)


def measure(base: Path, repeat: int, nodes: int = NODES) -> list[Row]:
    """The rows. base: a directory on tmpfs. Raises RuntimeError if the job is not admitted."""
    with _a_job(base, nodes) as asked:
        answers, commands, before_s = [], [], _children_cpu_s()
        for _ in range(repeat):
            start = time.perf_counter()
            with Daemon(asked) as daemon:
                job = daemon.status(nodes=True).jobs[0]
            answers.append(time.perf_counter() - start)
            missing = [node.node for node in job.nodes if node.report is None]
            if missing or len(job.nodes) != nodes:
                raise RuntimeError(f"{len(missing)} of {len(job.nodes)} nodes did not answer: {missing[:4]}")
            commands.append(_command(asked))
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
    start = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "ckptd", "status", "--nodes", "--arena", arena],
        check=True, stdout=subprocess.DEVNULL, env=_environ(),
    )  # fmt: skip
    return time.perf_counter() - start


@contextlib.contextmanager
def _a_job(base: Path, nodes: int) -> Iterator[str]:
    """A job of so many nodes whose drain runs and does not end; the arena of a daemon that does not coordinate it."""
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(tempfile.TemporaryDirectory(prefix="store-", dir=base))
        job = JobKey(store, "crowd")
        arenas = [str(base / node_name(number)) for number in range(_REAL)]
        for number, arena in enumerate(arenas):
            stack.enter_context(_daemon(arena, number))
        daemons = [_peer_of(arena) for arena in arenas]
        crowd = stack.enter_context(_crowd(Plan(job, daemons, _REAL, nodes - _REAL, _STEP)))
        assert crowd.stdin is not None and crowd.stdout is not None  # noqa: S101, PT018 - they are pipes
        peers = [*daemons, *msgspec.json.decode(crowd.stdout.readline(), type=list[Peer])]
        homes = tuple(number for number in range(nodes) for _ in range(RANKS_PER_NODE))
        topology = Topology(tuple(peers), homes)
        rendezvous = Rendezvous(daemons[0], os.urandom(TICKET_NBYTES))
        start = Start(topology, rendezvous)
        crowd.stdin.write(msgspec.json.encode(start) + b"\n")
        crowd.stdin.flush()
        context = stack.enter_context(zmq.Context())
        places_ = [(arena, rank) for number, arena in enumerate(arenas) for rank in _ranks_of(number)]
        ranks = [stack.enter_context(contextlib.closing(_Rank(context, *place, job, start))) for place in places_]
        for rank in ranks:
            rank.hand_over()
        _await_drain(arenas[-1], nodes)
        yield arenas[-1]


def _ranks_of(number: int) -> range:
    return range(number * RANKS_PER_NODE, (number + 1) * RANKS_PER_NODE)


def _await_drain(arena: str, nodes: int) -> None:
    """Waits until every node has reported its progress."""
    deadline = time.monotonic() + _SETTLE_S
    job: JobStatus | None = None
    while time.monotonic() < deadline:
        with contextlib.suppress(CkptdError), Daemon(arena) as daemon:
            job = next(iter(daemon.status(nodes=True).jobs), None)
        if job is not None and sum(node.drain_nbytes_done > 0 for node in job.nodes) >= nodes - _REAL:
            return
        time.sleep(1.0)
    raise RuntimeError(f"no drain of {nodes} nodes within {_SETTLE_S:.0f} s: {job and job.checkpoints[:1]}")


def _environ() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("CKPTD_")}


@contextlib.contextmanager
def _daemon(arena: str, number: int) -> Iterator[None]:
    command = [sys.executable, "-m", "ckptd", "run", "--arena", arena, "--node", node_name(number), *_SETTINGS]
    with open(f"{arena}.log", "ab") as log:
        process = subprocess.Popen(command, env=_environ(), stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + _READY_S
        while time.monotonic() < deadline:
            with contextlib.suppress(CkptdError):
                ask_status(arena, 1.0)
                break
            time.sleep(0.05)
        yield
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def _crowd(plan: Plan) -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen([sys.executable, "-m", "bench.crowd"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None  # noqa: S101 - it is a pipe
    process.stdin.write(msgspec.json.encode(plan) + b"\n")
    process.stdin.flush()
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _peer_of(arena: str) -> Peer:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(f"ipc://{arena}/{arena_paths.SOCKET}")
        socket.send(m.encode(m.AskNode(seq=1)))
        reply = m.decode_reply(socket.recv())
    assert isinstance(reply, m.NodeInfo)  # noqa: S101 - what else
    return reply.peer


class _Rank:
    """A rank without torch: the messages of a client, and a segment of a few kilobytes."""

    def __init__(
        self, context: "zmq.Context[zmq.Socket[bytes]]", arena: str, rank: int, job: JobKey, start: Start
    ) -> None:
        self._job, self._rank, self._world, self._seq = job, rank, len(start.topology.homes), 1
        self._directory = os.path.join(arena, arena_paths.job_dir(job))
        os.makedirs(self._directory, mode=0o700, exist_ok=True)
        path = os.path.join(self._directory, arena_paths.rank_file_name(rank, SESSION))
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.lockf(self._fd, fcntl.LOCK_EX)
        os.pwrite(self._fd, rank_file.encode(rank_file.RankRecord(job, rank, SESSION, "h")), 0)
        self._socket = context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.connect(f"ipc://{arena}/{arena_paths.SOCKET}")
        attach = m.Attach(
            seq=1, version=m.VERSION, job=job, session=SESSION, rank=rank, world_size=self._world, host="h",
            pid=os.getpid(), rendezvous=start.rendezvous,
        )  # fmt: skip
        self._socket.send(m.encode(attach))

    def hand_over(self) -> None:
        """Waits for the job, then stages a segment."""
        attached = self._await(m.Attached)
        save = SaveId(attached.incarnation, 1, _STEP, attached.run)
        made = write_slot(
            os.path.join(self._directory, f"made-{self._rank}"), self._job, save, rank=self._rank,
            world_size=self._world, state=SlotState.SEALED,
        )  # fmt: skip
        with open(made.path, "rb") as file:
            content = file.read()
        os.unlink(made.path)
        self._say(m.AskSlots(seq=self._next(), capacity=len(content)))
        slot = self._await(m.SlotGranted).slot
        with open(os.path.join(self._directory, slot), "r+b") as file:
            file.write(content)
        self._say(m.HandOver(seq=self._next(), slot=slot, save=save))
        self._await(m.Done)

    def _next(self) -> int:
        self._seq += 1
        return self._seq

    def _say(self, request: m.Request) -> None:
        self._socket.send(m.encode(request))

    def _await(self, kind: type[_R]) -> _R:
        while True:
            if not self._socket.poll(_SETTLE_S * 1000):
                raise RuntimeError(f"no {kind.__name__} within {_SETTLE_S:.0f} s")
            reply = m.decode_reply(self._socket.recv())
            if isinstance(reply, kind):
                return reply
            if isinstance(reply, m.Refused):
                raise RuntimeError(f"{reply.message} ({reply.hint})")  # noqa: TRY004 - no fault of types

    def close(self) -> None:
        """Ends as a process does."""
        os.close(self._fd)
        self._socket.close(0)
