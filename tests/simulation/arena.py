"""What lies in a node's memory: it outlives the daemon and the ranks, and is gone with the node."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from ckptd.core.events import TopologyKept
from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.format.slot import Seal, SlotState
from ckptd.shared.protocol.parity_types import ParityChunk


class NoRoomError(Exception):
    """The budget does not allow it, and says by how much."""


def content_of(save: SaveId, rank: int, session: str) -> bytes:
    """Stands for the bytes that this process saved: 16 bytes, different for each writer, rank and save."""
    return blake2b(f"{session}/{rank}/{save.text}".encode(), digest_size=16).digest()


def parity_nbytes(chunk: ParityChunk) -> int:
    """Bytes of one member's parity: the largest column over the columns that a group of the scheme has."""
    groups = max(len(chunk.columns) - chunk.scheme.losses, 1)
    largest = max(sum(seal.content_nbytes for seal in column.seals) for column in chunk.columns)
    return -(-largest // groups) * chunk.scheme.losses


@dataclass(slots=True)
class SlotFile:
    """A slot, and the seal in force. The seal's ``leaves_digest`` stands for the bytes; it is checked on every hop."""

    name: str
    rank: int
    capacity: int
    seal: Seal = field(default_factory=Seal)

    @property
    def save(self) -> SaveId | None:
        """What it holds, if anything."""
        return self.seal.save if self.seal.state is not SlotState.FREE else None


@dataclass(slots=True)
class JobMemory:
    """One job's directory in the arena."""

    slots: dict[str, SlotFile] = field(default_factory=dict)
    chunks: dict[tuple[SaveId, int], ParityChunk] = field(default_factory=dict)
    pulled: dict[tuple[SaveId, int], Seal] = field(default_factory=dict)  # for loads: the seals stand for their bytes
    kept: TopologyKept | None = None
    rank_files: dict[tuple[int, str], Any] = field(default_factory=dict)  # (rank, session) -> process
    serials: dict[int, int] = field(default_factory=dict)


class Arena:
    """``watch`` is told of each change: held(job, node, seal, bool), chunk(job, node, chunk, bool)."""

    def __init__(self, node: str, ident: str, watch: Any) -> None:
        self.node = node
        self.ident = ident
        self.jobs: dict[JobKey, JobMemory] = {}
        self.numbers: dict[JobKey, int] = {}  # kept whatever is forgotten
        self.stores: dict[JobKey, str] = {}  # the id of each job's, kept too
        self.budget_nbytes: int | None = None  # None: there is always room
        self._watch = watch

    @property
    def used_nbytes(self) -> int:
        """Of all slots, parity and what was pulled."""
        return sum(
            sum(slot.capacity for slot in memory.slots.values())
            + sum(map(parity_nbytes, memory.chunks.values()))
            + sum(seal.content_nbytes for seal in memory.pulled.values())
            for memory in self.jobs.values()
        )

    def make_room(self, nbytes: int) -> None:
        """Raises NoRoomError when so many bytes more are too many, as the daemon's arena does."""
        if self.budget_nbytes is not None and self.used_nbytes + nbytes > self.budget_nbytes:
            raise NoRoomError(f"{nbytes} bytes more than {self.used_nbytes}, of {self.budget_nbytes}")

    def job(self, key: JobKey) -> JobMemory:
        """The directory, made when it is first asked for."""
        return self.jobs.setdefault(key, JobMemory())

    def slot(self, key: JobKey, name: str) -> SlotFile | None:
        """The slot file, if it is there."""
        memory = self.jobs.get(key)
        return memory.slots.get(name) if memory else None

    def nbytes_of(self, key: JobKey, names: Iterable[str]) -> int:
        """Bytes of these slots."""
        return sum(slot.capacity for name in names if (slot := self.slot(key, name)) is not None)

    def allocate(self, key: JobKey, rank: int, capacity: int) -> SlotFile:
        """A new slot file that holds nothing. Room was made for it."""
        memory = self.job(key)
        serial = memory.serials[rank] = memory.serials.get(rank, 0) + 1
        name = f"r{rank:05d}-{serial:06d}.slot"
        memory.slots[name] = SlotFile(name, rank, capacity)
        return memory.slots[name]

    def put_seal(self, key: JobKey, slot: SlotFile, seal: Seal) -> None:
        """The seal is in force."""
        former, held = slot.seal, slot.save
        slot.seal = seal
        if held is not None and (slot.save != held or former.leaves_digest != seal.leaves_digest):
            self._watch.held(key, self, former, False)
        if slot.save is not None and slot.save != held:
            self._watch.held(key, self, seal, True)

    def unlink(self, key: JobKey, name: str) -> None:
        """The slot is gone."""
        slot = self.jobs[key].slots.pop(name)
        if slot.save is not None:
            self._watch.held(key, self, slot.seal, False)

    def put_chunk(self, key: JobKey, chunk: ParityChunk) -> None:
        """The parity file is sealed. Raises NoRoomError."""
        self.make_room(parity_nbytes(chunk))
        self.job(key).chunks[chunk.save, chunk.epoch] = chunk
        self._watch.chunk(key, self, chunk, True)

    def drop_chunk(self, key: JobKey, save: SaveId, epoch: int) -> None:
        """The parity file is gone, if it was there."""
        memory = self.jobs.get(key)
        chunk = memory.chunks.pop((save, epoch), None) if memory else None
        if chunk is not None:
            self._watch.chunk(key, self, chunk, False)

    def forget(self, key: JobKey) -> None:
        """The job's directory is removed, unless something lies there."""
        memory = self.jobs.get(key)
        if memory is not None and not memory.slots and not any(p.alive for p in memory.rank_files.values()):
            for save, epoch in list(memory.chunks):
                self.drop_chunk(key, save, epoch)
            del self.jobs[key]

    def holding(self, key: JobKey, rank: int, save: SaveId) -> SlotFile | None:
        """The slot with the rank's segment of the save, digested or not."""
        memory = self.jobs.get(key)
        if memory is None:
            return None
        return next((s for s in memory.slots.values() if s.rank == rank and s.save == save), None)
