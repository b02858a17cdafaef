"""Why this process may not read a path: which part of it is in the way, whose that is, and what mends it."""

import errno
import os
import stat
from typing import NamedTuple

REFUSALS = frozenset({errno.EACCES, errno.EPERM})


class Refused(NamedTuple):
    """The obstacle, and what to type."""

    text: str
    hint: str


def why_refused(path: str) -> Refused:
    """Of a file or directory that could not be opened for reading. Raises nothing."""
    at = _in_the_way(os.path.abspath(path))
    uid = os.geteuid()
    try:
        found = os.stat(at)
    except OSError as error:
        return Refused(f"{at}: {error.strerror}; this process is uid {uid}", f"ls -ld {at}")
    text = f"{at} has owner uid {found.st_uid} and mode {stat.S_IMODE(found.st_mode):04o}, this process is uid {uid}"
    right = "rx" if stat.S_ISDIR(found.st_mode) else "r"
    if found.st_uid == uid:
        return Refused(text, f"chmod u+{right} {at}")
    return Refused(text, f"as its owner (uid {found.st_uid}) or root: chmod o+{right} {at}, or chown {uid} {at}")


def _in_the_way(path: str) -> str:
    """The first directory on the way that may not be passed; the path itself where there is none."""
    above = os.path.dirname(path)
    if above == path:
        return path
    first = _in_the_way(above)
    if first != above:
        return first
    return path if os.access(above, os.X_OK, effective_ids=True) else above
