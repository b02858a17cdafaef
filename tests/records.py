"""What a job has on record in a directory, by a disk and the job's key, for tests that swap the disk."""

from ckptd.store import numbers, pins, scan
from ckptd.store.posix.records import PosixRecords


def _of(function):
    return lambda fs, key, *args, **more: function(PosixRecords(fs, key), *args, **more)


def _of_files(function):
    return lambda fs, key, *args: function(PosixRecords(fs, key).files, *args)


take, claim, taken_over_by = _of(numbers.take), _of(numbers.claim), _of(numbers.taken_over_by)
pin, unpin = _of(pins.pin), _of(pins.unpin)
records_of, superseded, pinned = _of_files(scan.records_of), _of_files(scan.superseded), _of_files(scan.pinned)
