"""Opens and reads what a checkpoint's directory says is a file, and nothing else: no pipe or device of its name.

No link either, but in the directories of other programs, where a link to a file is usual. And files of secrets, which
only their owner may read. The client uses this too.
"""

import contextlib
import errno
import fcntl
import os
import stat
from typing import BinaryIO, Final

from ckptd.shared.base.errors import ConfigError
from ckptd.shared.format.slot import PAGE

LINK = "a symbolic link where a file belongs"
NO_FILE = "no regular file"
# What a file system without hard links answers to link(2).
NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV})
_READ_NBYTES = 8 << 20
_LARGE_NBYTES = 16 << 20
_MOSTLY = 64  # a file system that compresses keeps more of a record than this part
_MAX_NBYTES: Final = 4096


def open_regular(path: str, flags: int = 0, *, follow: bool = False, dir_fd: int | None = None) -> int:
    """Descriptor for reading. Raises OSError, at once, for all that is no regular file.

    follow: a symbolic link stands for what it leads to; else it is refused.
    """
    # Without O_NONBLOCK the open of a pipe waits for its writer.
    flags |= os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
    flags |= 0 if follow else os.O_NOFOLLOW
    try:
        fd = os.open(path, flags, dir_fd=dir_fd)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, LINK, path) from None
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, NO_FILE, path)
    return fd


def open_followed(path: str) -> BinaryIO:
    """A regular file, or what a link to one leads to, as a file object. Raises OSError, at once."""
    return os.fdopen(open_regular(path, follow=True), "rb")


def _data_nbytes(fd: int) -> int:
    """Bytes of a file that are no hole, as far as its file system knows."""
    found = at = 0
    with contextlib.suppress(OSError):  # ENXIO: only a hole is left
        while True:
            start = os.lseek(fd, at, os.SEEK_DATA)
            at = os.lseek(fd, start, os.SEEK_HOLE)
            found += at - start
    os.lseek(fd, 0, os.SEEK_SET)
    return found


def contents(path: str, max_nbytes: int, *, follow: bool = False, dir_fd: int | None = None) -> bytes:
    """Content of a file. Raises OSError, before it is read, when there is more than max_nbytes of it, or next to none.

    A hole takes no disk, and as much memory as anything else: a large file that is nothing but holes is not read.
    """
    fd = open_regular(path, follow=follow, dir_fd=dir_fd)
    try:
        nbytes = os.fstat(fd).st_size
        if nbytes > max_nbytes:
            raise OSError(errno.EFBIG, f"{nbytes} bytes, at most {max_nbytes} expected", path)
        if nbytes > _LARGE_NBYTES and _data_nbytes(fd) < nbytes // _MOSTLY:
            raise OSError(errno.EFBIG, f"{nbytes} bytes, of which nearly all are a hole", path)
        parts = []
        while part := os.read(fd, min(_READ_NBYTES, nbytes + 1)):
            parts.append(part)
        return b"".join(parts)
    finally:
        os.close(fd)


def size(path: str, *, dir_fd: int | None = None) -> int:
    """Bytes of a regular file. Raises OSError for a link (ELOOP) and for whatever else has its name (EINVAL)."""
    found = os.stat(path, dir_fd=dir_fd, follow_symlinks=False)
    if stat.S_ISLNK(found.st_mode):
        raise OSError(errno.ELOOP, LINK, path)
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, NO_FILE, path)
    return found.st_size


def open_direct(path: str, *, follow: bool = False, dir_fd: int | None = None) -> int:
    """As open_regular; past the page cache where the file system takes the flag. To be read with read_pages."""
    try:
        return open_regular(path, os.O_DIRECT, follow=follow, dir_fd=dir_fd)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return open_regular(path, follow=follow, dir_fd=dir_fd)


def read_pages(fd: int, view: memoryview, offset: int, nbytes: int) -> int:
    """Fills view, nbytes rounded up to whole pages of memory, from offset on, whole pages too. Thread-safe.

    Returns how many of nbytes there were: fewer where the file ends. A file that cannot be read past the page cache
    after all is opened again, for all that use fd. Raises OSError.
    """
    done = 0
    while done < nbytes:
        got = _read_some(fd, view[done:], offset + done)
        if got == 0:
            break
        whole = done + got >= nbytes or got < PAGE
        done += got if whole else got - got % PAGE  # the next one past the page cache, too
    return min(done, nbytes)


def _read_some(fd: int, view: memoryview, offset: int) -> int:
    try:
        return os.preadv(fd, [view], offset)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    # Tried again even if the flag is off by now: another thread may have seen to it since our read failed.
    leave_direct(fd)
    return os.preadv(fd, [view], offset)


def leave_direct(fd: int) -> None:
    """Has the descriptor's file opened again without O_DIRECT, under the same number, for all threads that use it.

    To take the flag off (F_SETFL) does not suffice: the kernel notifies no FUSE server, which keeps the file as it
    was opened.
    """
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    if flags & os.O_DIRECT:
        again = os.open(f"/proc/self/fd/{fd}", (flags & os.O_ACCMODE) | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            os.dup2(again, fd, inheritable=False)
        finally:
            os.close(again)


def write_private(path: str, text: str) -> None:
    """Makes the file, 0600 whatever the umask. Raises ConfigError when it is there already or cannot be made."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise ConfigError(
            f"{path} is there already",
            hint="choose another name: what was made with this one needs it",
        ) from None
    except OSError as error:
        raise ConfigError(f"cannot make {path}: {error.strerror}") from None
    with os.fdopen(fd, "w", encoding="ascii") as file:
        os.fchmod(fd, 0o600)
        file.write(text)


def read_private(path: str, *, named: str, make: str) -> str:
    """The text, with a sign of replacement for what is no ASCII.

    named: what the user calls the file; make: the command that makes one, and when it is of use, for hints. Raises
    ConfigError when it cannot be read, is not this user's, or others may read it.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(fd, "rb") as file:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
                text = f"{named} must be a file of uid {os.geteuid()} that nobody else can read"
                raise ConfigError(text, hint=f"chmod 600 {path}; {make}")
            return file.read(_MAX_NBYTES).decode("ascii", "replace")
    except OSError as error:
        hint = f"is the path right, and is its file system mounted? {make}"
        raise ConfigError(f"cannot read {named}: {error.strerror}", hint=hint) from None
