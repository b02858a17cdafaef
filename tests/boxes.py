"""Committed checkpoints whose tensors are cut into boxes over ranks, without torch."""

import itertools
import math
import random
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.format import layout as lay
from ckptd.shared.format.digest import blocks, digest
from ckptd.shared.format.dtypes import itemsize
from ckptd.shared.format.packed_layout import encode_layout
from ckptd.shared.format.slot import align_up
from ckptd.store.image import Flow, Image
from ckptd.store.posix.commit import commit, write_vote
from ckptd.store.posix.image_writer import make_set, write_image
from ckptd.store.posix.scan import Place
from ckptd.system.files import FileLayer
from tests.runs import RUN, SET
from tests.slots import Slot, build_image, make_vote

SAVE = SaveId(1, 2, 30, RUN)


@dataclass(frozen=True)
class Whole:
    """A tensor of a checkpoint: safetensors code, shape, bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def box(self, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> bytes:
        """Bytes of a part, contiguous: the slow and obvious way."""
        item = itemsize(self.dtype)
        if sizes[1:] == self.shape[1:]:
            row_nbytes = item * math.prod(self.shape[1:])
            first = offsets[0] if offsets else 0
            return self.data[first * row_nbytes :][: item * math.prod(sizes)]
        out = []
        for index in itertools.product(*(range(o, o + s) for o, s in zip(offsets[:-1], sizes[:-1], strict=True))):
            at = 0
            for i, size in zip((*index, offsets[-1]), self.shape, strict=True):
                at = at * size + i
            out.append(self.data[at * item : (at + sizes[-1]) * item])
        return b"".join(out)

    def rows(self, part: int, parts: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Offsets and sizes of the part-th of parts along the first dimension, uneven as torch.chunk cuts."""
        step = -(-self.shape[0] // parts)
        first = min(part * step, self.shape[0])
        last = min(first + step, self.shape[0])
        return (first, *(0,) * (len(self.shape) - 1)), (last - first, *self.shape[1:])


def some_whole(dtype: str, shape: tuple[int, ...], seed: int = 1) -> Whole:
    """Bytes that differ everywhere, the same for the same seed."""
    data = random.Random(seed).randbytes(math.prod(shape) * itemsize(dtype))
    return Whole(dtype, shape, bytes(byte & 1 for byte in data) if dtype == "BOOL" else data)


Cut = dict[str, tuple[Whole, tuple[int, ...], tuple[int, ...]]]  # of one rank: whole, offsets, sizes


def write_checkpoint(
    store: Path, ranks: list[Cut], *, aliases: dict[str, str] | None = None, save: SaveId = SAVE,
    paths: dict[str, lay.Path] | None = None,
) -> Path:  # fmt: skip
    """A committed checkpoint of job "demo"; its directory."""
    key = JobKey(str(store), "demo")
    fs, place = FileLayer(), Place(key, save)
    make_set(fs, place, SET)
    for rank, cut in enumerate(ranks):
        slot = _slot(cut, rank, len(ranks), save, aliases=aliases or {}, paths=paths or {})
        padded = memoryview(slot.image.ljust(align_up(len(slot.image)), b"\0"))
        write_image(fs, place, SET, Image(slot.layout.file, len(slot.image), padded), Flow())
        write_vote(fs, key, make_vote(key, save, f"node{rank}", [slot], world_size=len(ranks)))
    commit(fs, key, save, "test")
    return Path(place.final)


def _slot(cut: Cut, rank: int, world_size: int, save: SaveId, *, aliases, paths) -> Slot:
    local = {
        name: (whole.dtype, sizes, whole.data if sizes == whole.shape else whole.box(offsets, sizes))
        for name, (whole, offsets, sizes) in cut.items()
    }
    image, layout = build_image(save, local, rank=rank, world_size=world_size)
    entries = [
        msgspec.structs.replace(entry, global_shape=cut[entry.name][0].shape, offsets=cut[entry.name][1])
        for entry in layout.tensors
    ]
    named = {name: (("k", name),) for name in aliases}
    layout = msgspec.structs.replace(layout, tensors=entries, aliases=aliases, paths={**layout.paths, **named, **paths})
    digests = b"".join(digest(image[start:stop]) for start, stop in blocks(len(image)))
    leaves = lay.encode_leaves(lay.Leaves(lay.VERSION, {"step": lay.Leaf("safe/1", b"\x1e")}))
    return Slot("", None, image, layout, encode_layout(layout), leaves, digests)
