"""A few pages of the arena's tmpfs kept for small files: slots, and others, take all memory there is.

Without them a job could not come back to a full memory: each rank writes a file of its own first.
"""

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from typing import Final

from ckptd.shared.base.errors import BudgetError
from ckptd.shared.files.mounts import SHARED_MEMORY
from ckptd.shared.format.arena_paths import BALLAST

_FLAGS = os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # the last: a pipe would hold us
NBYTES: Final = 1 << 20  # more than the topology of a thousand nodes, or the files of 250 ranks
_STEP_NBYTES: Final = 16 << 10  # given up at a time
_FULL = (errno.ENOSPC, errno.EDQUOT)


def take(arena: str) -> None:
    """Sets pages aside, as many as there is room for. For an arena whose lock is held. Idempotent; never raises."""
    with contextlib.suppress(OSError):
        _grow(os.open(_path(arena), _FLAGS | os.O_CREAT, 0o600))


def write(arena: str, put: Callable[[], None]) -> None:
    """Calls put, which writes a small file in the arena; again, in pages set aside, while memory is full.

    Any process of the arena's owner may. Raises OSError when it is full all the same, and what put raises otherwise.
    """
    gave = False
    while True:
        try:
            put()
            break
        except OSError as error:
            if error.errno not in _FULL or not _give(arena):
                raise
            gave = True
    if gave:
        with contextlib.suppress(OSError):
            _grow(os.open(_path(arena), _FLAGS))


@contextlib.contextmanager
def told_when_full(directory: str, what: str) -> Iterator[None]:
    """In place of ENOSPC a BudgetError that says what could not be made, where, how full that is and what to type."""
    try:
        yield
    except OSError as error:
        if error.errno not in (*_FULL, errno.EFBIG):
            raise
        full = why_full(directory) or f"{error.strerror}: this user or process may have no more"
        hint = limit_met(error.errno) or how_to_free(directory)
        raise BudgetError(f"there is no room for {what} in {directory}: {full}", hint=hint) from None


def limit_met(code: int | None) -> str:
    """What to type where an error of the system is of a limit that no free space helps against; else empty."""
    if code == errno.EFBIG:
        return (
            "a limit on the size of files: ulimit -f unlimited (in a unit: LimitFSIZE=infinity), "
            "then ckptd stop, and start again"
        )
    if code == errno.EDQUOT:
        return "a quota is used up, whatever is free: quota -s shows it; rm what nobody needs, or ask for a larger one"
    return ""


def why_full(directory: str) -> str:
    """Says that its file system is full, with the numbers; empty while there is room for a page and a file."""
    directory = _existing(directory)
    found, mount = os.statvfs(directory), _mount_point(directory)
    if found.f_files and not found.f_favail:
        return f"{mount} is full: no file left of {found.f_files}"
    if found.f_blocks and found.f_bavail * found.f_frsize < _STEP_NBYTES:
        free, size = (blocks * found.f_frsize for blocks in (found.f_bavail, found.f_blocks))
        return f"{mount} is full: {free} bytes free of {size / (1 << 20):.0f} MiB"
    return ""


def how_to_free(directory: str) -> str:
    """What to type."""
    mount = _mount_point(_existing(directory))
    found = os.statvfs(mount)
    option = "nr_inodes=2m" if found.f_files and not found.f_favail else "size=75%"
    docker = " (Docker: docker run --shm-size=64g)" if mount == SHARED_MEMORY else ""
    free = f"du -sh {mount}/* shows who has it: rm what nobody needs"
    return f"{free}, or, as root, mount -o remount,{option} {mount}{docker}"


def _path(arena: str) -> str:
    return os.path.join(arena, BALLAST)


def _grow(fd: int) -> None:
    """Until it has all its pages, or there are no more. Closes the descriptor. Raises OSError."""
    try:
        have = os.fstat(fd).st_size
        with contextlib.suppress(OSError):
            os.posix_fallocate(fd, 0, NBYTES)  # all or nothing
            return
        while have < NBYTES:
            os.posix_fallocate(fd, have, _STEP_NBYTES)
            have += _STEP_NBYTES
    finally:
        os.close(fd)


def _give(arena: str) -> bool:
    """Frees a few pages. False when none are left."""
    try:
        fd = os.open(_path(arena), _FLAGS)
    except OSError:
        return False
    try:
        have = os.fstat(fd).st_size
        os.ftruncate(fd, max(0, have - _STEP_NBYTES))
        return have > 0
    finally:
        os.close(fd)


def _existing(path: str) -> str:
    path = os.path.realpath(path)
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    return path


def _mount_point(path: str) -> str:
    while not os.path.ismount(path):
        path = os.path.dirname(path)
    return path
