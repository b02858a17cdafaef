"""Where checkpoints are, for a user who gave a path that is none."""

import os

from ckptd.shared.base.ids import parse_dirname
from ckptd.shared.format.manifest import LATEST

_LEVELS = 3  # a checkpoint, its job, its store


def where_checkpoints_are(path: str) -> str:
    """What to type: the nearest directory at or above the path that has checkpoints; else what a path is like."""
    above = path
    for _ in range(_LEVELS):
        names = _names(above)
        if LATEST in names or any(map(parse_dirname, names)):
            newest = f"; the newest: {os.path.join(above, LATEST)}" if LATEST in names else ""
            return f"ckptd list {above} shows what is there{newest}"
        if any(os.path.lexists(os.path.join(above, name, LATEST)) for name in names):
            return f"ckptd list {above} shows what is there"
        above = os.path.dirname(above)
    return "give the directory of a checkpoint, such as STORE/JOB/latest"


def _names(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []
