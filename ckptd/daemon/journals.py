"""Journals of the jobs that this daemon coordinates: kept in the arena at once, put on the store in segments.

Nobody waits for a journal: a store that does not take it costs records. ``MAX_KEPT_NBYTES`` of a job stay in the arena,
and the oldest go first; a record says how many. One segment at a time is on its way to a store.
"""

import logging
import math
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from msgspec.structs import replace

from ckptd.arena.journal_files import JournalFile, found_journals
from ckptd.arena.known_stores import KnownStores
from ckptd.core.actions import KeepEntry
from ckptd.daemon.accounts import Accounts, Place
from ckptd.daemon.step_marks import StepMarks
from ckptd.daemon.store_scans import problem_of
from ckptd.shared.base.ids import JobKey
from ckptd.shared.base.log_line import line
from ckptd.shared.protocol.journal import (
    MAGIC,
    SEGMENT_NBYTES,
    Durable,
    Entry,
    Missing,
    Name,
    Protected,
    RunBegan,
    RunEnded,
    Staged,
    framed,
    read_segment,
    run_digits,
)
from ckptd.store.journal_messages import ArenaSegment, PutJournal
from ckptd.store.messages import Done, Failed
from ckptd.store.workers import Stores

log = logging.getLogger("ckptd")
MAX_KEPT_NBYTES = 1 << 20
FLUSH_S = 30.0
FLUSH_NBYTES = 32 << 10
_PAUSE_S = 5.0  # after a failure; doubled at each, up to
_MAX_PAUSE_S = 600.0
_LAST_S = 10.0  # a daemon that ends waits so long for its last segments, at most
_Milestone = tuple[str, str, int, int]  # digits of the run, kind of the record, incarnation and counter of the save


@dataclass(eq=False, slots=True)
class _Segment:
    """nbytes, records: that lie in the file, and those that it says are missing; put_*: that the store has."""

    file: JournalFile
    nbytes: int = len(MAGIC)
    records: int = 0
    put_nbytes: int = 0
    put_records: int = 0
    open: bool = True  # more may be appended
    again: bool = False  # an earlier one has the beginning of the run

    @property
    def is_empty(self) -> bool:
        return self.nbytes == len(MAGIC)

    @property
    def is_put(self) -> bool:
        return self.put_nbytes == self.nbytes or self.is_empty


@dataclass(eq=False, slots=True)
class _Journal:
    """Of one job. segments: oldest first; the last one may be open."""

    job: JobKey
    writer: str
    segments: list[_Segment] = field(default_factory=list)
    numbers: int = 0
    run: RunBegan | None = None  # of the open segment
    seen: set[_Milestone] = field(default_factory=set)  # milestones that an earlier daemon put on record
    missing: int = 0  # records that are lost, and no record says so yet
    due: float | None = None  # when it is put; None: the store has it all
    pause_s: float = 0.0  # after the last failure
    store_id: str = ""  # to which it belongs, as it was known last
    gone: bool = False  # nothing else of the job is here


class Journals:
    """``uses`` says whether a job of a store is known to the daemon. All in the main thread; nothing blocks."""

    def __init__(
        self, arena: str, stores: Stores, known_stores: KnownStores, uses: Callable[[str], bool], marks: StepMarks
    ) -> None:
        self._arena, self._stores, self._known_stores, self._uses = arena, stores, known_stores, uses
        self._journals: dict[JobKey, _Journal] = {}
        self._busy: dict[str, _Segment] = {}  # store -> what is on its way there
        self._leave_by: float | None = None
        self.marks = marks
        self.accounts = Accounts(stores, known_stores, uses, self._place)

    def adopt(self) -> None:
        """What an earlier daemon could not put: it is put as it is, and what comes begins the next segment."""
        for found in found_journals(self._arena):
            if self._known_stores.of(found.file.job) is None:  # the job was forgotten: nobody would ever put it
                found.file.remove()
                continue
            journal = self._of(found.file.job)
            entries = read_segment(found.content).entries
            journal.seen |= {seen for entry in entries if (seen := _milestone(found.file.name.run, entry)) is not None}
            segment = _Segment(found.file, len(found.content), sum(map(_records, entries)), open=False)
            journal.segments.append(segment)
            journal.due = time.monotonic() + FLUSH_S
            self._bound(journal)

    # --- records

    def keep(self, action: KeepEntry) -> None:
        """Puts the record into the job's journal."""
        journal, now = self._of(action.job), time.monotonic()
        if (seen := _milestone(run_digits(action.began.run), action.entry)) is not None and seen in journal.seen:
            return  # the coordinator's predecessor in this arena knew
        at = time.time()
        began, entry = replace(action.began, at=at - action.age_s), replace(action.entry, at=at - action.ago_s)
        try:
            self._append(journal, began, entry)
        except OSError as error:
            journal.missing += 1
            if journal.missing == 1:
                log.warning(line("no record of it is kept", job=action.job.job, error=error))
        self.accounts.add(action.job, began, entry)
        self._leave_by, journal.gone = None, False
        journal.store_id = self._known_stores.of(action.job) or journal.store_id
        last = journal.segments[-1] if journal.segments else None
        full = last is not None and last.nbytes - last.put_nbytes >= FLUSH_NBYTES
        due = now if full or isinstance(action.entry, RunEnded) else now + FLUSH_S
        if journal.due is None or not journal.pause_s:
            journal.due = min(due, journal.due or due)

    def _of(self, job: JobKey) -> _Journal:
        return self._journals.setdefault(job, _Journal(job, secrets.token_hex(4)))

    def _append(self, journal: _Journal, began: RunBegan, entry: Entry) -> None:
        segment = journal.segments[-1] if journal.segments else None
        goes_on = journal.run is not None and (journal.run.incarnation, journal.run.run) == (
            began.incarnation,
            began.run,
        )
        if segment is None or not segment.open or segment.nbytes >= SEGMENT_NBYTES or not goes_on:
            segment = self._next(journal, began, again=began.again or goes_on)
        self._bound(journal)  # this record says what went
        records: list[Entry] = [entry]
        if segment.is_empty:
            records.insert(0, replace(began, at=entry.at if segment.again else began.at, again=segment.again))
        if journal.missing:
            records.insert(-1, Missing(at=entry.at, records=journal.missing))
        data = b"".join(map(framed, records))
        segment.file.append(data)
        segment.nbytes += len(data)
        segment.records += sum(map(_records, records))
        journal.missing = 0

    def _next(self, journal: _Journal, began: RunBegan, *, again: bool) -> _Segment:
        """A new segment, of this run."""
        self._close_segment(journal)
        journal.numbers += 1
        name = Name(began.incarnation, run_digits(began.run), journal.writer, journal.numbers)
        segment = _Segment(JournalFile.make(self._arena, journal.job, name), again=again)
        journal.segments.append(segment)
        journal.run = began
        return segment

    def _close_segment(self, journal: _Journal) -> None:
        journal.run = None
        if journal.segments and journal.segments[-1].open:
            journal.segments[-1].open = False
            self._drop_put(journal)

    def _bound(self, journal: _Journal) -> None:
        """The oldest that the store does not have make room; not one that is on its way."""
        while len(journal.segments) > 1 and sum(one.nbytes for one in journal.segments) > MAX_KEPT_NBYTES:
            oldest = next(one for one in journal.segments if one is not self._busy.get(journal.job.store))
            if oldest is journal.segments[-1]:
                return
            journal.segments.remove(oldest)
            journal.missing += oldest.records - oldest.put_records
            oldest.file.remove()

    def _drop_put(self, journal: _Journal) -> None:
        for segment in [one for one in journal.segments if one.is_put and not one.open]:
            journal.segments.remove(segment)
            segment.file.remove()
        if journal.gone and not journal.segments:
            self._journals.pop(journal.job, None)

    # --- to the store

    def _place(self, job: JobKey) -> Place:
        """Where the job's records are that the store may lack."""
        journal = self._of(job)
        segments = [
            ArenaSegment(name=one.file.name.text, path=one.file.path, start=one.file.start, nbytes=one.nbytes)
            for one in journal.segments
        ]
        return Place(journal.writer, journal.numbers, segments)

    def next_deadline(self) -> float | None:
        """When tick has something to do (time.monotonic)."""
        waiting = [one.due for one in self._journals.values() if one.job.store not in self._busy]
        leave_by = self._leave_by if self._leave_by is not None and self._leave_by > time.monotonic() else None
        others = (leave_by, self.accounts.next_deadline(), self.marks.next_deadline())
        return min((due for due in (*waiting, *others) if due is not None), default=None)

    def tick(self) -> None:
        """Sends what is due."""
        self.marks.tick()
        self.accounts.tick()
        now = time.monotonic()
        for journal in list(self._journals.values()):
            if journal.due is not None and now >= journal.due and journal.job.store not in self._busy:
                self._put(journal, now)

    def _put(self, journal: _Journal, now: float) -> None:
        job, segment = journal.job, next((one for one in journal.segments if not one.is_put), None)
        if segment is None:
            journal.due = None
            return
        store_id = journal.store_id = self._known_stores.of(job) or journal.store_id
        if not store_id:  # the session's number, or the look at it, brings that
            self._failed(journal, now)
            return
        file, nbytes, records = segment.file, segment.nbytes, segment.records
        self._busy[job.store] = segment
        self._stores.ask(
            job.store,
            lambda i: PutJournal(
                id=i,
                store_id=store_id,
                job=job.job,
                name=file.name.text,
                path=file.path,
                start=file.start,
                nbytes=nbytes,
                first=not segment.put_nbytes,
            ),
            partial(self._answered, journal, segment, (nbytes, records)),
        )

    def _answered(self, journal: _Journal, segment: _Segment, put: tuple[int, int], reply: Done | Failed) -> None:
        store, now = journal.job.store, time.monotonic()
        del self._busy[store]
        if problem := problem_of(reply):
            log.info(line("journal is not on the store yet", job=journal.job.job, problem=problem))
            self._failed(journal, now)
        else:
            segment.put_nbytes, segment.put_records = put
            journal.pause_s = 0.0
            self._drop_put(journal)
            left = [one for one in journal.segments if not one.is_put]
            journal.due = None if not left else now if len(left) > 1 or not left[0].open else now + FLUSH_S
        if not self._uses(store):
            self._stores.retire(store)

    def _failed(self, journal: _Journal, now: float) -> None:
        journal.pause_s = min(2 * journal.pause_s or _PAUSE_S, _MAX_PAUSE_S)
        journal.due = now + journal.pause_s

    # --- ends

    def forget(self, job: JobKey) -> None:
        """Nothing of the job is here any more but its journal: what the store lacks of it is put now."""
        self.accounts.forget(job)
        if (journal := self._journals.get(job)) is None:
            return
        journal.gone, journal.due = True, time.monotonic()
        self._close_segment(journal)
        self._drop_put(journal)
        self.tick()

    def put_now(self, now: float) -> None:
        """What a store lacks goes there without delay, also after failures."""
        for journal in self._journals.values():
            journal.due, journal.pause_s = (now if journal.due is not None else None), 0.0
        self.tick()

    def ending(self, now: float, until: float | None = None) -> bool:
        """Whether a daemon that wants to end waits a moment, not beyond until, for what is on its way to a store."""
        if self._leave_by is None:
            self._leave_by = min(now + _LAST_S, math.inf if until is None else until)
            self.put_now(now)
        return now < self._leave_by and any(one.due is not None and not one.pause_s for one in self._journals.values())

    def close(self, *, remove: bool) -> None:
        """remove: the arena goes with this daemon, and what is in it."""
        for journal in self._journals.values() if remove else ():
            lost = sum(one.records - one.put_records for one in journal.segments)
            if lost:
                log.warning(line("records of the journal are lost", job=journal.job.job, records=lost))
            for segment in journal.segments:
                segment.file.remove()


def _records(entry: Entry) -> int:
    """That are lost with it: the run's is in the next segment again."""
    return entry.records if isinstance(entry, Missing) else int(not isinstance(entry, RunBegan))


def _milestone(run: str, entry: Entry) -> _Milestone | None:
    """That a save reaches once."""
    if not isinstance(entry, Staged | Protected | Durable):
        return None
    incarnation = entry.incarnation if isinstance(entry, Durable) else 0
    return run, type(entry).__name__, incarnation, entry.counter
