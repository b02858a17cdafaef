"""What stands in a store's way: a file where a directory belongs, a parent that is missing, owner and mode."""

import errno
import os
import stat

from ckptd.shared.files.refused import REFUSALS
from ckptd.shared.files.spare_pages import limit_met

_KEEP_FEWER = "to keep fewer from now on: CKPTD_KEEP_LAST=1, or keep_last = 1 in the daemon's configuration"
_HINTS = {
    errno.ENOSPC: f"free space on the store, such as ckptd prune STORE/JOB --keep-last 1; {_KEEP_FEWER}",
    errno.EDQUOT: f"{limit_met(errno.EDQUOT)}; {_KEEP_FEWER}",
    errno.EFBIG: limit_met(errno.EFBIG),
    errno.ENOENT: "is it mounted? ckptd makes the store's own directory, never the one above it",
    errno.ENOTDIR: "the store must be a directory: set store to another path",
    errno.ELOOP: "its links lead in a circle: set store to the directory itself",
    errno.ENAMETOOLONG: "a part of its path is too long for the file system: set store to a shorter one",
    errno.EACCES: "the daemon's user must read and write there: check owner and mode of the store",
    errno.EPERM: "the daemon's user must read and write there: check owner and mode of the store",
    errno.EROFS: "the store is mounted read-only: remount it, or set store to another path",
    errno.ESTALE: "the mount went away under the daemon: remount the store",
    errno.EBUSY: "somebody still reads it, over NFS perhaps: what is left is removed when the job starts again",
    errno.EIO: "the file system reports a device error: see its logs; the drain is tried again",
}


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


def explain(error: OSError, root: str) -> tuple[str, str]:
    """What to say of an error of the store, and what to type."""
    found = occupied(error, root) or absent(error, root) or refused(error, root)
    return found or (str(error), _HINTS.get(error.errno or 0, ""))
