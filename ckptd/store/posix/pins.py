"""Checkpoints that the user has pinned: retention passes them over. A pin is an empty file beside the checkpoints."""

import os

from ckptd.shared.base.errors import UsageError
from ckptd.shared.base.ids import JobKey, parse_dirname
from ckptd.shared.format.manifest import COMMITTED
from ckptd.store.posix.scan import job_dir
from ckptd.system.files import FileLayer

PINS_DIR = ".pins"


def pin(fs: FileLayer, key: JobKey, dirname: str) -> bool:
    """Pins a committed checkpoint, on the disk when it returns; False: it was already. Raises UsageError, OSError."""
    _check_committed(fs, key, dirname)
    fs.mkdir(_pins_dir(key))
    new = True
    try:
        fs.create_exclusive(os.path.join(_pins_dir(key), dirname))
    except FileExistsError:
        new = False
    fs.fsync_dir(_pins_dir(key))  # also of a pin whose maker may have died before this
    fs.fsync_dir(job_dir(key))
    try:
        _check_committed(fs, key, dirname)  # a removal may have passed its own look at the pins before
    except UsageError:
        unpin(fs, key, dirname)
        raise
    return new


def _check_committed(fs: FileLayer, key: JobKey, dirname: str) -> None:
    final = os.path.join(job_dir(key), dirname)
    try:
        fs.size(os.path.join(final, COMMITTED))
    except FileNotFoundError:
        raise UsageError(f"{final} is no committed checkpoint", hint=f"ckptd list {job_dir(key)}") from None


def unpin(fs: FileLayer, key: JobKey, dirname: str) -> bool:
    """Retention may have it again; False when it was not pinned. Raises OSError."""
    try:
        fs.unlink(os.path.join(_pins_dir(key), dirname))
    except FileNotFoundError:
        return False
    fs.fsync_dir(_pins_dir(key))
    return True


def pinned(fs: FileLayer, key: JobKey) -> frozenset[str]:
    """Directories of all that are pinned. Raises OSError when that cannot be told."""
    try:
        return frozenset(name for name in fs.listdir(_pins_dir(key)) if parse_dirname(name) is not None)
    except FileNotFoundError:
        return frozenset()


def _pins_dir(key: JobKey) -> str:
    return os.path.join(job_dir(key), PINS_DIR)
