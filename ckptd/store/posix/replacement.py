"""The next content of files of a committed checkpoint: under hidden names until they are complete."""

import contextlib
import os

from ckptd.shared.format.stored_files import StoredFiles, read_exactly
from ckptd.shared.stores.directory import DirectoryFiles, OpenedFile
from ckptd.system import failpoints
from ckptd.system.files import FileLayer, is_temp, temp_name


class _HeldFiles(DirectoryFiles):
    """Nothing above the directory is held: the job is that of the place where it was opened."""

    def job(self) -> str | None:
        """As StoredFiles."""
        return DirectoryFiles(self.location, self.integrity).job()


class HeldDirectory:
    """As Held. fs: one that holds the directory at location."""

    def __init__(self, fs: FileLayer, location: str) -> None:
        self._fs = fs
        self.files: StoredFiles = _HeldFiles(location, fs.integrity, fs)

    def replacement(self, name: str, nbytes: int) -> "PosixReplacement":
        """As Held."""
        return PosixReplacement(self._fs, self.files.where(name), nbytes)


class PosixReplacement:
    """Of the file at path, of nbytes, zeros at first. Removes what a killed process left beside the file."""

    def __init__(self, fs: FileLayer, path: str, nbytes: int) -> None:
        self._fs = fs
        self._path = path
        _sweep(fs, path)
        self._temp = temp_name(path)
        self._file: OpenedFile | None = None  # to be read
        with contextlib.ExitStack() as made:
            made.callback(self._unlink)
            self._written = fs.open_write(self._temp, direct=False)
            made.callback(fs.close, self._written)
            fs.truncate(self._written, nbytes)
            self._made = made.pop_all()

    def write(self, data: memoryview, offset: int) -> None:
        """As Replacement."""
        self._fs.pwrite(self._written, data, offset)

    def read(self, into: memoryview, offset: int) -> None:
        """As Replacement."""
        if self._file is None:
            self._file = OpenedFile(self._fs.open_read(self._temp))
            self._made.callback(self._file.close)
        read_exactly(self._file, offset, into)

    def publish(self) -> None:
        """As Replacement."""
        failpoints.reach("repair.file-unsynced")
        self._fs.fsync(self._written)
        failpoints.reach("repair.before-file-rename")
        self._fs.rename(self._temp, self._path)
        failpoints.reach("repair.after-file-rename")
        self._fs.fsync_dir(os.path.dirname(self._path))

    def close(self) -> None:
        """As Replacement."""
        self._made.close()

    def _unlink(self) -> None:
        with contextlib.suppress(OSError):
            self._fs.unlink(self._temp)


def _sweep(fs: FileLayer, path: str) -> None:
    head, name = os.path.split(path)
    try:
        entries = fs.listdir(head)
    except FileNotFoundError:  # of parity, when all of it is gone
        entries = []
        fs.mkdir(head)
        fs.fsync_dir(os.path.dirname(head))
    for entry in entries:
        if is_temp(entry, name):
            with contextlib.suppress(FileNotFoundError):
                fs.unlink(os.path.join(head, entry))
