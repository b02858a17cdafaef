"""A rank without torch on a real daemon: the messages of a client, and a segment that it knows again when it loads."""

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import zmq

from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.format import arena_paths, rank_file
from ckptd.shared.format.slot import Seal, SlotState
from ckptd.shared.protocol import messages as m
from ckptd.shared.protocol.topology import Rendezvous
from tests.slots import Slot, write_slot

_R = TypeVar("_R")
_HOLDS_LOCK = """
import fcntl, os, sys
file = os.open(sys.argv[1] + ".new", os.O_RDWR | os.O_CREAT, 0o600)
fcntl.lockf(file, fcntl.LOCK_EX)
os.pwrite(file, bytes.fromhex(sys.argv[2]), 0)
os.rename(sys.argv[1] + ".new", sys.argv[1])  # a daemon that finds the name finds it locked and whole
print(flush=True)
sys.stdin.read()
"""


class Saving(NamedTuple):
    """What a rank saves, and of it what is drained. nbytes: of its one tensor."""

    nbytes: int = 5000
    cadence: m.Cadence = m.Cadence()


class Segment(NamedTuple):
    """What a rank saves: the bytes of a whole slot."""

    save: SaveId
    seal: Seal
    content: bytes


class Loaded(NamedTuple):
    """What a rank was sent to, and the bytes of the slot."""

    save: SaveId
    tier: m.Tier
    content: bytes


class Rank:
    """Its methods send and do not wait, but for those that say so: ``turn`` is called until they are answered."""

    def __init__(
        self, context: "zmq.Context[zmq.Socket[bytes]]", arena: str, rank: int, job: JobKey, saving: Saving
    ) -> None:
        self.rank = rank
        self._saving = saving
        self._context, self._arena, self._job = context, arena, job
        self._directory = os.path.join(arena, arena_paths.job_dir(job))
        self._session, self._world_size = "", 1
        self._seq = self._saves = 0
        self._made: Segment | None = None  # what it hands over next
        self._agreed: m.LoadFrom | None = None  # the load that began the present incarnation
        self._process: subprocess.Popen[bytes] | None = None  # holds the lock of its rank file
        self._socket = self._dial()
        self.told: dict[type, object] = {}
        self.reached: set[tuple[int, m.Milestone]] = set()  # steps, and what became of them
        self.loaded: Loaded | None = None  # what it read last

    def _dial(self) -> "zmq.Socket[bytes]":
        socket = self._context.socket(zmq.DEALER)
        socket.linger = 0
        socket.connect(f"ipc://{self._arena}/{arena_paths.SOCKET}")
        return socket

    def start(self, session: str) -> None:
        """A new process, of the next session, in a session of its own as to terminals."""
        self.end()
        self.told.clear()
        self.reached.clear()
        self._agreed, self.loaded = None, None
        self._session, self._saves = session, 0
        os.makedirs(self._directory, mode=0o700, exist_ok=True)
        path = os.path.join(self._directory, arena_paths.rank_file_name(self.rank, session))
        record = rank_file.encode(rank_file.RankRecord(self._job, self.rank, session, "h")).hex()
        command = [sys.executable, "-E", "-S", "-c", _HOLDS_LOCK, path, record]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )  # fmt: skip

    def attach(self, rendezvous: Rendezvous, world_size: int) -> None:
        """It asks to join the session, once its process is there."""
        assert self._process is not None  # noqa: S101 - started before
        assert self._process.stdout is not None  # noqa: S101 - a pipe
        self._process.stdout.read(1)
        self._rendezvous, self._world_size = rendezvous, world_size
        self._socket.close(0)
        self._socket = self._dial()
        self._attach()

    def come_back(self) -> None:
        """To a daemon that was started again."""
        before, agreed = self.told.pop(m.Attached), self._agreed
        assert isinstance(before, m.Attached)  # noqa: S101 - by its place
        self._socket.close(0)
        self._socket = self._dial()
        life = agreed or before
        self._attach(life.incarnation, life.run, before.store_id)

    def _attach(self, incarnation: int = 0, run: bytes = m.NO_RUN, store_id: str = "") -> None:
        assert self._process is not None  # noqa: S101 - it has begun
        self._send(
            m.Attach(
                seq=self._next(), job=self._job, session=self._session, rank=self.rank,
                world_size=self._world_size, host="h", pid=self._process.pid, rendezvous=self._rendezvous,
                incarnation=incarnation, run=run, store_id=store_id, cadence=self._saving.cadence,
            )
        )  # fmt: skip

    def prepare(self, step: int) -> None:
        """Makes a segment, and asks for a slot of its size. Blocks until it is attached."""
        attached = self._await(m.Attached)
        self.told.pop(m.SlotsComing, None)
        self._saves += 1
        self._made = self._make(SaveId(attached.incarnation, self._saves, step, attached.run))
        self._send(m.AskSlots(seq=self._next(), capacity=len(self._made.content)))

    def _make(self, save: SaveId) -> "Segment":
        """The segment of that save, which is the same each time."""
        made, content = self._made_by(self.rank, save, self._world_size)
        return Segment(save, made.seal, content)

    def _made_by(self, rank: int, save: SaveId, world_size: int) -> tuple[Slot, bytes]:
        """What a rank makes for the save, and the bytes of its slot. Its file is gone."""
        path = os.path.join(self._directory, f"made-{self.rank}")
        noise = random.Random(f"{rank} {save.step}").randbytes(self._saving.nbytes // 4 * 4)
        made = write_slot(
            path, self._job, save, {"weight": ("F32", (len(noise) // 4,), noise)}, rank=rank, world_size=world_size,
            state=SlotState.SEALED,
        )  # fmt: skip
        with open(path, "rb") as file:
            content = file.read()
        os.unlink(path)
        return made, content

    def hand_over(self) -> None:
        """Stages what was made. Blocks until that is done."""
        assert self._made is not None  # noqa: S101 - by its place
        self._await(m.SlotsComing)  # what was granted before is given back by then
        slot = self._await(m.SlotGranted).slot
        with open(os.path.join(self._directory, slot), "r+b") as file:
            file.write(self._made.content)
        self._send(m.HandOver(seq=self._next(), slot=slot, save=self._made.save))
        self._await(m.Done)

    def ask_load(self) -> None:
        """Asks for the newest."""
        self.told.pop(m.LoadFrom, None)
        self._send(m.AskLoad(seq=self._next()))

    def goes_on(self) -> bool:
        """Whether its load is not over. Reads the slot that it is sent to."""
        told = self.told.pop(m.LoadFrom, None)
        if isinstance(told, m.LoadFrom) and (told.agreed or told.save is None):
            self._agreed = told
            return False
        if isinstance(told, m.LoadFrom) and told.save is not None:
            self.loaded = Loaded(told.save, told.tier, self._read(told.slot) if told.tier != m.Tier.PFS else b"")
            self._send(m.ReportLoad(seq=self._next(), save=told.save, tier=told.tier))
        return True

    def _read(self, slot: str) -> bytes:
        with open(os.path.join(self._directory, slot), "rb") as file:
            return file.read()

    @property
    def is_intact(self) -> bool:
        """Whether the slot that it read is what it saved, but for the digests and seals, which the daemon writes."""
        assert self.loaded is not None  # noqa: S101 - it has
        made = self._make(self.loaded.save)
        parts = [(0, made.seal.image_nbytes), (made.seal.layout_offset, made.seal.content_nbytes)]
        return all(self.loaded.content[slice(*part)] == made.content[slice(*part)] for part in parts)

    def turn(self, timeout_ms: int = 0) -> None:
        """Takes in what was sent to it. Raises RuntimeError when it was refused something."""
        while self._socket.poll(timeout_ms):
            reply = m.decode_reply(self._socket.recv())
            self.told[type(reply)] = reply
            if isinstance(reply, m.SlotsComing):  # a slot that was granted before it was given back with the question
                self.told.pop(m.SlotGranted, None)
            if isinstance(reply, m.Progress) and reply.milestone is not None:
                self.reached.add((reply.save.step, reply.milestone))
            if isinstance(reply, m.Refused):
                raise RuntimeError(f"rank {self.rank}: {reply.message} ({reply.hint})")  # noqa: TRY004 - no fault of types
            timeout_ms = 0

    def _await(self, kind: type[_R], timeout_s: float = 60.0) -> _R:
        deadline = time.monotonic() + timeout_s
        while (reply := self.told.pop(kind, None) if kind is not m.Attached else self.told.get(kind)) is None:
            if time.monotonic() >= deadline:
                raise RuntimeError(f"rank {self.rank}: no {kind.__name__} within {timeout_s:.0f} s")
            self.turn(100)
        assert isinstance(reply, kind)  # noqa: S101 - by its place
        return reply

    def _next(self) -> int:
        self._seq += 1
        return self._seq

    def _send(self, request: m.Request) -> None:
        self._socket.send(m.encode(request))

    def end(self) -> None:
        """Its process ends."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
        self._process = None

    def close(self) -> None:
        """Gives everything back."""
        self.end()
        self._socket.close(0)


def until(done: Callable[[], bool], ranks: list[Rank], timeout_s: float, what: str) -> None:
    """Serves ranks until something holds. Raises RuntimeError when it takes too long."""
    deadline = time.monotonic() + timeout_s
    while not done():
        if time.monotonic() >= deadline:
            raise RuntimeError(f"{what}: not within {timeout_s:.0f} s")
        time.sleep(0.005)
        for rank in ranks:
            rank.turn()
