"""Opens safetensors files of any origin: one, a directory of them, HuggingFace's with an index, DCP's with offsets."""

import contextlib
import os
from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

import msgspec

from ckptd.shared.base.decoding import MALFORMED
from ckptd.shared.base.errors import DamagedError, UsageError
from ckptd.shared.base.wording import cut, shown
from ckptd.shared.files.regular import contents, open_followed
from ckptd.shared.format.boxes import overlap
from ckptd.shared.format.header import MALFORMED_HEADER, HeaderTensor, parse_header, parse_sharding
from ckptd.shared.format.layout import TensorEntry, box_nbytes, is_trainer_file
from ckptd.shared.format.placement import Shape
from ckptd.shared.torchfile.image import FILLER_PREFIX, MAX_HEADER_NBYTES
from ckptd_client._load.foreign.contents import Foreign, read_ranges
from ckptd_client._state.reshard import Saved
from ckptd_client._state.tensors import DTYPE_OF

SUFFIX = ".safetensors"
INDEX = "model.safetensors.index.json"
_INFO = "DCP_SHARDING_INFO"
_LENGTH_NBYTES = 8
_MOST_LOOKED_AT = 100  # files of a directory, for a message


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class _Box(NamedTuple):
    file: int
    tensor: HeaderTensor
    start: int  # absolute
    offsets: Shape

    @property
    def sizes(self) -> Shape:
        """Sizes of the box."""
        return self.tensor.shape


def open_safetensors(path: str) -> Foreign:
    """Opens a file, or all files of a directory; with an index, takes each name only from its file in the index.

    Raises DamagedError for a file of another format, and for elements that are in two files; OSError.
    """
    homes = _index_of(path)  # None: there is no index
    files = [path] if not os.path.isdir(path) else _files_of(path, homes)
    if not files:
        raise _none_in(path)
    out = Foreign("safetensors")
    found: dict[str, list[_Box]] = {}
    for number, file in enumerate(files):
        out.sources.append(partial(read_ranges, file))
        for name, box in _boxes_of(file, number):
            if homes is None or homes.get(name) == os.path.basename(file):  # another file may have an old one
                found.setdefault(name, []).append(box)
    for name, home in (homes or {}).items():
        if name not in found:
            out.unreadable[name] = f"by {INDEX} alone: {home}, where it should lie, has none"
    for name, boxes in found.items():
        _check_disjoint(name, boxes, files)
        dtype = boxes[0].tensor.dtype
        if dtype in DTYPE_OF:
            out.boxes[name] = list(_saved(name, boxes, path))
            out.paths[name] = (("k", name),)
        else:
            out.unreadable[name] = f"of the dtype {cut(dtype, 40)}, which this torch has not"
    return out


def is_torch_file(path: str) -> bool:
    """Whether a file begins as a zip archive, as those of torch.save do."""
    with open_followed(path) as file:
        return file.read(2) == b"PK"


def _none_in(directory: str) -> UsageError:
    """The error for a directory without a checkpoint, with a hint if it has a torch.save file."""
    for name in sorted(os.listdir(directory))[:_MOST_LOOKED_AT]:
        file = os.path.join(directory, name)
        with contextlib.suppress(OSError):
            if os.path.isfile(file) and is_torch_file(file):
                text = f"{directory} holds no checkpoint that load_from reads; {name} there is a torch.save file"
                return UsageError(text, hint=f"torch.load({shown(file, 4096)}, weights_only=True)")
    hint = "give a ckptd, DCP or safetensors directory, or a .safetensors file"
    return UsageError(f"{directory} holds no checkpoint", hint=hint)


def _index_of(directory: str) -> dict[str, str] | None:
    """The file of each name; None if there is no index."""
    index = os.path.join(directory, INDEX)
    if not os.path.exists(index):
        return None
    try:
        homes = msgspec.json.decode(contents(index, MAX_HEADER_NBYTES, follow=True), type=_Index).weight_map
    except MALFORMED as error:
        raise DamagedError(f"{index}: {cut(error)}") from error
    for name in homes.values():
        if os.path.basename(name) != name or not name.endswith(SUFFIX) or not is_trainer_file(name):
            raise DamagedError(f"{index}: names {shown(name)}, which is no safetensors file beside it")
    return homes


def _files_of(directory: str, homes: dict[str, str] | None) -> list[str]:
    names = os.listdir(directory) if homes is None else set(homes.values())
    return [os.path.join(directory, name) for name in sorted(names) if name.endswith(SUFFIX)]


def _check_disjoint(name: str, boxes: list[_Box], files: list[str]) -> None:
    """Raises DamagedError for elements in two files: it is unknown which are newer."""
    if len({len(box.offsets) for box in boxes}) > 1:
        return  # _saved reports it
    both = overlap(boxes)
    if both is not None:
        one, other = (files[box.file] for box in both)
        raise DamagedError(
            f"tensor {shown(name)} has the same elements in {one} and in {other}",
            hint=f"give one of the files, or write {INDEX} with the file of each name",
        )


def _boxes_of(path: str, number: int) -> Iterable[tuple[str, _Box]]:
    with open_followed(path) as file:
        nbytes = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(_LENGTH_NBYTES), "little")
        if length > min(MAX_HEADER_NBYTES, nbytes - _LENGTH_NBYTES):
            text = f"{path}: is no safetensors file: a header of {length:,} bytes in a file of {nbytes:,}"
            raise DamagedError(text, hint="copy or download it again; of a torch.save file: torch.load")
        raw = file.read(length)
    start = _LENGTH_NBYTES + length
    header = parse_header(raw, nbytes - start, where=f"{path}: is no safetensors file")
    try:
        sharding = parse_sharding(header.metadata.get(_INFO, "{}"))
    except MALFORMED_HEADER as error:
        raise DamagedError(f"{path}: is no safetensors file: {_INFO}: {cut(error)}") from error
    for name, tensor in header.tensors.items():
        if not name.startswith(FILLER_PREFIX):
            offsets = sharding.get(name, (0,) * len(tensor.shape))
            if len(offsets) != len(tensor.shape):
                raise DamagedError(f"{path}: tensor {shown(name)} lies at {len(offsets)} offsets in as many dimensions")
            yield name, _Box(number, tensor, start + tensor.data_offsets[0], offsets)


def _saved(name: str, boxes: list[_Box], where: str) -> Iterable[Saved]:
    first = boxes[0].tensor
    if any((box.tensor.dtype, len(box.tensor.shape)) != (first.dtype, len(first.shape)) for box in boxes):
        raise DamagedError(f"{where}: tensor {shown(name)} has several dtypes or numbers of dimensions")
    ends = [tuple(map(sum, zip(box.offsets, box.tensor.shape, strict=True))) for box in boxes]
    whole = tuple(max(sizes) for sizes in zip(*ends, strict=True))
    for box in boxes:
        nbytes = box_nbytes(first.dtype, box.tensor.shape)
        entry = TensorEntry(name, first.dtype, whole, box.offsets, box.tensor.shape, box.start, nbytes)
        yield Saved(box.file, entry)
