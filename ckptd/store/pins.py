"""Checkpoints that the user has pinned: retention passes them over. A pin is an empty record of the job."""

from ckptd.shared.base.errors import UsageError
from ckptd.shared.format.committed_record import MAX_COMMITTED_NBYTES
from ckptd.shared.format.manifest import COMMITTED
from ckptd.store.records import JobRecords
from ckptd.store.scan import PINS_DIR


def pin(job: JobRecords, name: str) -> bool:
    """Pins a committed checkpoint, on the medium when it returns; False: it was already. Raises UsageError, OSError."""
    before = _committed(job, name)
    new = job.put(f"{PINS_DIR}/{name}", b"", new=True)
    try:
        after = _committed(job, name)  # a removal may have passed its own look at the pins before
    except UsageError:
        unpin(job, name)
        raise
    if new and after != before:  # so may what makes it smaller
        unpin(job, name)
        where = job.files.where(name)
        hint = f"see what it has now: ckptd list {job.files.location}; then again: ckptd pin {where}"
        raise UsageError(f"{where} was written again meanwhile, and is not pinned", hint=hint)
    return new


def _committed(job: JobRecords, name: str) -> bytes:
    try:
        return job.files.read(f"{name}/{COMMITTED}", MAX_COMMITTED_NBYTES)
    except FileNotFoundError:
        text = f"{job.files.where(name)} is no committed checkpoint"
        raise UsageError(text, hint=f"ckptd list {job.files.location}") from None


def unpin(job: JobRecords, name: str) -> bool:
    """Retention may have it again; False when it was not pinned. Raises OSError."""
    return job.drop(f"{PINS_DIR}/{name}")
