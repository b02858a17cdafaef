"""A job's journal on its store: its segments are put by the daemon that writes them, and read by all others."""

import contextlib
import errno
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from ckptd.shared.format.stored_files import StoredFiles
from ckptd.shared.protocol.journal import (
    JOURNAL_DIR,
    MAX_JOURNAL_NBYTES,
    MAX_SEGMENT_NBYTES,
    MAX_SEGMENTS,
    Entry,
    Name,
    RunBegan,
    parse_name,
    read_segment,
)
from ckptd.store.records import JobRecords

_NOT_A_FILE = frozenset({errno.EFBIG, errno.ELOOP, errno.EISDIR, errno.EINVAL, errno.ENXIO})
_NONE: Mapping[Name, bytes] = MappingProxyType({})
_LEFT_S = 3600.0  # what a process that was killed left beside a segment is nobody's after that


class Journal(NamedTuple):
    """entries: of all segments, oldest run first; each segment begins with its run, so a run may begin several times.

    damaged: records that cannot be read, and files that are no segments of the run that their names say.
    """

    entries: list[Entry]
    damaged: int


def read_journal(job: StoredFiles, arena: Mapping[Name, bytes] = _NONE) -> Journal:
    """All that is on record. Empty without the store or the job. Raises OSError where the store does not give it.

    arena: segments as an arena has them: each is as long as that of the store, or longer.
    """
    names: list[str] = []
    damaged = 0
    try:
        names = job.names(JOURNAL_DIR)
    except FileNotFoundError:
        pass
    except NotADirectoryError:
        damaged = 1
    found = [(text, parse_name(text)) for text in names if not text.startswith(".")]
    damaged += sum(name is None for _, name in found)
    segments: list[tuple[Name, float, list[Entry]]] = []
    for name in sorted({*arena, *(name for _, name in found if name is not None)})[-MAX_SEGMENTS:]:
        entries, lost = _checked(name, arena[name]) if name in arena else _read(job, name)
        damaged += lost
        if entries:
            segments.append((name, entries[0].at, entries))
    began: dict[tuple[int, str, str], float] = {}  # by run and writer: two writers of a run follow each other
    for name, at, _ in segments:
        began.setdefault(name[:3], at)
    segments.sort(key=lambda one: (one[0].incarnation, began[one[0][:3]], one[0]))
    return Journal([entry for *_, entries in segments for entry in entries], damaged)


def _read(job: StoredFiles, name: Name) -> tuple[list[Entry], int]:
    try:
        data = job.read(name.path, MAX_SEGMENT_NBYTES)
    except FileNotFoundError:  # a writer has dropped it meanwhile
        return [], 0
    except OSError as error:
        if error.errno not in _NOT_A_FILE:
            raise
        return [], 1
    return _checked(name, data)


def _checked(name: Name, data: bytes) -> tuple[list[Entry], int]:
    entries, damaged = read_segment(data)
    if any(isinstance(entry, RunBegan) and not name.is_of(entry) for entry in entries):
        return [], damaged + 1
    return entries, damaged


def put_segment(job: JobRecords, name: Name, content: bytes, *, first: bool) -> None:
    """The segment has this content from now on. first: it is new, so the oldest make room. Raises OSError."""
    if first:
        _make_room(job, name)
    job.put(name.path, content)


def _make_room(job: JobRecords, new: Name) -> None:
    try:
        names = job.files.names(JOURNAL_DIR)
    except FileNotFoundError:
        return
    for text in names:
        if text.startswith("."):
            with contextlib.suppress(OSError):
                if job.files.modified(f"{JOURNAL_DIR}/{text}") < time.time() - _LEFT_S:
                    job.drop(f"{JOURNAL_DIR}/{text}")
    room, count = MAX_JOURNAL_NBYTES - MAX_SEGMENT_NBYTES, 1
    for name in sorted((name for name in map(parse_name, names) if name is not None and name != new), reverse=True):
        with contextlib.suppress(FileNotFoundError):
            room, count = room - job.files.size(name.path), count + 1
            if room < 0 or count > MAX_SEGMENTS:
                job.drop(name.path)
