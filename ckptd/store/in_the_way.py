"""A file that lies where a job needs a directory."""

import errno
import os


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
