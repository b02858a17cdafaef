"""Where an arena may lie: in memory, in a directory that is there already, owner-only."""

import contextlib
import os
import stat

from ckptd.mounts import Mount, mount_of, parse_mountinfo
from ckptd.protocol.errors import ConfigError

_IN_MEMORY = frozenset({"tmpfs", "hugetlbfs"})


def make_directory(path: str) -> None:
    """Makes the arena's directory unless it is there; its parent is never made.

    Raises ConfigError when it lies on no file system of memory, cannot be made, or is not this user's alone.
    """
    hint = f"such as --arena /dev/shm/ckptd-{os.geteuid()}"
    parent = os.path.dirname(path)
    if not os.path.isdir(parent):
        raise ConfigError(f"cannot make arena {path!r}: there is no directory {parent}", hint=f"mkdir it, or {hint}")
    with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as file:
        mounts = parse_mountinfo(file.read())
    problem = misplaced(os.path.realpath(path if os.path.exists(path) else parent), mounts)
    if problem:
        raise ConfigError(f"arena {path!r} {problem}", hint=f"choose a directory on tmpfs, {hint}")
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
    except OSError as error:
        raise ConfigError(f"cannot make arena {path!r}: {error.strerror}", hint="set --arena") from error
    _check_owner(path)


def misplaced(path: str, mounts: list[Mount]) -> str:
    """What is wrong with the file system that holds the path, empty when nothing is, or nothing is known."""
    mount = mount_of(path, mounts)
    if mount is None or mount.fs_type in _IN_MEMORY:
        return ""
    return f"lies on {mount.fs_type} (mounted at {mount.point}), which is no memory: each save would go to a disk"


def _check_owner(path: str) -> None:
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise ConfigError(
            f"arena {path!r} must be a directory of uid {os.geteuid()} with mode 0700; "
            f"it is of uid {found.st_uid} with mode {stat.S_IMODE(found.st_mode):04o}",
            hint="remove it, or set another with --arena",
        )
