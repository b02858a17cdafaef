"""Every file effect of the store's code, one method each, so that a test can put a disk that forgets in its place.

Methods take absolute paths, block for as long as the file system does, and raise OSError with the path in it. Below its
top a layer follows no symbolic link, and outside of it nothing can be touched: see beneath. Nothing here knows what a
checkpoint is.
"""

import contextlib
import copy
import errno
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from typing import Self

from ckptd.shared.files.regular import LINK, NO_FILE, NO_LINKS, contents, leave_direct, open_direct, open_regular, size
from ckptd.shared.format.integrity import XXH3, Integrity
from ckptd.system import beneath

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
    """The real disk. Primitives first; the methods below the line are made of them.

    top: the directory that this user has named, a store say; all that is not below it is out of reach. None: the caller
    has named each path whole, which is for readers, and for paths that no store has a word in.
    integrity: how what is read and written through it is proved, for all that makes and checks digests.
    """

    integrity: Integrity = XXH3
    _top: str | None = None
    _strict = False
    _held: int | None = None  # a descriptor of the top

    def __init__(self, top: str | None = None, integrity: Integrity = XXH3) -> None:
        self._top = top
        self.integrity = integrity

    def below(self, top: str | None) -> Self:
        """The same disk, with another top, to which no link leads but of this user or root."""
        made = copy.copy(self)
        made._top, made._strict = top, True  # noqa: SLF001 - it is one of these
        return made

    @contextlib.contextmanager
    def held(self) -> Iterator[Self]:
        """The same disk below the directory that the top is now, whatever becomes of its name."""
        with self._directory(self._top or "/") as fd:
            made = copy.copy(self)
            made._held = fd  # noqa: SLF001 - it is one of these
            yield made

    @contextlib.contextmanager
    def _at(self, path: str) -> Iterator[tuple[int, str]]:
        """The directory that has the path's last name, and that name."""
        head, name = os.path.split(path)
        try:
            with beneath.directory(self._top, head, strict=self._strict, held=self._held) as fd:
                yield fd, name or "."
        except OSError as error:
            if error.filename == head or not str(error.filename).startswith("/"):
                error.filename = path  # and not a part of it alone
            raise

    @contextlib.contextmanager
    def _directory(self, path: str) -> Iterator[int]:
        """The directory itself, to be read or synced."""
        with beneath.directory(self._top, path, strict=self._strict, held=self._held) as fd:
            inside = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=fd)
        try:
            yield inside
        finally:
            os.close(inside)

    def mkdir(self, path: str) -> bool:
        """Whether path was made; False if something of that name was there."""
        try:
            with self._at(path) as (fd, name):
                os.mkdir(name, dir_fd=fd)
        except FileExistsError:
            return False
        return True

    def create_exclusive(self, path: str) -> None:
        """An empty new file. Raises FileExistsError if there is one, also when two processes try at once."""
        with self._at(path) as (fd, name):
            os.close(os.open(name, _WRITE_FLAGS | os.O_EXCL, 0o666, dir_fd=fd))

    def open_write(self, path: str, *, direct: bool) -> int:
        """Descriptor of a new or emptied file; past the page cache if direct and the file system lets us."""
        with self._at(path) as (at, name):
            if direct:
                try:
                    return os.open(name, _WRITE_FLAGS | os.O_DIRECT, 0o666, dir_fd=at)
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
            # No O_EXCL: a refused O_DIRECT leaves the file it created behind.
            return os.open(name, _WRITE_FLAGS | os.O_TRUNC, 0o666, dir_fd=at)

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
            # Tried again even if the flag is off by now: another thread may have seen to it since our write failed.
            leave_direct(fd)
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
        with self._directory(path) as fd:
            os.fsync(fd)

    def rename(self, src: str, dst: str) -> None:
        """Dst becomes src, atomically; replaces a file or an empty directory."""
        with self._at(src) as (fd, name), self._at(dst) as (to, new):
            os.rename(name, new, src_dir_fd=fd, dst_dir_fd=to)

    def link(self, src: str, dst: str) -> None:
        """Dst becomes a second name of src. Raises FileExistsError rather than replace anything."""
        with self._at(src) as (fd, name), self._at(dst) as (to, new):
            os.link(name, new, src_dir_fd=fd, dst_dir_fd=to, follow_symlinks=False)

    def link_from(self, other: "FileLayer", src: str, dst: str) -> None:
        """Dst becomes a second name of a regular file of another layer. Raises OSError, EINVAL for what is none."""
        with other._at(src) as (fd, name), self._at(dst) as (to, new):  # noqa: SLF001 - it is one of these
            os.link(name, new, src_dir_fd=fd, dst_dir_fd=to, follow_symlinks=False)
            mode = os.stat(new, dir_fd=to, follow_symlinks=False).st_mode
            if not stat.S_ISREG(mode):  # looked at here, where nobody can swap it any more
                os.unlink(new, dir_fd=to)
                raise OSError(errno.EINVAL, LINK if stat.S_ISLNK(mode) else NO_FILE, src)

    def symlink(self, target: str, path: str) -> None:
        """A new symbolic link with the text target."""
        with self._at(path) as (fd, name):
            os.symlink(target, name, dir_fd=fd)

    def readlink(self, path: str) -> str:
        """Text of a symbolic link."""
        with self._at(path) as (fd, name):
            return os.readlink(name, dir_fd=fd)

    def listdir(self, path: str) -> list[str]:
        """Names in a directory, sorted."""
        with self._directory(path) as fd:
            return sorted(os.listdir(fd))

    def open_read(self, path: str, *, direct: bool = False) -> int:
        """Descriptor of a regular file. Raises OSError, at once, for a link, a pipe or whatever else has its name.

        direct: past the page cache, where the file system takes it.
        """
        with self._at(path) as (fd, name):
            return open_direct(name, dir_fd=fd) if direct else open_regular(name, dir_fd=fd)

    def read_file(self, path: str, max_nbytes: int) -> bytes:
        """Content of a regular file. Raises OSError EFBIG when there is more than max_nbytes, before reading it."""
        with self._at(path) as (fd, name):
            return contents(name, max_nbytes, dir_fd=fd)

    def size(self, path: str) -> int:
        """Bytes of a regular file. Raises OSError for a link (ELOOP) and for whatever else has its name."""
        with self._at(path) as (fd, name):
            try:
                return size(name, dir_fd=fd)
            except OSError as error:
                error.filename = path
                raise

    def mtime(self, path: str) -> float:
        """When it was changed last, on the clock of the file system. Of a link its own."""
        with self._at(path) as (fd, name):
            return os.stat(name, dir_fd=fd, follow_symlinks=False).st_mtime

    def set_mtime(self, path: str, seconds: float) -> None:
        """The file looks as if it had been changed then, seconds since 1970."""
        with self._at(path) as (fd, name):
            os.utime(name, (seconds, seconds), dir_fd=fd, follow_symlinks=False)

    def space(self, path: str) -> tuple[int, int]:
        """(bytes this user may still write, bytes in all) of the file system at path."""
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize

    def unlink(self, path: str) -> None:
        """The name of a file removed. Raises IsADirectoryError for a directory."""
        with self._at(path) as (fd, name):
            os.unlink(name, dir_fd=fd)

    def rmdir(self, path: str) -> None:
        """An empty directory removed."""
        with self._at(path) as (fd, name):
            os.rmdir(name, dir_fd=fd)

    # -- made of the above --

    def write_temp(self, path: str, data: bytes, *, before_sync: Callable[[], None] = _nothing) -> str:
        """Hidden file beside path with data, synced; none is left where that fails.

        before_sync: called when it is written and not yet synced.
        """
        temp = temp_name(path)
        fd = self.open_write(temp, direct=False)
        try:
            self.pwrite(fd, data, 0)
            before_sync()
            self.fsync(fd)
        except OSError:
            with contextlib.suppress(OSError):
                self.unlink(temp)
            raise
        finally:
            self.close(fd)
        return temp

    def publish(self, temp: str, path: str) -> bool:
        """Whether path now names temp's file; False if path was there already. temp's name is gone either way.

        Without hard links the last of two racing writers wins, and both get True: see publish_once.
        """
        linked = self.try_link(temp, path)
        if linked is None:
            self.rename(temp, path)
        return linked is not False

    def publish_once(self, temp: str, path: str) -> bool:
        """As publish, but also without hard links only one of several racing callers gets True.

        Then the name is first made as an empty file, which stays if its maker is killed before it has its content.
        """
        linked = self.try_link(temp, path)
        if linked is not None:
            return linked
        try:
            self.create_exclusive(path)
        except FileExistsError:
            self.unlink(temp)
            return False
        self.rename(temp, path)
        return True

    def try_link(self, temp: str, path: str) -> bool | None:
        """As publish; None, and temp is still there, where the file system has no hard links."""
        try:
            self.link(temp, path)
        except FileExistsError:
            self.unlink(temp)
            return False
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            return None
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
