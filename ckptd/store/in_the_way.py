"""What stands in a store's way: a file where a directory belongs, a parent that is missing, owner and mode."""

import errno
import os
import stat

from ckptd.shared.files.refused import REFUSALS


def occupied(error: OSError, root: str) -> tuple[str, str] | None:
    """What to say of it, and what to type; None for any other error, and where the store itself is the file."""
    path = os.fspath(error.filename) if isinstance(error.filename, str | os.PathLike) else ""
    below = os.path.relpath(path, root) if path else ".."
    if error.errno != errno.ENOTDIR or not os.path.isdir(root) or below.startswith(os.pardir):
        return None
    at = root
    for part in below.split(os.sep):
        at = os.path.join(at, part)
        if not os.path.isdir(at):
            text = f"{at} is no directory, and the job needs one of that name"
            return text, f"mv {at} {at}~, or connect with another job name"
    return None


def absent(error: OSError, root: str) -> tuple[str, str] | None:
    """Of a store whose parent is missing: the topmost part that is, which may be misspelt; None for other errors."""
    at = os.path.dirname(root)
    if error.errno != errno.ENOENT or os.path.lexists(at):
        return None
    while not os.path.lexists(os.path.dirname(at)):
        at = os.path.dirname(at)
    hint = f"is its file system mounted, and is it spelt right? else: mkdir -p {os.path.dirname(root)}"
    return f"there is no {at}: ckptd makes the store's own directory, never the one above it", hint


def refused(error: OSError, root: str) -> tuple[str, str] | None:
    """Of a store that this process may not write or read: whose it is, and what mends it; None for other errors."""
    if error.errno not in REFUSALS:
        return None
    try:
        found = os.stat(root)
    except OSError:
        return None
    uid, mode = os.geteuid(), stat.S_IMODE(found.st_mode)
    if os.access(root, os.R_OK | os.W_OK | os.X_OK, effective_ids=True):
        return None  # something below it is in the way
    text = f"{error.strerror}: {root} has owner uid {found.st_uid} and mode {mode:04o}, the daemon is uid {uid}"
    if found.st_uid == uid:
        return text, f"chmod u+rwx {root}"
    return text, f"as its owner (uid {found.st_uid}) or root: chown {uid} {root}; or set store to a directory of yours"


def in_the_way(error: OSError, root: str) -> tuple[str, str] | None:
    """What to say of an error of the store, and what to type; None where no more is known than the error has."""
    return occupied(error, root) or absent(error, root) or refused(error, root)
