"""A torch.save archive of any origin in a range of a file: the places of its tensors, and its value by torch's reader.

Reads only stored data, never more than the range has. torch gets a pickle only after it was run over inert values, in
an archive that is written here again, so that torch reads what was checked.
"""

import io
import os
import zipfile
from typing import Any, BinaryIO

import torch

from ckptd.shared.format.dtypes import DTYPES, itemsize
from ckptd.shared.torchfile import pickle_read
from ckptd.shared.torchfile.archive_read import SavedArchive


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
