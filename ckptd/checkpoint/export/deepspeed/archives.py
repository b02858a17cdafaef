"""Files as torch.save writes them: the content of their pickle, and the position of each storage in the file."""

import os
from typing import Any, NamedTuple

from ckptd.checkpoint.export.crc import Stretch
from ckptd.checkpoint.export.read import SourceFile
from ckptd.shared.base.errors import DamagedError
from ckptd.shared.base.wording import shown
from ckptd.shared.files.regular import open_followed
from ckptd.shared.format.dtypes import itemsize
from ckptd.shared.torchfile import pickle_read
from ckptd.shared.torchfile.zip_read import SavedArchive

_OLD_FORMAT = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"  # of torch before 1.6


class Range(NamedTuple):
    """A contiguous tensor: elements in a file."""

    file: int  # number of the archive
    start: int  # byte
    elements: int
    dtype: str


class Archive:
    """A file that was opened. value: what it says, inert; its tensors are `pickle_read.Stored`.

    number: by which ranges name the file. Raises DamagedError or OSError, naming the file, for what is no such file.
    """

    def __init__(self, path: str, number: int) -> None:
        self.path = path
        self.number = number
        self._crcs: dict[str, Stretch] = {}
        with open_followed(path) as file:
            self.nbytes = os.fstat(file.fileno()).st_size
            try:
                self._archive = SavedArchive(self._at, self.nbytes)
            except ValueError as error:
                raise self._damaged(self._why(file.fileno(), error)) from None
        self.value = pickle_read.loads(self._archive.pickle, where=path)

    def _at(self, start: int, nbytes: int) -> bytes:
        """Bytes of the file, fewer at its end."""
        with open_followed(self.path) as file:
            return os.pread(file.fileno(), nbytes, min(start, self.nbytes))

    def _why(self, fd: int, error: Exception) -> str:
        head = os.pread(fd, len(_OLD_FORMAT), 0)
        if head == _OLD_FORMAT:
            return "is of torch's format before 1.6"
        if head.startswith(b"PK"):
            return f"is cut off or damaged: {error}"
        return "is no file of torch.save's"

    def _damaged(self, what: str) -> DamagedError:
        hint = "take another checkpoint, or copy the file again from where it was written"
        if "1.6" in what:
            hint = f"with torch: torch.save(torch.load({self.path!r}, weights_only=False), {self.path!r})"
        return DamagedError(f"{self.path} {what}", hint=hint)

    def at(self, *keys: str) -> Any:
        """What it says under these keys, one in the other; None when that is not there."""
        value = self.value
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        return value

    def at_dict(self, *keys: str) -> dict[Any, Any]:
        """The same; an empty dict when there is none."""
        value = self.at(*keys)
        return value if isinstance(value, dict) else {}

    def field(self, *keys: str) -> Any:
        """The same. Raises DamagedError when it is not there."""
        value = self.at(*keys)
        if value is None:
            raise self._damaged(f"has no {keys[-1]}")
        return value

    def range_of(self, tensor: pickle_read.Stored, name: str) -> Range:
        """Where the elements lie. Raises DamagedError, with the tensor's name, when they lie nowhere or scattered."""
        entry = self._archive.storages.get(tensor.key)
        if entry is None:
            raise self._damaged(f"has no {shown(f'data/{tensor.key}')}, where {name} lies")
        if not tensor.contiguous:
            raise DamagedError(
                f"{self.path}: {name} is strided: its elements do not follow each other",
                hint="leave it out: name with --only what you want",
            )
        item = itemsize(tensor.dtype)
        start, stop = tensor.offset * item, (tensor.offset + tensor.elements) * item
        if stop > entry.nbytes:
            raise self._damaged(f"is damaged: {name} ends at byte {stop} of data/{tensor.key}, of {entry.nbytes}")
        try:
            begin = self._archive.start_of(entry)
        except ValueError as error:
            raise self._damaged(f"is cut off or damaged: {error}") from None
        if entry.crc:
            self._crcs[tensor.key] = Stretch(entry.name, begin, entry.nbytes, entry.crc)
        return Range(self.number, begin + start, tensor.elements, tensor.dtype)

    def source(self) -> SourceFile:
        """The file, with the CRCs of the storages that ranges were asked for."""
        return SourceFile(self.path, self.nbytes, None, crcs=tuple(self._crcs.values()))

    def read(self, place: Range) -> bytes:
        """The bytes of a small tensor."""
        return self._at(place.start, place.elements * itemsize(place.dtype))
