"""A rank's image without the values below some names: laid out as if the rank had saved no more. Pure."""

import bisect
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from ckptd.shared.base.errors import UsageError
from ckptd.shared.base.ids import SaveId
from ckptd.shared.base.wording import shown
from ckptd.shared.format.dropped import is_below
from ckptd.shared.format.layout import Layout, Leaves, box_nbytes, decode_leaves, encode_leaves
from ckptd.shared.format.layout_meshes import lying, spread_of
from ckptd.shared.format.manifest import FileRecord, StockObjects
from ckptd.shared.format.packed_layout import Known, encode_layout, parted
from ckptd.shared.torchfile.image import Box, Image, make_image, make_layout


class Piece(NamedTuple):
    """Bytes of the new image from start on: data, or as many of the old image from at on."""

    start: int
    nbytes: int
    at: int
    data: bytes = b""


class Reduced(NamedTuple):
    """pieces: in order, all of the image. record: without its digests, which follow from the bytes."""

    pieces: list[Piece]
    record: FileRecord


def reduced(record: FileRecord, layout: Layout, keys: Sequence[str], save: SaveId, known: Known) -> Reduced:
    """The image of a record and its layout, without what is below the keys. Raises UsageError where that cannot be."""
    where = record.name
    kept = {name for name in layout.paths if not is_below(name, keys)}
    for name, holder in layout.aliases.items():
        if name in kept and holder not in kept:
            text = f"{shown(name)} is tied to {shown(holder)}, which alone has the bytes"
            raise UsageError(f"{text}: the checkpoint stays whole", hint="drop both, or neither")
    entries = [entry for entry in layout.tensors if entry.name in kept]
    starts = [extent.start for extent in layout.extents()]
    boxes = [
        Box(
            one.name, one.dtype, one.sizes, one.global_shape, one.offsets,
            bisect.bisect_right(starts, one.extent[0]) - 1 if layout.parts else 0,
        )
        for one in entries
    ]  # fmt: skip
    dual = all(entry.slice_nbytes for entry in layout.tensors)
    image = make_image(boxes, rank=layout.rank, world_size=layout.world_size, dual=dual)
    made = make_layout(
        image, paths={name: path for name, path in layout.paths.items() if name in kept},
        aliases={name: holder for name, holder in layout.aliases.items() if name in kept},
        held_alike=_only(layout.held_alike, kept),
        holders={name: held for name, held in layout.holders.items() if name in kept},
    )  # fmt: skip
    spread = spread_of(lying(record.layout, where=where, known=known), kept, {one.name for one in entries}, where)
    parts = parted(encode_layout(made, spread), where)
    leaves = decode_leaves(record.leaves, where=where)
    values = {name: leaf for name, leaf in leaves.leaves.items() if not is_below(name, keys)}
    new = msgspec.structs.replace(
        record, nbytes=image.image_nbytes, digests=b"", parts=image.part_nbytes, plan=parts.plan, form=parts.form,
        own=parts.own, leaves=encode_leaves(Leaves(leaves.version, values, leaves.metadata)),
    )  # fmt: skip
    return Reduced(_pieces(image, [entry.data_offset for entry in entries], save), new)


def _only(held_alike: dict[str, list[str]], kept: set[str]) -> dict[str, list[str]]:
    found = {how: [name for name in names if name in kept] for how, names in held_alike.items()}
    return {how: names for how, names in found.items() if names}


def _pieces(image: Image, old_offsets: Sequence[int], save: SaveId) -> list[Piece]:
    found = [Piece(start, len(data), 0, data) for start, data in image.patched_headers(save)]
    found += [Piece(filler.start, len(filler.data), 0, filler.data) for filler in image.fillers]
    for box, offset, old in zip(image.boxes, image.data_offsets, old_offsets, strict=True):
        nbytes = box_nbytes(box.dtype, box.sizes)
        if nbytes:
            found.append(Piece(offset, nbytes, old))
    return sorted(found)


def dropped_nbytes(layout: Layout, keys: Sequence[str]) -> int:
    """Of the tensors that lie below the keys, in a rank's image."""
    return sum(entry.nbytes for entry in layout.tensors if is_below(entry.name, keys))


def reduced_objects(objects: StockObjects | None, keys: Sequence[str]) -> StockObjects | None:
    """Rank 0's values for stock readers, without those below the keys."""
    if objects is None:
        return None
    kept = {name: place for name, place in objects.index.items() if not is_below(name, keys)}
    index: dict[str, tuple[int, int]] = {}
    data = bytearray()
    for name, (at, nbytes) in kept.items():
        index[name] = (len(data), nbytes)
        data += objects.data[at : at + nbytes]
    return StockObjects(bytes(data), index) if index else None
