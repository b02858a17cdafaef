"""Opens safetensors files of any origin: one, a directory of them, HuggingFace's with an index, DCP's with offsets."""

import os
from collections.abc import Iterable
from functools import partial
from typing import Annotated, Any, NamedTuple

import msgspec

from ckptd.protocol.boxes import overlap
from ckptd.protocol.errors import DamagedError, UsageError
from ckptd.protocol.layout import Shape, TensorEntry, box_nbytes
from ckptd.regular_files import contents, open_followed
from ckptd_client._foreign import Foreign
from ckptd_client._image import FILLER_PREFIX, MAX_HEADER_NBYTES
from ckptd_client._ranges import read_ranges
from ckptd_client._reshard import Saved
from ckptd_client._tensors import DTYPE_OF

SUFFIX = ".safetensors"
INDEX = "model.safetensors.index.json"
_INFO = "DCP_SHARDING_INFO"
_LENGTH_NBYTES = 8


class _Tensor(msgspec.Struct):
    dtype: str
    shape: Shape
    data_offsets: tuple[Annotated[int, msgspec.Meta(ge=0)], Annotated[int, msgspec.Meta(ge=0)]]


class _Sharding(msgspec.Struct):
    saved_offsets: Shape


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class _Box(NamedTuple):
    file: int
    tensor: _Tensor
    start: int  # absolute
    offsets: Shape

    @property
    def sizes(self) -> Shape:
        """Of the box."""
        return self.tensor.shape


def open_safetensors(path: str) -> Foreign:
    """A file, or all files of a directory; with an index each name from the file that it says, and from no other.

    Raises DamagedError for what is no safetensors file, and for elements that lie in two, OSError.
    """
    homes = _index_of(path)  # None: there is no index
    files = [path] if not os.path.isdir(path) else _files_of(path, homes)
    if not files:
        raise UsageError(f"{path} holds no checkpoint", hint="give a ckptd, DCP or safetensors directory, or a file")
    out = Foreign("safetensors")
    found: dict[str, list[_Box]] = {}
    for number, file in enumerate(files):
        out.sources.append(partial(read_ranges, file))
        for name, box in _boxes_of(file, number):
            if homes is None or homes.get(name) == os.path.basename(file):  # an old one may lie in another file
                found.setdefault(name, []).append(box)
    for name, home in (homes or {}).items():
        if name not in found:
            out.unreadable[name] = f"by {INDEX} alone: {home}, where it should lie, has none"
    for name, boxes in found.items():
        _check_apart(name, boxes, files)
        dtype = boxes[0].tensor.dtype
        if dtype in DTYPE_OF:
            out.boxes[name] = list(_saved(name, boxes, path))
            out.paths[name] = (("k", name),)
        else:
            out.unreadable[name] = f"of the dtype {dtype}, which this torch has not"
    return out


def _index_of(directory: str) -> dict[str, str] | None:
    """The file of each name, when there is an index."""
    index = os.path.join(directory, INDEX)
    if not os.path.exists(index):
        return None
    try:
        homes = msgspec.json.decode(contents(index, MAX_HEADER_NBYTES, follow=True), type=_Index).weight_map
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DamagedError(f"{index}: {error}") from error
    for name in homes.values():
        if os.path.basename(name) != name or not name.endswith(SUFFIX):
            raise DamagedError(f"{index}: names {name!r}, which is no safetensors file beside it")
    return homes


def _files_of(directory: str, homes: dict[str, str] | None) -> list[str]:
    names = os.listdir(directory) if homes is None else set(homes.values())
    return [os.path.join(directory, name) for name in sorted(names) if name.endswith(SUFFIX)]


def _check_apart(name: str, boxes: list[_Box], files: list[str]) -> None:
    """Nobody can say which of two files has the newer bytes."""
    if len({len(box.offsets) for box in boxes}) > 1:
        return  # told elsewhere
    both = overlap(boxes)
    if both is not None:
        one, other = (files[box.file] for box in both)
        raise DamagedError(
            f"tensor {name!r} has the same elements in {one} and in {other}",
            hint=f"give one of the files, or write {INDEX} with the file of each name",
        )


def _boxes_of(path: str, number: int) -> Iterable[tuple[str, _Box]]:
    with open_followed(path) as file:
        nbytes = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(_LENGTH_NBYTES), "little")
        if length > min(MAX_HEADER_NBYTES, nbytes - _LENGTH_NBYTES):
            raise DamagedError(f"{path}: is no safetensors file: a header of {length:,} bytes in a file of {nbytes:,}")
        raw = file.read(length)
    try:
        header = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(header.pop("__metadata__", b"{}"), type=dict[str, Any])
        sharding = msgspec.json.decode(str(metadata.get(_INFO, "{}")), type=dict[str, _Sharding])
        tensors = {name: msgspec.json.decode(entry, type=_Tensor) for name, entry in header.items()}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DamagedError(f"{path}: is no safetensors file: {error}") from error
    for name, tensor in tensors.items():
        if not name.startswith(FILLER_PREFIX):
            offsets = sharding[name].saved_offsets if name in sharding else (0,) * len(tensor.shape)
            yield name, _checked(path, name, _Box(number, tensor, _LENGTH_NBYTES + length, offsets), nbytes)


def _checked(path: str, name: str, box: _Box, file_nbytes: int) -> _Box:
    """The box with its absolute start."""
    first, end = box.tensor.data_offsets
    known = box.tensor.dtype in DTYPE_OF
    if first > end or box.start + end > file_nbytes or len(box.offsets) != len(box.tensor.shape):
        raise DamagedError(f"{path}: tensor {name!r} lies outside the file")
    if known and end - first != box_nbytes(box.tensor.dtype, box.tensor.shape):
        raise DamagedError(f"{path}: tensor {name!r}: {end - first} bytes do not fit its shape")
    return box._replace(start=box.start + first)


def _saved(name: str, boxes: list[_Box], where: str) -> Iterable[Saved]:
    first = boxes[0].tensor
    if any((box.tensor.dtype, len(box.tensor.shape)) != (first.dtype, len(first.shape)) for box in boxes):
        raise DamagedError(f"{where}: tensor {name!r} has several dtypes or numbers of dimensions")
    ends = [tuple(map(sum, zip(box.offsets, box.tensor.shape, strict=True))) for box in boxes]
    whole = tuple(max(sizes) for sizes in zip(*ends, strict=True))
    for box in boxes:
        nbytes = box_nbytes(first.dtype, box.tensor.shape)
        entry = TensorEntry(name, first.dtype, whole, box.offsets, box.tensor.shape, box.start, nbytes)
        yield Saved(box.file, entry)
