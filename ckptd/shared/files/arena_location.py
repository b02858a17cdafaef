"""Where an arena may lie: in memory, in a directory that is there already, owner-only."""

import contextlib
import errno
import os
import stat

from ckptd.shared.base.errors import ConfigError
from ckptd.shared.files.mounts import Mount, mount_of, parse_mountinfo

_IN_MEMORY = frozenset({"tmpfs", "hugetlbfs"})


def make_directory(path: str) -> None:
    """Makes the arena's directory unless it is there; its parent is never made.

    Raises ConfigError when it is not on a file system in memory, cannot be made, or is not this user's alone; OSError
    when memory is full.
    """
    hint = _another()
    parent = os.path.dirname(path)
    if not os.path.isdir(parent):
        raise ConfigError(f"cannot make arena {path!r}: there is no directory {parent}", hint=f"mkdir it, or {hint}")
    _check_kind(path)
    with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as file:
        mounts = parse_mountinfo(file.read())
    problem = misplaced(os.path.realpath(path if os.path.exists(path) else parent), mounts)
    if problem:
        raise ConfigError(f"arena {path!r} {problem}", hint=hint)
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise ConfigError(f"cannot make arena {path!r}: {error.strerror}", hint=hint) from None
    _check_owner(path)


def misplaced(path: str, mounts: list[Mount]) -> str:
    """What is wrong with the file system that holds the path, empty when nothing is, or nothing is known."""
    mount = mount_of(path, mounts)
    if mount is None or mount.fs_type in _IN_MEMORY:
        return ""
    return f"lies on {mount.fs_type} (mounted at {mount.point}), which is no memory: each save would go to a disk"


def _check_kind(path: str) -> None:
    """Raises ConfigError for what is there and is no directory."""
    if os.path.islink(path) or (os.path.lexists(path) and not os.path.isdir(path)):
        _check_owner(path)


def _check_owner(path: str) -> None:
    found = os.lstat(path)
    mode, own = stat.S_IMODE(found.st_mode), found.st_uid == os.geteuid()
    if stat.S_ISDIR(found.st_mode) and own and not mode & 0o077 and mode & 0o700 == 0o700:  # noqa: PLR2004
        return
    it, hint = f"a file of uid {found.st_uid}", _another()
    if stat.S_ISLNK(found.st_mode):
        it = f"a symbolic link of uid {found.st_uid}"
        hint = f"give the directory that it leads to: {os.path.realpath(path)}" if own else hint
    elif stat.S_ISDIR(found.st_mode):
        it = f"of uid {found.st_uid} with mode {mode:04o}"
        hint = f"chmod 700 {path}, if nobody else is to use it, or {hint}" if own else hint
    text = f"arena {path!r} must be a directory of uid {os.geteuid()} with mode 0700"
    raise ConfigError(f"{text}; it is {it}", hint=hint)


def _another() -> str:
    return f"set another, on tmpfs, such as --arena /dev/shm/ckptd-{os.geteuid()} (CKPTD_ARENA, or connect(arena=...))"
