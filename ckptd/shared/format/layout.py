"""Description of a rank's image: position of each tensor, and the leaves that are no tensors.

Split in two: the Layout is encoded once per plan and copied as bytes at each save, the Leaves change at each save.
"""

import bisect
import itertools
import posixpath
from collections.abc import Iterator, Sequence
from typing import Annotated, Literal, NamedTuple

import msgspec

from ckptd.shared.base.decoding import decoded
from ckptd.shared.base.errors import DamagedError
from ckptd.shared.base.ids import MAX_PARTS, FileName, Nbytes, Rank, StorePath, WorldSize, file_name
from ckptd.shared.base.wording import shown
from ckptd.shared.format.dtypes import DTYPES, itemsize
from ckptd.shared.format.placement import Shape

VERSION = 3
MAX_TENSORS = 10_000_000
MAX_STEPS = 101  # of a path
MIN_HEADER_NBYTES = 10  # the length, and {}
MAX_TRAINER_FILE = 512  # characters
_INT64 = range(-(1 << 63), 1 << 63)
_PAGE = 4096

TrainerFile = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_TRAINER_FILE)]
# One step from a container to an item of it: "k" a dict by string, "i" a dict by int, "l" a list, "t" a tuple index.
PathStep = tuple[Literal["k", "i", "l", "t"], str | int]
Path = tuple[PathStep, ...]


class TensorEntry(msgspec.Struct, frozen=True, array_like=True):
    """One box of one named tensor: which part of the global tensor it is, and its bytes in the image."""

    name: str
    dtype: str  # safetensors code, or a code of dtypes
    global_shape: Shape
    offsets: Shape  # of this box in the global tensor
    sizes: Shape  # of this box
    data_offset: Nbytes  # absolute in the image: in the file, if the image is one
    nbytes: Nbytes
    # Offset of the torch.save archive around the payload; 0: none.
    slice_offset: Nbytes = 0
    slice_nbytes: Nbytes = 0

    @property
    def extent(self) -> tuple[int, int]:
        """First byte and end of all that is this tensor's: the archive, or the bare payload."""
        if self.slice_nbytes:
            return self.slice_offset, self.slice_offset + self.slice_nbytes
        return self.data_offset, self.data_offset + self.nbytes


class Planned(msgspec.Struct, frozen=True, array_like=True):
    """A tensor of the state, as all ranks that save it have it."""

    name: str
    dtype: str  # safetensors code, or a code of dtypes
    global_shape: Shape


class LayoutPart(msgspec.Struct, frozen=True, array_like=True):
    """One file of an image that is several. All but the last are whole pages, but for those of raw images."""

    nbytes: Nbytes
    header_nbytes: Nbytes  # 0 of a trainer's file, which is its bytes and nothing else


class SavedFor(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where the trainer said that it looks for its files: to be compared with a path that the reader has, no more.

    Everybody with write access to the store can write this: ckptd opens, writes or removes nothing that it names.
    """

    directory: StorePath
    whole: bool
    pointer: Annotated[str, msgspec.Meta(max_length=4096)] = ""


def is_plain(said: SavedFor | None) -> bool:
    """Whether its paths are what they look like: with no step up, their last name is a name."""
    paths = [] if said is None else [said.directory, said.pointer or said.directory]
    return all(path.strip("/") and posixpath.normpath(path) == path for path in paths)


class Extent(NamedTuple):
    """A file and the bytes of the image that it holds."""

    name: str
    start: int
    nbytes: int


class Layout(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a rank says of its image: constant from save to save."""

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
    # The files one after the other, when they are more than one: a name can stand but once in each.
    parts: Annotated[list[LayoutPart], msgspec.Meta(max_length=MAX_PARTS)] = []
    # Of a raw image: what the trainer calls its files, which are the parts after the first. Each is a tensor of bytes.
    names: Annotated[list[TrainerFile], msgspec.Meta(max_length=MAX_PARTS)] = []
    saved_for: SavedFor | None = None
    # Names of tensors that other ranks hold too and saved in full as well, by how the ranks hold them: empty where each
    # holds all, else a text that is the same where each holds the same boxes. A reader must not blend such ranks.
    held_alike: dict[str, list[str]] = {}
    # By tensor the ranks that hold it together, as rank_members has them, where they are a part of the job: other ranks
    # may have another tensor of the name.
    holders: dict[str, bytes] = {}

    @property
    def raw(self) -> bool:
        """Whether the parts after the first are a trainer's own files."""
        return bool(self.names)

    def place(self, offset: int) -> tuple[str, int]:
        """The file that holds a byte of the image, and the byte's offset in it."""
        if not self.parts:
            return self.file, offset
        extent = next(e for e in reversed(self.extents()) if e.start <= offset)
        return extent.name, offset - extent.start

    def extents(self) -> list[Extent]:
        """The files of the image, in its order."""
        return extents(self.rank, self.image_nbytes, [part.nbytes for part in self.parts], raw=self.raw)


def file_layouts(layout: Layout) -> Iterator[tuple[int, Layout]]:
    """(start in the image, its own layout) of each file, as if it stood alone."""
    entries = sorted(layout.tensors, key=_start)
    parts = layout.parts or [LayoutPart(layout.image_nbytes, layout.header_nbytes)]
    first = 0
    for extent, part in zip(layout.extents(), parts, strict=True):
        stop = _stop_of(part, parts, entries, extent.start + _stride(part.nbytes, raw=layout.raw), first)
        own = msgspec.structs.replace(
            layout,
            file=extent.name,
            header_nbytes=part.header_nbytes,
            image_nbytes=part.nbytes,
            tensors=[_moved(entry, -extent.start) for entry in entries[first:stop]],
            parts=[],
            names=[],
        )
        first = stop
        yield extent.start, own


def _stop_of(part: LayoutPart, parts: list[LayoutPart], entries: list[TensorEntry], end: int, first: int) -> int:
    """Which of the sorted entries is the first that the part, up to end, does not have. The last has the rest."""
    return len(entries) if part is parts[-1] else bisect.bisect_left(entries, end, first, key=_start)


def _moved(entry: TensorEntry, by: int) -> TensorEntry:
    slice_offset = entry.slice_offset + by if entry.slice_nbytes else 0
    return msgspec.structs.replace(entry, data_offset=entry.data_offset + by, slice_offset=slice_offset)


def extents(rank: int, image_nbytes: int, parts: Sequence[int], *, raw: bool = False) -> list[Extent]:
    """The files that an image is drained to, from the bytes of each: one file when parts is empty.

    Between those of a raw image lie zeros, to the next page, that are in none.
    """
    sizes = parts or [image_nbytes]
    starts = itertools.accumulate((_stride(nbytes, raw=raw) for nbytes in sizes), initial=0)
    sized = enumerate(zip(starts, sizes, strict=False))
    return [Extent(file_name(rank, number, raw=raw), start, nbytes) for number, (start, nbytes) in sized]


def _stride(nbytes: int, *, raw: bool) -> int:
    """From the start of a part to that of the next. An empty file of a raw image has a page: no two start together."""
    return max(1, -(-nbytes // _PAGE)) * _PAGE if raw else nbytes


class Leaf(msgspec.Struct, frozen=True, array_like=True):
    """A value that is no tensor, in a safe encoding."""

    codec: str
    data: bytes


class Leaves(msgspec.Struct, frozen=True, array_like=True):
    """What a rank has beside its tensors: new at each save. metadata: of rank 0, as save_metadata has it."""

    version: int
    leaves: dict[str, Leaf]
    metadata: dict[str, bool | int | float | str | None] = {}


def contiguous_strides(sizes: Sequence[int]) -> list[int]:
    """Elements from one index to the next, per dimension, of a box whose elements follow each other. As torch's."""
    strides = [1] * len(sizes)
    for dim in range(len(sizes) - 1, 0, -1):
        strides[dim - 1] = strides[dim] * max(1, sizes[dim])
    return strides


def box_nbytes(dtype: str, sizes: Shape) -> int:
    """Bytes of a contiguous box."""
    nbytes = itemsize(dtype)
    for size in sizes:
        nbytes *= size
    return nbytes


_encoder = msgspec.msgpack.Encoder()
_leaves_decoder = msgspec.msgpack.Decoder(Leaves)


def encode_leaves(leaves: Leaves) -> bytes:
    """Encoded form of a rank's leaves. Without metadata, equal leaves of all ranks have equal bytes."""
    return _encoder.encode(leaves if leaves.metadata else (leaves.version, leaves.leaves))


def checked(layout: Layout, where: str) -> Layout:
    """The layout, all that it says held against itself. Raises DamagedError, naming where."""
    _check_names(layout, where)
    parts = layout.parts or [LayoutPart(layout.image_nbytes, layout.header_nbytes)]
    adds_up = are_parts([part.nbytes for part in parts], layout.image_nbytes, raw=layout.raw)
    if not adds_up or parts[0].header_nbytes != layout.header_nbytes:
        raise DamagedError(f"{where}: layout: the parts of the image do not add up to it")
    _check_raw(layout, where)
    entries = sorted(layout.tensors, key=lambda e: e.extent)
    at, base = 0, 0
    for number, part in enumerate(parts):
        end = base + _stride(part.nbytes, raw=layout.raw)
        stop = _stop_of(part, parts, entries, end, at)
        _check_part(part, base, entries[at:stop], where, raw=layout.raw and number > 0)
        at, base = stop, end
    return layout


def _start(entry: TensorEntry) -> int:
    return entry.extent[0]


def _check_raw(layout: Layout, where: str) -> None:
    """Each part but the first is the file of its name, once, and all of its bytes."""
    if not layout.raw:
        return
    if len(layout.names) != len(layout.parts) - 1 or len(set(layout.names)) != len(layout.names):
        raise DamagedError(f"{where}: layout: {len(layout.names)} names of {len(layout.parts)} files")
    if not is_plain(layout.saved_for):
        raise DamagedError(f"{where}: layout: a directory that is no plain path")
    if not all(is_trainer_file(name) for name in layout.names):
        raise DamagedError(f"{where}: layout: a file's name that leads elsewhere")
    said = {entry.name: (entry.dtype, entry.data_offset, entry.nbytes) for entry in layout.tensors}
    files = zip(layout.names, layout.extents()[1:], strict=True)
    if said != {name: ("U8", start, nbytes) for name, (_, start, nbytes) in files}:
        raise DamagedError(f"{where}: layout: its files are not its tensors")


def is_trainer_file(name: str) -> bool:
    """Whether it may be the path of a file in a trainer's directory: relative, and never out of it."""
    steps = name.split("/")
    sound = 0 < len(name) <= MAX_TRAINER_FILE and is_path_text(name)
    return sound and not any(step in {"", ".", ".."} for step in steps)


def is_text(text: object) -> bool:
    """Whether it is text that can be written: none of its characters is half of one."""
    return type(text) is str and not any("\ud800" <= char <= "\udfff" for char in text)


def is_path_text(text: str) -> bool:
    """Whether it can be part of a path: text without NUL or another control character."""
    return is_text(text) and not any(char < " " for char in text)


def _check_part(part: LayoutPart, base: int, entries: list[TensorEntry], where: str, *, raw: bool) -> None:
    """One file of the image, from base on: its tensors, in their order, lie behind its header and apart."""
    least = 0 if raw else MIN_HEADER_NBYTES
    if not least <= part.header_nbytes <= (0 if raw else part.nbytes):
        raise DamagedError(f"{where}: layout: a header of {part.header_nbytes} bytes in a file of {part.nbytes}")
    if len({entry.name for entry in entries}) != len(entries):
        raise DamagedError(f"{where}: layout: two tensors of one name in one file")
    end = base + part.header_nbytes
    for entry in entries:
        _check_entry(entry, where)
        start, stop = entry.extent
        if start < end or stop > base + part.nbytes:
            raise DamagedError(f"{where}: tensor {shown(entry.name)} lies outside its image or over another tensor")
        end = stop


def _check_names(layout: Layout, where: str) -> None:
    """Checks that a name encodes its path, and that a tied one leads to a tensor."""
    names = {entry.name for entry in layout.tensors}
    check_paths(layout.paths, where)
    for name, holder in layout.aliases.items():
        if holder not in names or name in names:
            raise DamagedError(f"{where}: layout: {shown(name)} is tied to {shown(holder)}, which is no tensor")
    strays = (names | layout.aliases.keys()) - layout.paths.keys()
    if strays:
        raise DamagedError(f"{where}: layout: {shown(min(strays))} has no path")


def check_paths(paths: dict[str, Path], where: str) -> None:
    """Raises DamagedError, naming where, unless each name encodes its path."""
    for name, path in paths.items():
        if not 0 < len(path) <= MAX_STEPS or name != ".".join([str(key) for _, key in path]):
            raise DamagedError(f"{where}: layout: the path of {shown(name)} is another's")
        if not all(_is_step(kind, key) for kind, key in path):
            raise DamagedError(f"{where}: layout: the path of {shown(name)} has an impossible key")


def _is_step(kind: str, key: str | int) -> bool:
    if kind == "k":
        return isinstance(key, str)
    return isinstance(key, int) and key in _INT64 and (kind == "i" or key >= 0)


def are_parts(parts: Sequence[int], image_nbytes: int, *, raw: bool = False) -> bool:
    """Whether files of so many bytes make up an image; each starts on a page, so that all can be mapped."""
    before = [_stride(nbytes, raw=raw) for nbytes in parts[:-1]]
    return sum(before) + parts[-1] == image_nbytes and not any(nbytes % _PAGE for nbytes in before)


def _check_entry(entry: TensorEntry, where: str) -> None:
    if entry.dtype not in DTYPES:
        raise DamagedError(f"{where}: tensor {shown(entry.name)}: unknown dtype code {shown(entry.dtype)}")
    dims = len(entry.global_shape)
    if len(entry.offsets) != dims or len(entry.sizes) != dims:
        raise DamagedError(f"{where}: tensor {shown(entry.name)}: shape, offsets and sizes differ in length")
    if any(o + s > g for o, s, g in zip(entry.offsets, entry.sizes, entry.global_shape, strict=True)):
        raise DamagedError(f"{where}: tensor {shown(entry.name)}: a box outside its tensor")
    if entry.nbytes != box_nbytes(entry.dtype, entry.sizes):
        raise DamagedError(f"{where}: tensor {shown(entry.name)}: {entry.nbytes} bytes do not fit its shape")
    start, stop = entry.extent
    if entry.data_offset < start or entry.data_offset + entry.nbytes > stop:
        raise DamagedError(f"{where}: tensor {shown(entry.name)}: its payload lies outside its archive")
    if entry.slice_offset and not entry.slice_nbytes:
        raise DamagedError(f"{where}: tensor {shown(entry.name)}: an archive without bytes")


def decode_leaves(data: bytes, *, where: str) -> Leaves:
    """The leaves in data, version checked; their own codecs are the client's business."""
    leaves = decoded(_leaves_decoder.decode, data, f"{where}: leaves are not readable")
    if leaves.version != VERSION:
        raise DamagedError(f"{where}: leaves version {leaves.version}, this program reads {VERSION}")
    return leaves
