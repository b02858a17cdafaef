"""Checkpoints that the user has pinned: retention passes them over. A pin is an empty record of the job."""

from ckptd.shared.base.errors import UsageError
from ckptd.shared.format.manifest import COMMITTED
from ckptd.store.records import JobRecords
from ckptd.store.scan import PINS_DIR


def pin(job: JobRecords, name: str) -> bool:
    """Pins a committed checkpoint, on the medium when it returns; False: it was already. Raises UsageError, OSError."""
    _check_committed(job, name)
    new = job.put(f"{PINS_DIR}/{name}", b"", new=True)
    try:
        _check_committed(job, name)  # a removal may have passed its own look at the pins before
    except UsageError:
        unpin(job, name)
        raise
    return new


def _check_committed(job: JobRecords, name: str) -> None:
    try:
        job.files.size(f"{name}/{COMMITTED}")
    except FileNotFoundError:
        text = f"{job.files.where(name)} is no committed checkpoint"
        raise UsageError(text, hint=f"ckptd list {job.files.location}") from None


def unpin(job: JobRecords, name: str) -> bool:
    """Retention may have it again; False when it was not pinned. Raises OSError."""
    return job.drop(f"{PINS_DIR}/{name}")
