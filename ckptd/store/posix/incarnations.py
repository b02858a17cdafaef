"""Incarnation records on the store: one per number, with the run id and the session that took it.

A start creates its record, syncs it, and scans the store only then. A committer renames its checkpoint, syncs, and
lists the records only then. So of a takeover and a commit at the same time, at least one sees the other: either the
start restores the checkpoint, or the committer does not report it durable.

All functions block for as long as the file system does and raise OSError or CkptdError.
"""

import contextlib
import math
import os
import time

import msgspec

from ckptd.shared.base.errors import CkptdError, WrongStoreError
from ckptd.shared.base.ids import (
    MAX_INCARNATION,
    JobKey,
    SaveId,
    is_counted,
    is_plausible,
    not_behind,
    parse_dirname,
    parse_partial_dirname,
)
from ckptd.shared.format.committed import INCARNATIONS_DIR, identify
from ckptd.store.facts import Committer, IncarnationRecord, Taker
from ckptd.store.posix.scan import files_at, job_dir, record_numbers, records_of
from ckptd.system.files import FileLayer

KEPT_RECORDS = 16
SUPERSEDED_DIR = ".superseded"
_MAX_NBYTES = 4096
_encoder = msgspec.json.Encoder()


def take(fs: FileLayer, key: JobKey, by: Taker, at_least: int = 1, until: float = math.inf) -> int:
    """A number that nobody has had for this job, at least at_least and above all traces of the job here. Durable.

    The job's directory is made if it is missing, the store's never. After until (of time.monotonic) nobody waits for
    the number any more: its record is removed, since it would be taken for a takeover, and CkptdError raised.
    """
    records = os.path.join(job_dir(key), INCARNATIONS_DIR)
    fs.mkdir(job_dir(key))
    fs.mkdir(records)
    while True:
        number = max([at_least - 1, *record_numbers(fs, key), *_used(fs, key)]) + 1
        number = not_behind(number, time.time())
        if number > MAX_INCARNATION:
            raise CkptdError(f"{records}: incarnation numbers are used up", hint="use another job name")
        path, data = _record(key, number, by)
        mine = fs.publish_once(fs.write_temp(path, data), path)
        at_least = number + 1  # whoever has it, this one never comes back to it
        if not mine:
            continue
        # A taker that slept since it listed may create a number that was taken and pruned: then many higher ones exist.
        highest = record_numbers(fs, key, number)[-KEPT_RECORDS:]
        if number not in highest:
            continue
        _sync_records(fs, key)
        if _content(fs, path) == data:  # else the file system let another taker replace it
            break
    if time.monotonic() > until:
        fs.unlink(path)
        fs.fsync_dir(records)
        raise CkptdError(f"{records}: number {number} came too late, and was given back")
    _prune(fs, key, below=highest[0])
    return number


def claim(fs: FileLayer, key: JobKey, number: int, by: Taker) -> bool:
    """Whether the number is the taker's, on record and durable: one that was made up while the store was silent.

    To be asked before anything of the number is written here. May be repeated. A record of the same session, which the
    store gave it and said that it did not, is replaced: its run has nothing.
    """
    path, data = _record(key, number, by)
    records = os.path.dirname(path)
    fs.mkdir(job_dir(key))
    fs.mkdir(records)
    if number not in record_numbers(fs, key, number):
        fs.publish_once(fs.write_temp(path, data), path)
    elif any((r.incarnation, r.session) == (number, by.session) for r in records_of(fs, key, number)):
        fs.rename(fs.write_temp(path, data), path)
    _sync_records(fs, key)
    return any((r.incarnation, r.run) == (number, by.run.hex()) for r in records_of(fs, key, number))


def taken_over_by(fs: FileLayer, key: JobKey, save: SaveId, by: Committer) -> int:
    """The highest number above the committer's that another session took, 0 when there is none.

    A daemon that finishes what an earlier process began, and knows of no session, commits in the name of the session
    that saved it.

    To be asked after the rename of a commit is on the disk, never before: see the module. A record that cannot be read
    counts as another session's. An empty one is nobody's: its taker has yet to write it, and scans later than that.
    """
    base = max(by.incarnation, save.incarnation)
    known = 0 if is_plausible(base, time.time()) else MAX_INCARNATION  # then it is the numbers that are strange
    records = records_of(fs, key, known)
    saved = next((r.session for r in records if (r.incarnation, bytes.fromhex(r.run)) == save.owner), "")
    own = {record.incarnation for record in records if record.session in (by.session or saved, *by.void)}
    others = [n for n in record_numbers(fs, key, known) if n > base and n not in own]
    return next((n for n in reversed(others) if not _is_claim(fs, key, n)), 0)


def check_counted(fs: FileLayer, key: JobKey, save: SaveId) -> None:
    """Raises WrongStoreError where another run counts now: the job's directory was emptied since the save's run began.

    A number without a record is no proof while nobody has begun anew, nor one older than the records that are kept.
    """
    numbers = record_numbers(fs, key)
    if not is_counted(save.incarnation) or not numbers or save.incarnation < numbers[0]:
        return
    runs = [record.run for record in records_of(fs, key) if record.incarnation == save.incarnation]
    if save.incarnation in numbers and runs in ([], [save.run.hex()]):  # none: it cannot be read
        return
    raise WrongStoreError(
        f"{job_dir(key)} has no record of incarnation {save.incarnation} of run {save.run.hex()}, and has others: it "
        "was emptied since, and another run began there",
        hint=f"what is staged stays in memory; to go on from it: load(state, run={save.run.hex()!r})",
    )


def mark_superseded(fs: FileLayer, key: JobKey, dirname: str, incarnation: int) -> str:
    """Notes, for `ckptd list`, that the checkpoint was committed after a takeover. Empty, or why it was not noted."""
    directory = os.path.join(job_dir(key), SUPERSEDED_DIR)
    try:
        fs.mkdir(directory)
        path = os.path.join(directory, dirname)
        fs.rename(fs.write_temp(path, f"{incarnation}\n".encode()), path)
        fs.fsync_dir(directory)
    except OSError as error:
        return f"{directory} was not written: {error}"
    return ""


def superseded(fs: FileLayer, key: JobKey) -> dict[str, int]:
    """Directories of checkpoints that were committed after a takeover, and the incarnation that took the job over."""
    directory = os.path.join(job_dir(key), SUPERSEDED_DIR)
    found = {}
    with contextlib.suppress(OSError):
        for name in filter(parse_dirname, fs.listdir(directory)):
            with contextlib.suppress(OSError, ValueError):
                found[name] = int(fs.read_file(os.path.join(directory, name), _MAX_NBYTES))
    return found


def forget_superseded(fs: FileLayer, key: JobKey, dirname: str) -> None:
    """The checkpoint is removed: nothing is to be said of it any more."""
    with contextlib.suppress(OSError):
        fs.unlink(os.path.join(job_dir(key), SUPERSEDED_DIR, dirname))


def _used(fs: FileLayer, key: JobKey) -> list[int]:
    """Of checkpoints, unfinished or not; of those that no life can have had, what a record vouches for."""
    names = fs.listdir(job_dir(key))
    finals = [(name, found[1]) for name in names if (found := parse_dirname(name)) is not None]
    partials = [save.incarnation for save in map(parse_partial_dirname, names) if save]
    numbers = {number for _, number in finals} | set(partials)
    strange = {number for number in numbers if not is_plausible(number, time.time())}
    vouched = {number for name, number in finals if number in strange and _has_record(fs, key, name)}
    return sorted((numbers - strange) | vouched)


def _record(key: JobKey, number: int, by: Taker) -> tuple[str, bytes]:
    """Path and content of the number's record."""
    record = IncarnationRecord(incarnation=number, run=by.run.hex(), session=by.session, node=by.node)
    return os.path.join(job_dir(key), INCARNATIONS_DIR, f"i{number:08d}"), _encoder.encode(record) + b"\n"


def _sync_records(fs: FileLayer, key: JobKey) -> None:
    for directory in (os.path.join(job_dir(key), INCARNATIONS_DIR), job_dir(key), key.store):
        fs.fsync_dir(directory)


def _is_claim(fs: FileLayer, key: JobKey, number: int) -> bool:
    """Whether the number is taken, and its record not written; nor will it be, if the taker was killed."""
    # Read and not only looked at: of a file that is opened no node of a network file system has an old size.
    return _content(fs, os.path.join(job_dir(key), INCARNATIONS_DIR, f"i{number:08d}")) == b""


def _content(fs: FileLayer, path: str) -> bytes | None:
    """Of a record, None when it cannot be read."""
    try:
        return fs.read_file(path, _MAX_NBYTES)
    except OSError:
        return None


def _has_record(fs: FileLayer, key: JobKey, name: str) -> bool:
    try:
        return identify(files_at(fs, os.path.join(job_dir(key), name)), job=key.job).save.dirname == name
    except (OSError, CkptdError):
        return False


def _prune(fs: FileLayer, key: JobKey, *, below: int) -> None:
    directory = os.path.join(job_dir(key), INCARNATIONS_DIR)
    for number in record_numbers(fs, key):
        if number < below:
            with contextlib.suppress(OSError):  # tidying only; the next taker tries again
                fs.unlink(os.path.join(directory, f"i{number:08d}"))
