"""A few pages of the arena's tmpfs kept for small files: an arena takes all memory there is, and they count."""

import contextlib
import errno
import os
from collections.abc import Callable

from ckptd.protocol.places import BALLAST

_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # the last: a pipe would hold us
_NBYTES = 1 << 20  # more than the topology of a thousand nodes


def take(arena: str) -> None:
    """Sets the pages aside, if there is room. For an arena whose lock is held."""
    with contextlib.suppress(OSError):
        fd = os.open(os.path.join(arena, BALLAST), _FLAGS, 0o600)
        try:
            os.posix_fallocate(fd, 0, _NBYTES)
        finally:
            os.close(fd)


def write(arena: str, put: Callable[[], None]) -> None:
    """Calls put, which writes a small file in the arena; once more, in the pages set aside, when memory is full.

    Raises OSError.
    """
    try:
        put()
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(arena, BALLAST))
        put()
        take(arena)  # what is left of it; else the next daemon's start tries again
