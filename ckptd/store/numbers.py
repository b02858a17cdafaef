"""Incarnation records on the store: one per number, with the run id and the session that took it.

A start creates its record, syncs it, and scans the store only then. A committer renames its checkpoint, syncs, and
lists the records only then. So of a takeover and a commit at the same time, at least one sees the other: either the
start restores the checkpoint, or the committer does not report it durable.

All functions block for as long as the file system does and raise OSError or CkptdError.
"""

import contextlib
import math
import time
from collections.abc import Collection

import msgspec

from ckptd.shared.base.errors import CkptdError, WrongStoreError
from ckptd.shared.base.ids import (
    MAX_INCARNATION,
    SaveId,
    is_counted,
    is_plausible,
    not_behind,
    parse_dirname,
    parse_partial_dirname,
)
from ckptd.shared.format.committed import INCARNATIONS_DIR
from ckptd.shared.format.stored_files import StoredFiles
from ckptd.store.facts import Committer, IncarnationRecord, Taker
from ckptd.store.records import JobRecords
from ckptd.store.scan import SUPERSEDED_DIR, record_in, record_name, record_numbers, records_of, save_at

KEPT_RECORDS = 16
_MAX_NBYTES = 4096
_encoder = msgspec.json.Encoder()


def take(job: JobRecords, by: Taker, at_least: int = 1, until: float = math.inf) -> int:
    """A number that nobody has had for this job, at least at_least and above all traces of the job here. Durable.

    After until (of time.monotonic) nobody waits for the number any more: its record is removed, since it would be taken
    for a takeover, and CkptdError raised.
    """
    where = job.files.where(INCARNATIONS_DIR)
    while True:
        number = max([at_least - 1, *record_numbers(job.files), *_used(job.files)]) + 1
        number = not_behind(number, time.time())
        if number > MAX_INCARNATION:
            raise CkptdError(f"{where}: incarnation numbers are used up", hint="use another job name")
        at_least = number + 1  # whichever session has it, this one never comes back to it
        name, data = _record(number, by)
        if not job.put(name, data, new=True):
            continue
        # A taker that slept since it listed may create a number that was taken and pruned: then many higher ones exist.
        highest = record_numbers(job.files, number)[-KEPT_RECORDS:]
        if number in highest and _content(job.files, name) == data:  # else the store let another taker replace it
            break
    if time.monotonic() > until:
        job.drop(name)
        raise CkptdError(f"{where}: number {number} came too late, and was given back")
    _prune(job, below=highest[0])
    return number


def claim(job: JobRecords, number: int, by: Taker) -> bool:
    """Whether the number is the taker's, on record and durable: one that was made up while the store was silent.

    To be asked before anything of the number is written here. May be repeated. A record of the same session, which the
    store gave it and said that it did not, is replaced: its run has nothing.
    """
    name, data = _record(number, by)
    if number not in record_numbers(job.files, number):
        job.put(name, data, new=True)
    elif any((r.incarnation, r.session) == (number, by.session) for r in records_of(job.files, number)):
        job.put(name, data)
    return any((r.incarnation, r.run) == (number, by.run.hex()) for r in records_of(job.files, number))


def taken_over_by(job: JobRecords, save: SaveId, by: Committer) -> int:
    """The highest number above the committer's that another session took, 0 when there is none.

    A daemon that finishes what an earlier process began, and knows of no session, commits in the name of the session
    that saved it.

    To be asked after the rename of a commit is on the disk, never before: see the module. A record that cannot be read
    counts as another session's. An empty one is nobody's: its taker has yet to write it, and scans later than that.
    Numbers are listed once, and each is judged by one reading: the session itself may take one meanwhile, for a load.
    """
    base = max(by.incarnation, save.incarnation)
    known = 0 if is_plausible(base, time.time()) else MAX_INCARNATION  # then it is the numbers that are strange
    numbers = record_numbers(job.files, known)
    own = {by.session or _session_of(job.files, save, known), *by.void}
    return next((n for n in reversed(numbers) if n > base and _is_of_another(job.files, n, own)), 0)


def check_counted(job: JobRecords, save: SaveId) -> None:
    """Raises WrongStoreError where another run counts now: the job's directory was emptied since the save's run began.

    A number without a record is no proof while nobody has begun again, nor one older than the records that are kept.
    """
    numbers = record_numbers(job.files)
    if not is_counted(save.incarnation) or not numbers or save.incarnation < numbers[0]:
        return
    runs = [record.run for record in records_of(job.files) if record.incarnation == save.incarnation]
    if save.incarnation in numbers and runs in ([], [save.run.hex()]):  # none: it cannot be read
        return
    raise WrongStoreError(
        f"{job.files.location} has no record of incarnation {save.incarnation} of run {save.run.hex()}, and has "
        "others: it was emptied since, and another run began there",
        hint=f"what is staged stays in memory; to go on from it: load(state, run={save.run.hex()!r})",
    )


def mark_superseded(job: JobRecords, dirname: str, incarnation: int) -> str:
    """Notes, for `ckptd list`, that the checkpoint was committed after a takeover. Empty, or why it was not noted."""
    name = f"{SUPERSEDED_DIR}/{dirname}"
    try:
        job.put(name, f"{incarnation}\n".encode())
    except OSError as error:
        return f"{job.files.where(name)} was not written: {error}"
    return ""


def forget_superseded(job: JobRecords, dirname: str) -> None:
    """The checkpoint is removed: nothing is to be said of it any more."""
    with contextlib.suppress(OSError):
        job.drop(f"{SUPERSEDED_DIR}/{dirname}")


def _used(files: StoredFiles) -> list[int]:
    """Of checkpoints, unfinished or not; of those that no run can have had, what a record vouches for."""
    try:
        names = files.names()
    except FileNotFoundError:
        return []
    finals = [(name, found[1]) for name in names if (found := parse_dirname(name)) is not None]
    partials = [save.incarnation for save in map(parse_partial_dirname, names) if save]
    numbers = {number for _, number in finals} | set(partials)
    strange = {number for number in numbers if not is_plausible(number, time.time())}
    vouched = {n for name, n in finals if n in strange and (save := save_at(files, name)) and save.dirname == name}
    return sorted((numbers - strange) | vouched)


def _record(number: int, by: Taker) -> tuple[str, bytes]:
    """Name and content of the number's record."""
    record = IncarnationRecord(incarnation=number, run=by.run.hex(), session=by.session, node=by.node)
    return record_name(number), _encoder.encode(record) + b"\n"


def _session_of(files: StoredFiles, save: SaveId, known: int) -> str:
    """The session that saved it; empty: no record says so."""
    records = records_of(files, known)
    return next((r.session for r in records if (r.incarnation, bytes.fromhex(r.run)) == save.owner), "")


def _is_of_another(files: StoredFiles, number: int, own: Collection[str]) -> bool:
    """Whether a session that is none of own took the number.

    None has one with an empty record: its taker has yet to write it, or was killed. It is read, not only looked at:
    of a file that is opened no node of a network file system has an old size.
    """
    content = _content(files, record_name(number))
    record = record_in(content, number) if content else None
    return content != b"" and (record is None or record.session not in own)


def _content(files: StoredFiles, name: str) -> bytes | None:
    """Of a record, None when it cannot be read."""
    try:
        return files.read(name, _MAX_NBYTES)
    except OSError:
        return None


def _prune(job: JobRecords, *, below: int) -> None:
    for number in record_numbers(job.files):
        if number < below:
            with contextlib.suppress(OSError):  # tidying only; the next taker tries again
                job.drop(record_name(number))
