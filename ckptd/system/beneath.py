"""The way to a directory, step by step, with nobody's links but those of the user who named the way.

A path has two halves. Down to its top (a store, a trainer's directory) this user has named it: a symbolic link there
counts when it was made by this user or by root; on the way to a store also when the owner of the directory that it lies
in made it. Below the top, bytes of a store name it: there no link is followed, ever, also when somebody swaps a
directory for one meanwhile.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator

LINK_ON_WAY = "a symbolic link where a directory belongs"
STRANGERS_LINK = "a symbolic link that somebody else made"
OUTSIDE = "lies outside of what may be touched"
_STEP = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_LINKS = 40


@contextlib.contextmanager
def directory(top: str | None, path: str, *, strict: bool, held: int | None = None) -> Iterator[int]:
    """An O_PATH descriptor of a directory. top None: all of the path was named by this user. Raises OSError.

    strict: on the way to the top links of this user and of root count, and no one else's.
    held: a descriptor of the top, which counts whatever has the top's name by now; then nothing above it is reached.
    """
    named, steps = _halves(top, path)
    if held is not None and named != top:
        raise OSError(errno.EPERM, f"{OUTSIDE}: {top}", path)
    fd = _open_named(named, strict=strict) if held is None else os.open(".", _STEP, dir_fd=held)
    try:
        for name in steps:
            fd = _step(fd, name, path)
        yield fd
    finally:
        os.close(fd)


def _halves(top: str | None, path: str) -> tuple[str, list[str]]:
    """What this user has named of the path, and the steps below that."""
    steps = [step for step in path.split("/") if step and step != "."]
    if not path.startswith("/") or ".." in steps:
        raise OSError(errno.EPERM, "no plain absolute path", path)
    if top is None:
        return path, []
    head = [step for step in top.split("/") if step]
    if steps[: len(head)] == head:
        return top, steps[len(head) :]
    if head[: len(steps)] == steps:  # the store's own directory is made in the one above
        return path, []
    raise OSError(errno.EPERM, f"{OUTSIDE}: {top}", path)


def _step(above: int, name: str, path: str) -> int:
    """The directory of that name; above is closed when it is open."""
    try:
        fd = os.open(name, _STEP, dir_fd=above)
    except NotADirectoryError:
        raise NotADirectoryError(errno.ENOTDIR, _why_not(above, name), path) from None
    except OSError as error:
        error.filename = path
        raise
    os.close(above)
    return fd


def _why_not(above: int, name: str) -> str:
    with contextlib.suppress(OSError):
        if stat.S_ISLNK(os.stat(name, dir_fd=above, follow_symlinks=False).st_mode):
            return LINK_ON_WAY
    return os.strerror(errno.ENOTDIR)


def _open_named(path: str, *, strict: bool) -> int:
    """The directory at a path that this user has named."""
    fd = os.open("/", _STEP)
    left = [step for step in reversed(path.split("/")) if step]
    links = 0
    try:
        while left:
            name = left.pop()
            try:
                fd = _step(fd, name, path)
                continue
            except NotADirectoryError as error:
                if error.strerror != LINK_ON_WAY:
                    raise
            links += 1
            _check_count(links, path)
            target = _target(fd, name, path, strict=strict)
            if target.startswith("/"):
                os.close(fd)
                fd = os.open("/", _STEP)
            left += [step for step in reversed(target.split("/")) if step]
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check_count(links: int, path: str) -> None:
    if links > _MAX_LINKS:
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)


def _target(above: int, name: str, path: str, *, strict: bool) -> str:
    """Where a link of somebody who may redirect this user leads. Raises PermissionError."""
    link = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
    try:
        owner = os.fstat(link).st_uid
        if owner not in {0, os.geteuid()} and (strict or owner != os.fstat(above).st_uid):
            raise PermissionError(errno.EACCES, f"{STRANGERS_LINK} ({name!r}, of uid {owner})", path)
        return os.readlink("", dir_fd=link)
    finally:
        os.close(link)
