"""Segments of journals in the arena, until the store has them: each a file in its job's directory, only appended to.

It begins with the job's key, so that a daemon that finds it knows whose it is; then it is the segment, byte by byte.
"""

import contextlib
import errno
import logging
import os
import struct
from typing import NamedTuple

import msgspec

from ckptd.arena.names import listdir, rmdir_if_empty, unlink_if_there
from ckptd.shared.base.decoding import MALFORMED
from ckptd.shared.base.ids import JobKey
from ckptd.shared.base.log_line import line
from ckptd.shared.files.regular import contents
from ckptd.shared.format import arena_paths
from ckptd.shared.protocol.journal import MAGIC, MAX_SEGMENT_NBYTES, Name, parse_name

log = logging.getLogger("ckptd")
_LENGTH = struct.Struct("<I")
_MAX_KEY_NBYTES = 4096
_decoder = msgspec.msgpack.Decoder(JobKey)


class JournalFile(NamedTuple):
    """Of one segment. start: where it begins in the file at path."""

    job: JobKey
    name: Name
    path: str
    start: int

    @classmethod
    def make(cls, arena: str, job: JobKey, name: Name) -> "JournalFile":
        """A new one, with no record. Raises OSError, FileExistsError for one that is there."""
        directory = os.path.join(arena, arena_paths.job_dir(job))
        os.makedirs(directory, mode=0o700, exist_ok=True)
        key = msgspec.msgpack.encode(job)
        path = os.path.join(directory, name.text + arena_paths.JOURNAL_SUFFIX)
        made = cls(job, name, path, _LENGTH.size + len(key))
        try:
            made._write(_LENGTH.pack(len(key)) + key + MAGIC, os.O_CREAT | os.O_EXCL)
        except OSError:
            made.remove()
            raise
        return made

    def append(self, data: bytes) -> None:
        """Whole, or not at all. Raises OSError, ENOSPC where memory is full."""
        self._write(data, os.O_APPEND)

    def _write(self, data: bytes, flags: int) -> None:
        fd = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o600)
        try:
            before = os.fstat(fd).st_size
            if os.write(fd, data) < len(data):
                os.ftruncate(fd, before)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.path)
        finally:
            os.close(fd)

    def remove(self) -> None:
        """It is on the store, or given up; so is the job's directory, once nothing else is there."""
        with contextlib.suppress(OSError):
            unlink_if_there(self.path)
        rmdir_if_empty(os.path.dirname(self.path))


class Found(NamedTuple):
    """What an earlier daemon left. content: of the segment."""

    file: JournalFile
    content: bytes


def found_journals(arena: str) -> list[Found]:
    """All in the arena, the oldest of a job first. What cannot be read is left out, and the log says so."""
    jobs = os.path.join(arena, arena_paths.JOBS)
    paths = [os.path.join(jobs, job, name) for job in listdir(jobs) for name in listdir(os.path.join(jobs, job))]
    found = []
    for path in sorted(path for path in paths if path.endswith(arena_paths.JOURNAL_SUFFIX)):
        try:
            found.append(_read(path))
        except (OSError, ValueError, struct.error, *MALFORMED) as error:
            log.warning(line("journal cannot be read", path=path, error=error))
    return sorted(found, key=lambda one: (one.file.job, os.stat(one.file.path).st_mtime))


def _read(path: str) -> Found:
    data = contents(path, MAX_SEGMENT_NBYTES + _MAX_KEY_NBYTES)
    (nbytes,) = _LENGTH.unpack_from(data)
    start = _LENGTH.size + nbytes
    job, name = (
        _decoder.decode(data[_LENGTH.size : start]),
        parse_name(os.path.basename(path).removesuffix(arena_paths.JOURNAL_SUFFIX)),
    )
    if name is None or os.path.basename(os.path.dirname(path)) != os.path.basename(arena_paths.job_dir(job)):
        raise ValueError("it belongs elsewhere")
    return Found(JournalFile(job, name, path, start), data[start:])
