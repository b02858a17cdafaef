"""A torch.save archive of any origin in a range of a file: where its tensors lie, and its value by torch's own reader.

Only what is stored is read, never more than lies there; and torch is given a pickle only after all of it was run over
inert values, in an archive that is written here anew: what is looked at is what torch reads.
"""

import io
import os
import zipfile
from typing import Any, BinaryIO

import torch

from ckptd.shared.base.wording import shown
from ckptd.shared.format.layout import TORCH_DTYPES, itemsize
from ckptd.shared.torchfile import inert, zip_read


class TorchArchive:
    """Bytes offset to offset + nbytes of an open file. Raises ValueError for what is no such archive."""

    def __init__(self, file: BinaryIO, offset: int, nbytes: int, *, where: str) -> None:
        self._fd, self._offset, self._nbytes, self._where = file.fileno(), offset, nbytes, where
        found = zip_read.entries(self._read, nbytes)
        self._entries = {name.partition("/")[2]: entry for name, entry in found.items()}
        if "data.pkl" not in self._entries:
            raise ValueError("a zip without data.pkl")
        if "byteorder" in self._entries and self._content("byteorder", 16) != b"little":
            raise ValueError("its numbers are not little-endian")
        self._pickle = self._content("data.pkl", inert.MAX_NBYTES)
        sizes = {name[5:]: entry.nbytes for name, entry in self._entries.items() if name.startswith("data/")}
        self.inert = inert.loads(self._pickle, where=where, storages=sizes)
        """Its value, in which nothing of the archive's was made."""

    def _read(self, start: int, nbytes: int) -> bytes:
        start = min(start, self._nbytes)
        return os.pread(self._fd, min(nbytes, self._nbytes - start), self._offset + start)

    def _content(self, name: str, most: int) -> bytes:
        entry = self._entries[name]
        if entry.nbytes > most:
            raise ValueError(f"{shown(name)} is too large")
        data = self._read(zip_read.data_start(self._read, entry, self._nbytes), entry.nbytes)
        if len(data) != entry.nbytes:
            raise ValueError(f"{shown(name)} is cut off")
        return data

    def start_of(self, tensor: inert.Stored) -> int:
        """Where in the archive the elements of a contiguous tensor begin. Raises ValueError when they lie nowhere."""
        entry = self._storage(tensor)
        first = tensor.offset * itemsize(tensor.dtype)
        if first + tensor.elements * itemsize(tensor.dtype) > entry.nbytes:
            raise ValueError("it ends before its last element")
        return zip_read.data_start(self._read, entry, self._nbytes) + first

    def _storage(self, tensor: inert.Stored) -> zip_read.Entry:
        entry = self._entries.get(f"data/{tensor.key}")
        if entry is None:
            raise ValueError(f"it has no {shown(f'data/{tensor.key}')}")
        return entry

    def strided(self, tensor: inert.Stored) -> torch.Tensor:
        """A tensor whose elements do not follow each other, as a view of its storage. Raises ValueError as start_of."""
        entry, item = self._storage(tensor), itemsize(tensor.dtype)
        spans = ((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride, strict=True))
        if (tensor.offset + sum(spans) + 1) * item > entry.nbytes or 0 in tensor.shape or entry.nbytes % item:
            raise ValueError("it ends before its last element")
        data = bytearray(self._content(f"data/{tensor.key}", self._nbytes))
        flat = torch.frombuffer(data, dtype=torch.uint8).view(getattr(torch, TORCH_DTYPES[tensor.dtype]))
        return flat.as_strided(tensor.shape, tensor.stride, tensor.offset)

    def load(self) -> Any:
        """Its value, by torch.load with weights_only. Raises what that raises."""
        made = io.BytesIO()
        with zipfile.ZipFile(made, "w", zipfile.ZIP_STORED) as archive:
            for name in self._entries:
                if name in {"data.pkl", "version"} or name.startswith("data/"):
                    archive.writestr(f"archive/{name}", self._content(name, self._nbytes))
            archive.writestr("archive/byteorder", b"little")
        made.seek(0)
        return torch.load(made, map_location="cpu", weights_only=True)
