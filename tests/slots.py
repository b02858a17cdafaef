"""Real slot files without torch, for every test that needs some."""

import json
import math
import os
import struct
from dataclasses import dataclass
from typing import Any

import msgspec

from ckptd.shared.base.ids import JobKey, SaveId, file_name
from ckptd.shared.format import layout as lay
from ckptd.shared.format.digest import KIND, blocks, digest
from ckptd.shared.format.dtypes import itemsize
from ckptd.shared.format.manifest import FileRecord, StockObjects, Vote, encode_objects
from ckptd.shared.format.packed_layout import encode_layout, parted
from ckptd.shared.format.sealed_record import VERSION
from ckptd.shared.format.slot import PAGE, SEALS_NBYTES, Seal, SlotState, align_up, encode_seal, slot_capacity
from tests.runs import RUN, SET, STORE_ID

Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]  # name: (safetensors code, shape, bytes)


@dataclass(frozen=True)
class Slot:
    """A slot file, and everything that went into it."""

    path: str
    seal: Seal
    image: bytes
    layout: lay.Layout
    layout_raw: bytes
    leaves_raw: bytes
    digests: bytes

    @property
    def record(self) -> FileRecord:
        return FileRecord(
            name=self.layout.file,
            rank=self.layout.rank,
            nbytes=len(self.image),
            digests=self.digests,
            **parted(self.layout_raw, "slot")._asdict(),
            leaves=self.leaves_raw,
        )


def some_tensors(nbytes: int = 5000, seed: int = 1) -> Tensors:
    """One float vector of about nbytes and one small byte matrix, with bytes that differ by seed."""
    data = bytes((seed * 31 + i * 7) % 251 for i in range(251))
    count = nbytes // 4
    return {
        "model.weight": ("F32", (count,), (data * (count * 4 // len(data) + 1))[: count * 4]),
        "model.mask": ("U8", (3, 5), data[:15]),
    }


def build_image(
    save: SaveId, tensors: Tensors, *, rank: int = 0, world_size: int = 1, archives: bool = False
) -> tuple[bytes, lay.Layout]:
    """A valid safetensors file, header padded to a page, tensors end to end; and the Layout that describes it.

    archives: with bytes before and after each tensor that stand for the head and tail of a torch.save archive.
    """
    header: dict[str, Any] = {
        "__metadata__": {
            "format": "pt", "ckptd.save_id": save.text, "ckptd.rank": str(rank), "ckptd.world_size": str(world_size)
        }
    }  # fmt: skip
    at, parts, entries = 0, [], []
    pad = b"pk" * 20 if archives else b""
    for number, (name, (dtype, shape, data)) in enumerate(tensors.items()):
        assert len(data) == lay.box_nbytes(dtype, shape) == math.prod(shape) * itemsize(dtype), name
        pieces = [(f"__ckptd_pad__.{2 * number}", "U8", (len(pad),), pad), (name, dtype, shape, data)]
        pieces.append((f"__ckptd_pad__.{2 * number + 1}", "U8", (len(pad),), pad))
        entries.append((name, dtype, shape, at))
        for piece, code, sizes, content in pieces if archives else pieces[1:2]:
            header[piece] = {"dtype": code, "shape": sizes, "data_offsets": [at, at + len(content)]}
            parts.append(content)
            at += len(content)
    sharding = {name: {"saved_offsets": [0] * len(item["shape"])} for name, item in header.items() if "shape" in item}
    header["__metadata__"]["DCP_SHARDING_INFO"] = json.dumps(sharding)
    text = json.dumps(header).encode()
    header_nbytes = align_up(8 + len(text))
    start = struct.pack("<Q", header_nbytes - 8) + text.ljust(header_nbytes - 8)
    image = start + b"".join(parts)
    boxes = []
    for name, dtype, shape, first in entries:
        outer, nbytes = header_nbytes + first, lay.box_nbytes(dtype, shape)
        archive = (outer, nbytes + 2 * len(pad)) if archives else ()
        boxes.append(lay.TensorEntry(name, dtype, shape, (0,) * len(shape), shape, outer + len(pad), nbytes, *archive))
    paths: dict[str, lay.Path] = {name: tuple(("k", step) for step in name.split(".")) for name in tensors}
    layout = lay.Layout(
        version=lay.VERSION, file=file_name(rank), rank=rank, world_size=world_size, header_nbytes=header_nbytes,
        image_nbytes=len(image), plan_id="test", tensors=boxes, paths=paths, aliases={},
    )  # fmt: skip
    return image, layout


def write_slot(
    path: str | os.PathLike[str],
    key: JobKey,
    save: SaveId,
    tensors: Tensors | None = None,
    *,
    leaves: dict[str, lay.Leaf] | None = None,
    rank: int = 0,
    world_size: int = 1,
    state: SlotState = SlotState.DIGESTED,
    archives: bool = False,
    objects: StockObjects | None = None,
) -> Slot:
    """A slot file at path, sealed or digested, of the smallest capacity."""
    tensors = tensors or some_tensors(seed=rank + save.step)
    image, layout = build_image(save, tensors, rank=rank, world_size=world_size, archives=archives)
    layout_raw = encode_layout(layout)
    leaves_raw = lay.encode_leaves(lay.Leaves(lay.VERSION, leaves or {"step": lay.Leaf("int", b"%d" % save.step)}))
    objects_raw = encode_objects(objects) if objects else b""
    digests = b"".join(digest(image[start:stop]) for start, stop in blocks(len(image)))
    table = digests if state == SlotState.DIGESTED else bytes(len(digests))
    seal = Seal(
        state=state, job=key, save=save, rank=rank, world_size=world_size, image_nbytes=len(image),
        header_nbytes=layout.header_nbytes, layout_nbytes=len(layout_raw), leaves_nbytes=len(leaves_raw),
        layout_digest=digest(layout_raw), leaves_digest=digest(leaves_raw),
        table_digest=digest(table) if state == SlotState.DIGESTED else bytes(16),
        objects_nbytes=len(objects_raw), objects_digest=digest(objects_raw) if objects else bytes(16),
    )  # fmt: skip
    capacity = slot_capacity(len(image), len(layout_raw), len(leaves_raw) + len(objects_raw))
    content = image.ljust(seal.table_offset, b"\0") + table + layout_raw + leaves_raw + objects_raw
    body = content.ljust(capacity - SEALS_NBYTES, b"\0")
    assert capacity % PAGE == 0
    with open(path, "wb") as file:
        file.write(body + encode_seal(seal, 1).ljust(SEALS_NBYTES, b"\0"))
    return Slot(os.fspath(path), seal, image, layout, layout_raw, leaves_raw, digests)


def reseal(slot: Slot, seal: Seal, *, sequence: int = 2) -> None:
    """The slot handed to another save, as the daemon would: the older seal page overwritten."""
    size = os.path.getsize(slot.path)
    with open(slot.path, "r+b") as file:
        file.seek(size - SEALS_NBYTES + (PAGE if sequence % 2 == 0 else 0))
        file.write(encode_seal(seal, sequence))


def make_vote(
    key: JobKey, save: SaveId, node: str, slots: list[Slot], *, world_size: int, objects: StockObjects | None = None
) -> Vote:
    """What a node that drained these slots says."""
    return Vote(
        version=VERSION, digest_kind=KIND, store_id=STORE_ID, job=key.job, save=save, node=node, folder=SET,
        world_size=world_size, files=[slot.record for slot in slots], stock_objects=objects,
    )  # fmt: skip


def other_save(seal: Seal, step: int) -> Seal:
    """The same seal for another save of the same job."""
    assert seal.save is not None
    return msgspec.structs.replace(seal, save=SaveId(seal.save.incarnation, seal.save.counter + 1, step, RUN))
