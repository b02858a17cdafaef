"""Checkpoints that are directories: files by the calls of the file system."""

import os
from typing import Protocol

from ckptd.shared.files import regular
from ckptd.shared.format.committed import INCARNATIONS_DIR
from ckptd.shared.format.integrity import Integrity
from ckptd.shared.format.manifest import COMMITTED
from ckptd.shared.format.stored_files import StoredFile


class Layer(Protocol):
    """How files are reached. Methods take paths and raise OSError with the path in it."""

    def read_file(self, path: str, max_nbytes: int) -> bytes:
        """Content of a regular file."""

    def size(self, path: str) -> int:
        """Bytes of a regular file."""

    def listdir(self, path: str) -> list[str]:
        """Names in a directory, sorted."""

    def open_read(self, path: str, *, direct: bool = False) -> int:
        """Descriptor of a regular file. direct: past the page cache, where the file system takes it."""


class _Plain:
    """By paths that the user has named: links on the way to the location are followed, and none below it."""

    read_file = staticmethod(regular.contents)
    size = staticmethod(regular.size)

    @staticmethod
    def listdir(path: str) -> list[str]:
        return sorted(os.listdir(path))

    @staticmethod
    def open_read(path: str, *, direct: bool = False) -> int:
        return regular.open_direct(path) if direct else regular.open_regular(path)


_PLAIN = _Plain()


class OpenedFile:
    """A regular file's descriptor, which it owns."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    @property
    def nbytes(self) -> int:
        """Its size now."""
        return os.fstat(self.fd).st_size

    def read(self, into: memoryview, offset: int, nbytes: int) -> int:
        """As StoredFile."""
        return regular.read_pages(self.fd, into, offset, nbytes)

    def close(self) -> None:
        """As StoredFile."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


class DirectoryFiles:
    """Those in the directory at location. layer: how they are reached; a plain one if left out."""

    def __init__(self, location: str, integrity: Integrity, layer: Layer = _PLAIN) -> None:
        self.location = location
        self.integrity = integrity
        self._layer = layer

    def where(self, name: str) -> str:
        """The path."""
        return f"{self.location}/{name}"

    def names(self, folder: str = "") -> list[str]:
        """Sorted."""
        return self._layer.listdir(self.where(folder) if folder else self.location)

    def below(self, name: str) -> "DirectoryFiles":
        """As StoredFiles."""
        return DirectoryFiles(self.where(name), self.integrity, self._layer)

    def modified(self, name: str) -> float:
        """As StoredFiles."""
        return os.stat(self.where(name)).st_mtime

    def size(self, name: str) -> int:
        """As StoredFiles."""
        return self._layer.size(self.where(name))

    def read(self, name: str, max_nbytes: int) -> bytes:
        """As StoredFiles."""
        return self._layer.read_file(self.where(name), max_nbytes)

    def open(self, name: str, *, cached: bool = False) -> StoredFile:
        """Past the page cache, where the file system takes it, unless cached."""
        return OpenedFile(self._layer.open_read(self.where(name), direct=not cached))

    def is_replaced(self, name: str, path: str) -> bool:
        """Whether it is another file, or somebody has written to it."""
        try:
            there, ours = os.stat(path), os.stat(self.where(name))
            committed = os.stat(self.where(COMMITTED))
        except OSError:
            return False
        return not os.path.samestat(there, ours) or there.st_mtime_ns > committed.st_mtime_ns

    def job(self) -> str | None:
        """By the directory above, if a daemon has made it; not if copies were put into it."""
        above = os.path.dirname(self.location)
        try:
            self._layer.listdir(f"{above}/{INCARNATIONS_DIR}")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError:
            pass  # it is there
        return os.path.basename(above)
