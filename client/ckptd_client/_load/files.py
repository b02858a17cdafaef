"""The result of load_files: a trainer's files, read by name."""

import os
from types import TracebackType
from typing import Any, Self

import torch

from ckptd.shared.base.errors import UsageError
from ckptd.shared.files.mapping import Mapping
from ckptd.shared.format.layout import SavedFor, TensorEntry
from ckptd_client._load.checkpoint import Checkpoint
from ckptd_client._load.reader import Target


class RestoredFiles:
    """The files of a checkpoint, of all its ranks, to be read by name. Close it, or use it as a context manager.

    If two ranks have a file of one name, that of the lower rank counts.
    """

    def __init__(self, found: Checkpoint) -> None:
        self._found = found
        self._places: dict[str, tuple[int, TensorEntry]] = {}
        self._saved_for: SavedFor | None = None
        for rank, layout in sorted(found.layouts.items()):
            self._saved_for = self._saved_for or layout.saved_for
            for entry in layout.tensors if layout.raw else ():
                self._places.setdefault(entry.name, (rank, entry))

    @property
    def step(self) -> int:
        """The step of the checkpoint."""
        return self._found.save.step

    @property
    def tier(self) -> str:
        """Where this rank reads from: "arena", "peer", "rebuilt" or "pfs"."""
        return str(self._found.tier)

    @property
    def is_keyed(self) -> bool:
        """Whether a key proves what is read. Nothing proves the files in the trainer's directory."""
        return self._found.is_keyed

    @property
    def notes(self) -> list[str]:
        """What was damaged or missing on the way."""
        return list(self._found.notes)

    @property
    def names(self) -> list[str]:
        """Names of all files of all ranks, sorted."""
        return sorted(self._places)

    @property
    def directory(self) -> str | None:
        """The directory that the trainer asked for, as the checkpoint records it: only for comparison with a path."""
        return self._saved_for.directory if self._saved_for is not None else None

    @property
    def pointer(self) -> str | None:
        """Path of the small file that names the directory, as the checkpoint records it: only for comparison."""
        return (self._saved_for.pointer or None) if self._saved_for is not None else None

    @property
    def is_published(self) -> bool:
        """Whether the daemon has put the files into the trainer's directory. Others may have replaced them since."""
        return self._found.is_published

    def is_replaced(self, name: str) -> bool:
        """Whether a file in the trainer's directory was replaced, or written to, since the daemon put it there.

        False when there is no such file. Raises UsageError for a name that the checkpoint does not have.
        """
        rank, entry = self._places[name] if name in self._places else (0, self._entry(name))
        if self.directory is None or not self.is_published:
            return False
        own, _ = self._found.layouts[rank].place(entry.data_offset)
        return self._found.stored.is_replaced(own, os.path.join(self.directory, name))

    @property
    def is_altered(self) -> bool:
        """Whether any file in the trainer's directory was replaced or removed since the daemon put it there."""
        there = self.directory
        if there is None or not self.is_published or not os.path.isdir(there):
            return False
        return any(not os.path.exists(os.path.join(there, name)) or self.is_replaced(name) for name in self._places)

    def rank_of(self, name: str) -> int:
        """Returns the rank that saved the file. Raises UsageError for an unknown name."""
        self._entry(name)
        return self._places[name][0]

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def read(self, name: str) -> bytearray:
        """Returns the bytes of a file; every block is checked.

        Raises:
            UsageError: The checkpoint has no file of that name.
            DamagedError: Bytes differ from their digest.
        """
        entry = self._entry(name)
        data = bytearray(entry.nbytes)
        if data:
            self._fill(name, torch.frombuffer(data, dtype=torch.uint8).data_ptr())
        return data

    def torch_load(self, name: str, *, map_location: Any = None, weights_only: bool = True) -> Any:
        """Returns what `torch.load` makes of the file. Its tensors share the memory that the file was read into.

        Raises as `read` does, and what torch.load raises.
        """
        fd = self.memory_file(name)
        try:
            path = f"/proc/self/fd/{fd}"  # torch maps files that it can name
            mapped = bool(self._entry(name).nbytes)
            return torch.load(path, map_location=map_location, weights_only=weights_only, mmap=mapped)
        finally:
            os.close(fd)

    def memory_file(self, name: str) -> int:
        """Returns the descriptor of a file in memory with these bytes and no path. The caller closes it.

        Raises as `read` does, and OSError.
        """
        entry = self._entry(name)
        fd = os.memfd_create(f"ckptd-{os.path.basename(name)[:200]}", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, entry.nbytes)
            if entry.nbytes:
                mapping = Mapping(fd, entry.nbytes)
                try:
                    self._fill(name, mapping.address)
                finally:
                    mapping.close()
        except BaseException:
            os.close(fd)
            raise
        return fd

    def write_to(self, directory: str | os.PathLike[str], *, own: int | None = None) -> None:
        """Writes all files, or those of rank `own`, below a directory, not synced. Raises as `read`, and OSError."""
        for name, (rank, _) in self._places.items():
            if own is not None and rank != own:
                continue
            path = os.path.join(os.fspath(directory), name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "wb") as file:
                file.write(self.read(name))

    def close(self) -> None:
        """Releases the memory and the files that it reads from. Idempotent."""
        self._found.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _entry(self, name: str) -> TensorEntry:
        if name not in self._places:
            some = ", ".join(self.names[:8])
            raise UsageError(f"step {self.step} has no file {name!r}", hint=f"it has {some}" if some else "")
        return self._places[name][1]

    def _fill(self, name: str, address: int) -> None:
        rank, entry = self._places[name]
        self._found.read(rank, [Target(entry.data_offset, entry.nbytes, address)])
