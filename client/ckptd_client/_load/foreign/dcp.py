"""Opens a directory that torch.distributed.checkpoint wrote: `.metadata` and files of torch.save archives.

Only readers with an allow-list unpickle anything: our reader `.metadata`, torch's weights_only reader archives.
"""

import io
import os
import zipfile
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO

import torch

from ckptd.shared.base.errors import DamagedError, RestoreError
from ckptd.shared.base.wording import cut, shown
from ckptd.shared.files.regular import contents, open_followed
from ckptd.shared.format.dtypes import DTYPES, itemsize
from ckptd.shared.format.layout import Path, TensorEntry, box_nbytes, is_trainer_file
from ckptd.shared.format.placement import MAX_DIMS
from ckptd.shared.torchfile import pickle_read
from ckptd.shared.torchfile.metadata_read import read_metadata
from ckptd.shared.torchfile.pickle_read import Global, Made, Stored
from ckptd.shared.torchfile.zip_read import SavedArchive
from ckptd_client._load.foreign.contents import Foreign, read_ranges
from ckptd_client._load.reader import Target
from ckptd_client._local.destination import deliver
from ckptd_client._state.reshard import Ints, Saved
from ckptd_client._state.tensors import CODE_OF
from ckptd_client._state.tree import MAX_DEPTH

METADATA = ".metadata"
_MAX_NBYTES = 1 << 30
_LIMIT = 1 << 62
_CHUNK_NBYTES = 12  # at least, in the pickle: its class, its two fields, and their values or references to such


class TorchArchive(SavedArchive):
    """Bytes offset to offset + nbytes of an open file. Raises ValueError for what is no such archive."""

    def __init__(self, file: BinaryIO, offset: int, nbytes: int, *, where: str) -> None:
        def read(start: int, count: int) -> bytes:
            start = min(start, nbytes)
            return os.pread(file.fileno(), min(count, nbytes - start), offset + start)

        super().__init__(read, nbytes)
        self._all = nbytes
        sizes = {name: entry.nbytes for name, entry in self.storages.items()}
        self.inert = pickle_read.loads(self.pickle, where=where, storages=sizes)
        """Its value, in which nothing of the archive's was made."""

    def place_of(self, tensor: pickle_read.Stored) -> int:
        """Where in the archive the elements of a contiguous tensor begin. Raises ValueError when they lie nowhere."""
        entry = self.storage_of(tensor)
        first = tensor.offset * itemsize(tensor.dtype)
        if first + tensor.elements * itemsize(tensor.dtype) > entry.nbytes:
            raise ValueError("it ends before its last element")
        return self.start_of(entry) + first

    def strided(self, tensor: pickle_read.Stored) -> torch.Tensor:
        """A tensor whose elements do not follow each other, as a view of its storage. Raises ValueError as place_of."""
        entry, item = self.storage_of(tensor), itemsize(tensor.dtype)
        spans = ((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride, strict=True))
        if (tensor.offset + sum(spans) + 1) * item > entry.nbytes or 0 in tensor.shape or entry.nbytes % item:
            raise ValueError("it ends before its last element")
        data = bytearray(self.content(f"data/{tensor.key}", self._all))
        flat = torch.frombuffer(data, dtype=torch.uint8).view(getattr(torch, DTYPES[tensor.dtype].torch))
        return flat.as_strided(tensor.shape, tensor.stride, tensor.offset)

    def load(self) -> Any:
        """Its value, by torch.load with weights_only. Raises what that raises."""
        made = io.BytesIO()
        with zipfile.ZipFile(made, "w", zipfile.ZIP_STORED) as archive:
            for name in self.entries:
                if name in {"data.pkl", "version"} or name.startswith("data/"):
                    archive.writestr(f"archive/{name}", self.content(name, self._all))
            archive.writestr("archive/byteorder", b"little")
        made.seek(0)
        return torch.load(made, map_location="cpu", weights_only=True)


@dataclass(frozen=True, slots=True)
class _Slice:
    """The range of an archive in a file."""

    path: str
    offset: int
    nbytes: int


def open_dcp(directory: str) -> Foreign:
    """The directory's tensors and values. Raises DamagedError for metadata that no DCP wrote, OSError."""
    return _Opener(directory).open()


class _Opener:
    """One directory."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.where = os.path.join(directory, METADATA)
        self.out = Foreign("dcp")
        self.nbytes = 0  # of the metadata
        self.nchunks = 0

    def open(self) -> Foreign:
        raw = contents(self.where, _MAX_NBYTES, follow=True)
        self.nbytes = len(raw)
        state = read_metadata(raw, where=self.where).state
        slices = self._slices(self._dict(state.get("storage_data")))
        mappings = self._dict(state.get("planner_data") or {})
        for name, described in self._dict(state.get("state_dict_metadata")).items():
            self.out.paths[self._name(name)] = self._path(mappings.get(name), name)
            kind = described.of if type(described) is Made else ""
            if kind == "TensorStorageMetadata":
                self._tensor(name, self._dict(described.state), slices)
            elif kind == "BytesStorageMetadata":
                self.out.values[name] = partial(_load_value, self._one(slices, name, None), name)
            else:
                self._refuse(f"{shown(name)} is neither tensor nor bytes")
        return self.out

    def _tensor(self, name: str, state: dict[str, Any], slices: dict[tuple[str, Ints | None], _Slice]) -> None:
        properties = state.get("properties")
        fields = properties.state if type(properties) is Made else None
        dtype: Any = fields[0] if type(fields) is tuple and fields else None
        if type(dtype) is not Global:
            self._refuse(f"{shown(name)} has no dtype")
        whole, chunks = self._ints(state.get("size")), state.get("chunks")
        code = CODE_OF.get(getattr(torch, dtype.name.removeprefix("torch."), None))  # type: ignore[arg-type]
        if code is None:
            self.out.unreadable[name] = f"of the dtype {shown(dtype.name)}, which ckptd cannot hold"
            return
        seen: set[Ints] = set()
        for chunk in self._counted(chunks) if type(chunks) is list else self._refuse(f"{shown(name)} has no chunks"):
            box = self._dict(chunk.state if type(chunk) is Made else None)
            offsets, sizes = self._ints(box.get("offsets")), self._ints(box.get("sizes"))
            if not len(offsets) == len(sizes) == len(whole) or not all(
                o + s <= g for o, s, g in zip(offsets, sizes, whole, strict=True)
            ):
                self._refuse(f"{shown(name)} has a chunk outside of it")
            nbytes = box_nbytes(code, sizes)
            entry = TensorEntry(name, code, whole, offsets, sizes, 0, nbytes)
            boxes = self.out.boxes.setdefault(name, [])
            if nbytes:
                if offsets in seen:
                    self._refuse(f"{shown(name)} has two chunks at {list(offsets)}")
                seen.add(offsets)
                place = self._one(slices, name, offsets)
                if nbytes > place.nbytes:  # DCP writes every element
                    self._refuse(f"{shown(name)} has a chunk of {nbytes:,} bytes in {place.nbytes:,}")
                boxes.append(Saved(len(self.out.sources), entry))
                self.out.sources.append(partial(_read_tensor, place, entry))
            elif 0 in whole:
                boxes.append(Saved(0, entry))

    def _counted(self, chunks: list[Any]) -> list[Any]:
        """Limits the number of chunks: names that share one list would make a small file large."""
        self.nchunks += len(chunks)
        if self.nchunks * _CHUNK_NBYTES > self.nbytes:
            self._refuse(f"it has more chunks than {self.nbytes:,} bytes can hold")
        return chunks

    def _slices(self, storage: dict[Any, Any]) -> dict[tuple[str, Ints | None], _Slice]:
        found = {}
        for index, info in storage.items():
            where = self._dict(index.state if type(index) is Made else None)
            place = self._dict(info.state if type(info) is Made else None)
            offset = where.get("offset")
            key = (self._name(where.get("fqn")), None if offset is None else self._ints(offset))
            start, nbytes = self._ints((place.get("offset"), place.get("length")))
            if place.get("transform_descriptors"):
                raise RestoreError(
                    f"{self.where}: {shown(key[0])} was written through an extension, such as compression",
                    hint="load it with dcp.load and a FileSystemReader that has the extension, then save it with ckptd",
                )
            found[key] = _Slice(self._file(place.get("relative_path")), start, nbytes)
        return found

    def _file(self, name: Any) -> str:
        if type(name) is not str or not is_trainer_file(name):
            self._refuse(f"{shown(name)} is no file of this directory")
        return os.path.join(self.directory, name)

    def _one(self, slices: dict[tuple[str, Ints | None], _Slice], name: str, offsets: Ints | None) -> _Slice:
        found = slices.get((name, offsets))
        return found if found is not None else self._refuse(f"it does not say where {shown(name)} lies")

    def _path(self, keys: Any, name: str) -> Path:
        if type(keys) not in (tuple, list) or not 0 < len(keys) <= MAX_DEPTH:
            return (("k", name),)
        return tuple(("l", key) if type(key) is int else ("k", self._name(key)) for key in keys)

    def _name(self, name: Any) -> str:
        return name if type(name) is str else self._refuse("a name is no text")

    def _ints(self, values: Any) -> Ints:
        good = type(values) is tuple and len(values) <= MAX_DIMS
        if not good or not all(type(value) is int and 0 <= value < _LIMIT for value in values):
            self._refuse("a shape, an offset or a length is none")
        return tuple(values)

    def _dict(self, value: Any) -> dict[Any, Any]:
        return value if type(value) is dict else self._refuse("a part of it is missing")

    def _refuse(self, what: str) -> Any:
        raise DamagedError(f"{self.where} is no metadata of torch.distributed.checkpoint: {what}")


def _open(file: BinaryIO, place: _Slice) -> TorchArchive:
    """Opens an archive. Raises DamagedError, or ValueError if it is no archive."""
    if place.offset + place.nbytes > os.fstat(file.fileno()).st_size:
        raise DamagedError(f"{place.path}: ends before byte {place.offset + place.nbytes}, where a tensor should")
    return TorchArchive(file, place.offset, place.nbytes, where=place.path)


def _read_tensor(place: _Slice, entry: TensorEntry, targets: list[Target]) -> None:
    """Reads only the wanted ranges if the archive has the tensor in row-major order, as usual."""
    try:
        with open_followed(place.path) as file:
            archive = _open(file, place)
            stored = archive.inert
            if type(stored) is not Stored:
                tensor = archive.load()
            elif (stored.dtype, stored.shape) != (entry.dtype, entry.sizes):
                return _check(place, entry, None)
            elif stored.contiguous:
                return read_ranges(place.path, targets, base=place.offset + archive.place_of(stored))
            else:
                tensor = archive.strided(stored)
    except (DamagedError, OSError):
        raise
    except Exception as error:
        raise DamagedError(f"{place.path}: {shown(entry.name)} cannot be read: {cut(error)}") from error
    _check(place, entry, tensor)
    return _copy(tensor.contiguous(), targets)


def _check(place: _Slice, entry: TensorEntry, tensor: Any) -> None:
    good = isinstance(tensor, torch.Tensor) and CODE_OF.get(tensor.dtype) == entry.dtype
    if not good or tuple(tensor.shape) != entry.sizes:
        raise DamagedError(f"{place.path}: {shown(entry.name)} is not what {METADATA} says it is")


def _copy(tensor: torch.Tensor, targets: list[Target]) -> None:
    places = [(target.data_offset, target.place(0, target.nbytes), target.nbytes) for target in targets]
    deliver(places, tensor.data_ptr())


def _load_value(place: _Slice, name: str) -> Any:
    with open_followed(place.path) as file:
        try:
            return _open(file, place).load()
        except (DamagedError, OSError):
            raise
        except Exception as error:
            first = cut(error).partition("\n")[0]
            raise RestoreError(
                f"{place.path}: the value of {shown(name)} is pickled, and is refused: {first}",
                hint=(
                    "leave it out of the state; or, if you trust the file, allow its classes with "
                    "torch.serialization.add_safe_globals, or load it with dcp.load and save it with ckptd"
                ),
            ) from error
