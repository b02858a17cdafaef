"""Every file effect of the store's code, one method each, so that a test can put a disk that forgets in its place.

Methods take absolute paths, block for as long as the file system does, and raise OSError with the path in it. Nothing
here knows what a checkpoint is.
"""

import contextlib
import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Callable

from ckptd.regular_files import LINK, NO_FILE, NO_LINKS, contents, open_regular

_WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_TEMP_MARK = ".tmp-"


def _nothing() -> None:
    return None


def temp_name(path: str) -> str:
    """A hidden name beside path that nobody else uses: a writer left over from a killed process never shares a file."""
    head, name = os.path.split(path)
    return os.path.join(head, f".{name}{_TEMP_MARK}{secrets.token_hex(6)}")


def is_temp(name: str, of: str = "") -> bool:
    """Whether name is one that temp_name gives (to a file called of, if said)."""
    return name.startswith(f".{of}{_TEMP_MARK}") if of else name.startswith(".") and _TEMP_MARK in name


class FileLayer:
    """The real disk. Primitives first; the methods below the line are made of them."""

    def mkdir(self, path: str) -> bool:
        """Whether path was made; False if something of that name was there."""
        try:
            os.mkdir(path)
        except FileExistsError:
            return False
        return True

    def create_exclusive(self, path: str) -> None:
        """An empty new file. Raises FileExistsError if there is one, also when two processes try at once."""
        os.close(os.open(path, _WRITE_FLAGS | os.O_EXCL, 0o666))

    def open_write(self, path: str, *, direct: bool) -> int:
        """Descriptor of a new or emptied file; past the page cache if direct and the file system lets us."""
        if direct:
            try:
                return os.open(path, _WRITE_FLAGS | os.O_DIRECT, 0o666)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
        # No O_EXCL: a refused O_DIRECT leaves the file it created behind.
        return os.open(path, _WRITE_FLAGS | os.O_TRUNC, 0o666)

    def pwrite(self, fd: int, data: bytes | memoryview, offset: int) -> None:
        """All of data at offset. Leaves O_DIRECT for good at the first write that it refuses."""
        with memoryview(data) as view:
            done = 0
            while done < len(view):
                with view[done:] as rest:
                    done += self._pwrite_some(fd, rest, offset + done)

    @staticmethod
    def _pwrite_some(fd: int, data: memoryview, offset: int) -> int:
        try:
            return os.pwrite(fd, data, offset)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # Tried again even if the flag is off by now: another thread may have taken it off since our write failed.
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
            return os.pwrite(fd, data, offset)

    def truncate(self, fd: int, nbytes: int) -> None:
        """The file's size set to nbytes."""
        os.ftruncate(fd, nbytes)

    def fsync(self, fd: int) -> None:
        """Returns when data and size are on the disk. The file's name may still be lost: see fsync_dir."""
        os.fsync(fd)

    def close(self, fd: int) -> None:
        """The descriptor given back."""
        os.close(fd)

    def fsync_dir(self, path: str) -> None:
        """Returns when the names in this directory are on the disk as they are now."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename(self, src: str, dst: str) -> None:
        """Dst becomes src, atomically; replaces a file or an empty directory."""
        os.rename(src, dst)

    def link(self, src: str, dst: str) -> None:
        """Dst becomes a second name of src. Raises FileExistsError rather than replace anything."""
        os.link(src, dst)

    def symlink(self, target: str, path: str) -> None:
        """A new symbolic link with the text target."""
        os.symlink(target, path)

    def readlink(self, path: str) -> str:
        """Text of a symbolic link."""
        return os.readlink(path)

    def listdir(self, path: str) -> list[str]:
        """Names in a directory, sorted."""
        return sorted(os.listdir(path))

    def open_read(self, path: str) -> int:
        """Descriptor of a regular file. Raises OSError, at once, for a link, a pipe or whatever else has its name."""
        return open_regular(path)

    def read_file(self, path: str, max_nbytes: int) -> bytes:
        """Content of a regular file. Raises OSError EFBIG when there is more than max_nbytes, before reading it."""
        return contents(path, max_nbytes)

    def size(self, path: str) -> int:
        """Bytes of a regular file. Raises OSError for a link and for whatever else has its name."""
        found = os.lstat(path)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, LINK if stat.S_ISLNK(found.st_mode) else NO_FILE, path)
        return found.st_size

    def space(self, path: str) -> tuple[int, int]:
        """(bytes this user may still write, bytes in all) of the file system at path."""
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize

    def unlink(self, path: str) -> None:
        """The name of a file removed. Raises IsADirectoryError for a directory."""
        os.unlink(path)

    def rmdir(self, path: str) -> None:
        """An empty directory removed."""
        os.rmdir(path)

    # -- made of the above --

    def write_temp(self, path: str, data: bytes, *, before_sync: Callable[[], None] = _nothing) -> str:
        """Hidden file beside path with data, synced. before_sync: called when it is written and not yet synced."""
        temp = temp_name(path)
        fd = self.open_write(temp, direct=False)
        try:
            self.pwrite(fd, data, 0)
            before_sync()
            self.fsync(fd)
        finally:
            self.close(fd)
        return temp

    def publish(self, temp: str, path: str) -> bool:
        """Whether path now names temp's file; False if path was there already. temp's name is gone either way."""
        try:
            self.link(temp, path)
        except FileExistsError:
            self.unlink(temp)
            return False
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            # Without hard links the last of two racing writers wins; their bytes differ only if their versions do.
            self.rename(temp, path)
            return True
        self.unlink(temp)
        return True

    def replace_symlink(self, target: str, path: str) -> None:
        """Path becomes a link to target, atomically, whatever link it was."""
        temp = temp_name(path)
        self.symlink(target, temp)
        try:
            self.rename(temp, path)
        except OSError:
            self.unlink(temp)
            raise

    def rmtree(self, path: str) -> None:
        """Path and all below it removed; what another process removes meanwhile is no error.

        Of a link the link alone, never what it leads to. What cannot be removed stays, with the directories above it,
        and nothing else does: NFS keeps a file that somebody reads, as .nfsXXXX. The first such OSError is raised last.
        """
        try:
            self.unlink(path)
        except FileNotFoundError:
            return
        except IsADirectoryError:
            self._remove_directory(path)

    def _remove_directory(self, path: str) -> None:
        stays: OSError | None = None
        with contextlib.suppress(FileNotFoundError):
            for name in self.listdir(path):
                try:
                    self.rmtree(os.path.join(path, name))
                except OSError as error:
                    stays = stays or error
            if stays is None:
                self.rmdir(path)
        if stays is not None:
            raise stays
