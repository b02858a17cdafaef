"""Opens what a checkpoint's directory says is a file, and nothing else: no pipe or device that bears its name.

No link either, but in the directories of other programs, where a link to a file is usual. The client uses this too.
"""

import errno
import os
import stat
from typing import BinaryIO

LINK = "a symbolic link where a file belongs"
NO_FILE = "no regular file"
# What a file system without hard links answers to link(2).
NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV})
_READ_NBYTES = 8 << 20


def open_regular(path: str, flags: int = 0, *, follow: bool = False) -> int:
    """Descriptor for reading. Raises OSError, at once, for all that is no regular file.

    follow: a symbolic link stands for what it leads to; else it is refused.
    """
    # Without O_NONBLOCK the open of a pipe waits for its writer.
    flags |= os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
    flags |= 0 if follow else os.O_NOFOLLOW
    try:
        fd = os.open(path, flags)
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


def contents(path: str, max_nbytes: int, *, follow: bool = False) -> bytes:
    """Content of a file. Raises OSError, before it is read, when there is more than max_nbytes of it."""
    fd = open_regular(path, follow=follow)
    try:
        nbytes = os.fstat(fd).st_size
        if nbytes > max_nbytes:
            raise OSError(errno.EFBIG, f"{nbytes} bytes, at most {max_nbytes} expected", path)
        parts = []
        while part := os.read(fd, min(_READ_NBYTES, nbytes + 1)):
            parts.append(part)
        return b"".join(parts)
    finally:
        os.close(fd)
