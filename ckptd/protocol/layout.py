"""What a rank says of its image: which tensor lies where, and its leaves that are no tensors.

Split in two: the Layout is encoded once per plan and copied as bytes at each save, the Leaves change at each save.
"""

from typing import Annotated, Literal

import msgspec

from ckptd.protocol.errors import DamagedError
from ckptd.protocol.ids import FileName, Nbytes, Rank, WorldSize

VERSION = 1
MAX_TENSORS = 10_000_000
MAX_DIMS = 64
_ITEMSIZE = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4,
    "I64": 8, "U64": 8, "F64": 8, "C64": 8,
}  # fmt: skip

Shape = Annotated[tuple[Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)], ...], msgspec.Meta(max_length=MAX_DIMS)]
# One step from a container to an item of it: "k" a dict by string, "i" a dict by int, "l" a list, "t" a tuple index.
PathStep = tuple[Literal["k", "i", "l", "t"], str | int]
Path = tuple[PathStep, ...]


class TensorEntry(msgspec.Struct, frozen=True, array_like=True):
    """One box of one named tensor: which part of the global tensor it is, and its bytes in the image."""

    name: str
    dtype: str  # safetensors code
    global_shape: Shape
    offsets: Shape  # of this box in the global tensor
    sizes: Shape  # of this box
    data_offset: Nbytes  # absolute in the file
    nbytes: Nbytes


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """Constant part of a rank's manifest fragment."""

    version: int
    file: FileName
    rank: Rank
    world_size: WorldSize
    header_nbytes: Nbytes
    image_nbytes: Nbytes
    plan_id: str
    tensors: Annotated[list[TensorEntry], msgspec.Meta(max_length=MAX_TENSORS)]
    paths: dict[str, Path]  # every name, tensor or leaf, to its place in the nesting
    aliases: dict[str, str]  # tied tensors: name to the name that holds the bytes


class Leaf(msgspec.Struct, frozen=True, array_like=True):
    """A value that is no tensor, in a safe encoding."""

    codec: str
    data: bytes


class Leaves(msgspec.Struct, frozen=True, array_like=True):
    """Changing part of a rank's manifest fragment."""

    version: int
    leaves: dict[str, Leaf]


def itemsize(dtype: str) -> int:
    """Bytes per element of a safetensors dtype code. Raises DamagedError for an unknown code."""
    try:
        return _ITEMSIZE[dtype]
    except KeyError:
        raise DamagedError(f"unknown dtype code {dtype!r}") from None


def box_nbytes(dtype: str, sizes: Shape) -> int:
    """Bytes of a contiguous box."""
    nbytes = itemsize(dtype)
    for size in sizes:
        nbytes *= size
    return nbytes


_encoder = msgspec.msgpack.Encoder()
_layout_decoder = msgspec.msgpack.Decoder(Layout)
_leaves_decoder = msgspec.msgpack.Decoder(Leaves)


def encode(record: Layout | Leaves) -> bytes:
    """Encoded form of a layout or its leaves."""
    return _encoder.encode(record)


def decode_layout(data: bytes, *, where: str) -> Layout:
    """The layout in data, checked: version, ranges inside the image, no overlap. where names the source in errors."""
    try:
        layout = _layout_decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DamagedError(f"{where}: layout is not readable: {error}") from error
    if layout.version != VERSION:
        raise DamagedError(f"{where}: layout version {layout.version}, this program reads {VERSION}")
    end = layout.header_nbytes
    for entry in sorted(layout.tensors, key=lambda e: (e.data_offset, e.nbytes)):
        _check_entry(entry, where)
        if entry.data_offset < end or entry.data_offset + entry.nbytes > layout.image_nbytes:
            raise DamagedError(f"{where}: tensor {entry.name!r} lies outside its image or over another tensor")
        end = entry.data_offset + entry.nbytes
    return layout


def _check_entry(entry: TensorEntry, where: str) -> None:
    if entry.dtype not in _ITEMSIZE:
        raise DamagedError(f"{where}: tensor {entry.name!r}: unknown dtype code {entry.dtype!r}")
    dims = len(entry.global_shape)
    if len(entry.offsets) != dims or len(entry.sizes) != dims:
        raise DamagedError(f"{where}: tensor {entry.name!r}: shape, offsets and sizes differ in length")
    if any(o + s > g for o, s, g in zip(entry.offsets, entry.sizes, entry.global_shape, strict=True)):
        raise DamagedError(f"{where}: tensor {entry.name!r}: a box outside its tensor")
    if entry.nbytes != box_nbytes(entry.dtype, entry.sizes):
        raise DamagedError(f"{where}: tensor {entry.name!r}: {entry.nbytes} bytes do not fit its shape")


def decode_leaves(data: bytes, *, where: str) -> Leaves:
    """The leaves in data, version checked; their own codecs are the client's business."""
    try:
        leaves = _leaves_decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DamagedError(f"{where}: leaves are not readable: {error}") from error
    if leaves.version != VERSION:
        raise DamagedError(f"{where}: leaves version {leaves.version}, this program reads {VERSION}")
    return leaves
