"""Committed checkpoints with drained parity, made by the parts that daemons are made of: arenas, encodes, drains."""

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ckptd.arena.arena import Arena
from ckptd.parity.encode import encode
from ckptd.parity.files import open_parity
from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.format import arena_paths
from ckptd.shared.format.digest import KIND
from ckptd.shared.format.manifest import ParityRecord, StockObjects, Vote
from ckptd.shared.format.schemes import Scheme
from ckptd.shared.format.sealed_record import VERSION
from ckptd.shared.format.slot import SEALS_NBYTES, Seal, SlotState, align_up
from ckptd.shared.protocol.parity_types import DataColumn, ParityChunk
from ckptd.store.image import Flow, Image
from ckptd.store.messages import DrainParity
from ckptd.store.parity import drain_parity
from ckptd.store.posix.commit import commit, write_vote
from ckptd.store.posix.image_writer import make_set, write_image
from ckptd.store.posix.scan import Place
from ckptd.store.posix.store import PosixStore
from ckptd.system.files import FileLayer
from tests.nodes import Set, start_set
from tests.runs import RUN, SET, STORE_ID
from tests.slots import Slot, some_tensors, write_slot

SAVE = SaveId(2, 3, 40, RUN)
EPOCH = 2
OBJECTS = StockObjects(b"archive of lr, archive of epoch", {"lr": (0, 13), "epoch": (15, 16)})


def put(arena: Arena, key: JobKey, slot: Slot, parts: tuple[int, ...] = ()) -> Seal:
    """The slot's content in a slot of the arena, digested; what lies between image and tail is no zeros."""
    content = Path(slot.path).read_bytes()[: slot.seal.content_nbytes]
    capacity = align_up(len(content)) + SEALS_NBYTES
    arena.reserve(slot.seal.rank, 1, capacity)
    name = arena.allocate(key, slot.seal.rank, capacity)
    view, seal = arena.view(key, name), slot.seal
    view[: len(content)] = content
    view[seal.image_nbytes : seal.table_offset] = b"\xaa" * (seal.table_offset - seal.image_nbytes)
    blank = msgspec.structs.replace(seal, state=SlotState.SEALED, table_digest=bytes(16), parts=parts)
    arena.seal(key, name, blank)
    table = arena.digests(key, name, slot.seal.save)
    assert table is not None
    arena.seal_digests(key, name, table)
    return arena.seal_of(key, name)


class Made:
    """A checkpoint and what made it. sizes: bytes of each rank's tensors, by node. Left open until ``stop``."""

    def __init__(
        self, store: Path, arenas: str, sizes: Sequence[Sequence[int]], scheme: Scheme = Scheme.XOR, *,
        parts: dict[int, tuple[int, ...]] | None = None,
    ) -> None:  # fmt: skip
        self.key, self.parts = JobKey(str(store), "demo"), parts or {}
        self.place = Place(self.key, SAVE)
        self.set: Set = start_set(arenas, len(sizes))
        self.slots: list[list[Slot]] = []
        world, columns, scratch = sum(map(len, sizes)), [], os.path.join(arenas, "scratch")
        for node, own in zip(self.set.nodes, sizes, strict=True):
            self.slots.append([])
            seals = []
            for nbytes in own:
                rank = sum(map(len, self.slots))
                slot = write_slot(
                    scratch, self.key, SAVE, some_tensors(nbytes, rank + 1), rank=rank, world_size=world,
                    objects=OBJECTS if rank == 0 else None,
                )  # fmt: skip
                if rank in self.parts:
                    self.parts[rank] = (*self.parts[rank][:-1], len(slot.image) - sum(self.parts[rank][:-1]))
                seals.append(put(node.arena, self.key, slot, self.parts.get(rank, ())))
                self.slots[-1].append(slot)
                os.unlink(scratch)
            columns.append(DataColumn(node.name, tuple(seals)))
        self.set.columns = tuple(columns)
        for index, node in enumerate(self.set.nodes):
            parity_chunk = ParityChunk(SAVE, EPOCH, scheme, index, self.set.columns)
            encode(node.parities, self.key, parity_chunk, self.set.sources(node), lambda _: None)

    def record(self, index: int) -> ParityRecord:
        """Of a node's parity, as its vote names it."""
        found = open_parity(self.set.nodes[index].arena, self.key, SAVE, EPOCH)
        assert found is not None
        return found.store_record

    def order(self, index: int) -> DrainParity:
        """To drain a node's parity."""
        path = self.set.nodes[index].arena.slot_path(self.key, arena_paths.parity_name(SAVE, EPOCH))
        return DrainParity(id=1, store_id=STORE_ID, job=self.key.job, save=SAVE, path=path, parity=self.record(index))

    def drain(self, index: int, *, parity: bool = True, vote: bool = True) -> None:
        """A node's share: images, parity, vote."""
        fs, world, records = FileLayer(), sum(map(len, self.slots)), []
        make_set(fs, self.place, SET)
        for slot in self.slots[index]:
            record = msgspec.structs.replace(slot.record, parts=self.parts.get(slot.seal.rank, ()))
            padded = memoryview(slot.image.ljust(align_up(len(slot.image)), b"\0"))
            for name, start, nbytes in record.extents():
                write_image(fs, self.place, SET, Image(name, nbytes, padded[start:]), Flow())
            records.append(record)
        if parity:
            drain_parity(PosixStore(self.key.store, fs=fs), self.order(index))
        said = Vote(
            version=VERSION, digest_kind=KIND, store_id=STORE_ID, job=self.key.job, save=SAVE, node=f"n{index}",
            folder=SET, world_size=world,
            files=records, stock_objects=OBJECTS if any(r.rank == 0 for r in records) else None,
            parity=self.record(index) if parity else None,
        )  # fmt: skip
        if vote and records:
            write_vote(fs, self.key, said)

    def commit(self, *, parity: bool = True) -> Path:
        """Drains what all nodes have, commits it, gives the memory back: from here on there is the store alone."""
        for index in range(len(self.slots)):
            self.drain(index, parity=parity)
        commit(FileLayer(), self.key, SAVE, "test")
        self.set.stop()
        return Path(self.place.final)
