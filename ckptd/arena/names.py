"""Names in a directory of the arena: what is missing already is no error."""

import contextlib
import os

from ckptd.shared.files import locks
from ckptd.shared.format import arena_paths


def listdir(path: str) -> list[str]:
    """Names in a directory; none when there is no such directory."""
    try:
        return os.listdir(path)
    except (FileNotFoundError, NotADirectoryError):
        return []


def opened(path: str) -> int | None:
    """Keeps the file's memory when its name goes; None when that cannot be."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None


def unlink_if_there(path: str) -> None:
    """Removes a name. Raises OSError when it is there and stays."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        os.unlink(path)


def rank_lives(steps: str) -> bool:
    """Whether the rank of this step board holds its rank file."""
    path = steps.removesuffix(arena_paths.STEPS_SUFFIX) + arena_paths.RANK_SUFFIX
    return os.path.exists(path) and locks.holder(path) is not None


def rmdir_if_empty(path: str) -> None:
    """Removes a directory if it can be."""
    with contextlib.suppress(OSError):
        os.rmdir(path)
