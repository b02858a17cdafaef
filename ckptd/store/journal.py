"""A job's journal on its store: its segments are put by the daemon that writes them, and read by all others."""

import contextlib
import errno
import time
from collections.abc import Callable, Mapping
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
_LAST = 8  # segments that a writer may continue: it closed those before
_LEFT_S = 3600.0  # what a process that was killed left beside a segment is nobody's after that


class Here(NamedTuple):
    """A segment of a writer of this machine. content: empty: the store has it. nbytes: so much of it counts."""

    content: bytes
    nbytes: int


class Journal(NamedTuple):
    """entries: of all segments, oldest run first; each segment begins with its run, so a run may begin several times.

    damaged: records that cannot be read, and files that are no segments of the run that their names say.
    """

    entries: list[Entry]
    damaged: int


def read_journal(
    job: StoredFiles, here: Mapping[Name, Here] | None = None, counts: Callable[[Name], bool] = lambda _: True
) -> Journal:
    """All that is on record. Empty without the store or the job. Raises OSError where the store does not give it.

    here: segments that are not on the store, or not as a whole. counts: whether a segment does.
    """
    here = here if here is not None else {}
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
    for name in sorted({name for _, name in found if name is not None} | here.keys())[-MAX_SEGMENTS:]:
        if not counts(name):
            continue
        entries, lost = _read(job, name, here.get(name))
        damaged += lost
        if entries:
            segments.append((name, entries[0].at, entries))
    began: dict[tuple[int, str, str], float] = {}  # by run and writer: two writers of a run follow each other
    for name, at, _ in segments:
        began.setdefault(name[:3], at)
    segments.sort(key=lambda one: (one[0].incarnation, began[one[0][:3]], one[0]))
    return Journal([entry for *_, entries in segments for entry in entries], damaged)


def _read(job: StoredFiles, name: Name, here: Here | None) -> tuple[list[Entry], int]:
    try:
        data = here.content if here is not None else b""
        data = data or job.read(name.path, MAX_SEGMENT_NBYTES)
        data = data[: here.nbytes] if here is not None else data
    except FileNotFoundError:  # a writer has dropped it meanwhile
        return [], 0
    except OSError as error:
        if error.errno not in _NOT_A_FILE:
            raise
        return [], 1
    entries, damaged = read_segment(data)
    if any(isinstance(entry, RunBegan) and not name.is_of(entry) for entry in entries):
        return [], damaged + 1
    return entries, damaged


def last_of_others(job: StoredFiles, writer: str) -> str:
    """Names and sizes of the last segments of other writers: another text when one has put more. Raises OSError.

    A listing and a few requests, however long the journal is.
    """
    try:
        names = job.names(JOURNAL_DIR)
    except (FileNotFoundError, NotADirectoryError):
        return ""
    found: list[str] = []
    for name in sorted(name for name in map(parse_name, names) if name is not None and name.writer != writer)[-_LAST:]:
        with contextlib.suppress(FileNotFoundError):
            found.append(f"{name.text} {job.size(name.path)}")
    return "\n".join(found)


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
