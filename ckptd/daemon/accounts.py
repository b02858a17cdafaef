"""What the runs of a job have come to so far, by what is on record: read once, then continued record by record.

A daemon that begins to coordinate a job has its worker read the journal: the segments on the store, and those that
still lie in the arena. Later looks at the store read it again only where another writer has put something. Until the
answer, and as long as the store gives none, nothing is known: counters that began at 0 would say later that all had
happened at once.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from ckptd.arena.known_stores import KnownStores
from ckptd.core import actions as act
from ckptd.daemon.store_scans import problem_of
from ckptd.history.account import Account
from ckptd.shared.base.ids import JobKey
from ckptd.shared.base.log_line import line
from ckptd.shared.protocol.journal import Entry, RunBegan
from ckptd.store.journal_messages import AccountRead, ArenaSegment, ReadAccount
from ckptd.store.messages import Done, Failed
from ckptd.store.workers import Stores

log = logging.getLogger("ckptd")
_FIRST_S = 0.1  # for the answer that brings the store's id
_PAUSE_S = 1.0  # after a failure; doubled at each, up to
_MAX_PAUSE_S = 600.0
_FRESH_S = 60.0  # between two looks for what others have put
_MAX_WAITING = 4096  # records that come while the journal is read


class Place(NamedTuple):
    """Where the records of this daemon are. last: the number of its last segment."""

    writer: str
    last: int
    segments: list[ArenaSegment]


@dataclass(eq=False, slots=True)
class _Known:
    """Of one job. others: had put that when it was read. waiting: records since its journal was asked for."""

    account: Account | None = None
    others: str | None = None
    read_at: float = float("-inf")
    due: float | None = None
    pause_s: float = 0.0
    asked: bool = False
    waiting: list[Entry] = field(default_factory=list)


class Accounts:
    """``place`` gives where a job's records lie here. All in the main thread; nothing blocks."""

    def __init__(
        self, stores: Stores, known_stores: KnownStores, uses: Callable[[str], bool], place: Callable[[JobKey], Place]
    ) -> None:
        self._stores, self._known_stores, self._uses, self._place = stores, known_stores, uses, place
        self._known: dict[JobKey, _Known] = {}

    def of(self, job: JobKey) -> Account | None:
        """None: not read yet."""
        known = self._known.get(job)
        return known.account if known is not None else None

    def expect(self, action: act.ScanStore | act.TakeIncarnation) -> None:
        """This daemon coordinates the job, and another one may have done so before."""
        known, now = self._known.setdefault(action.job, _Known()), time.monotonic()
        if isinstance(action, act.TakeIncarnation) or now - known.read_at > _FRESH_S:
            known.due = min(known.due or now + _FIRST_S, now + _FIRST_S)

    def add(self, job: JobKey, began: RunBegan, entry: Entry) -> None:
        """A record of that run is kept."""
        known = self._known.setdefault(job, _Known())
        if known.asked and len(known.waiting) < _MAX_WAITING:
            known.waiting += [began, entry]
        if known.account is not None:
            _add(known.account, began, entry)
        elif known.due is None and not known.asked:
            known.due = time.monotonic() + _FIRST_S

    def forget(self, job: JobKey) -> None:
        """Nothing of the job is here any more."""
        self._known.pop(job, None)

    def next_deadline(self) -> float | None:
        """When tick has something to do (time.monotonic)."""
        return min((one.due for one in self._known.values() if one.due is not None), default=None)

    def tick(self) -> None:
        """Asks for what is due."""
        now = time.monotonic()
        for job, known in list(self._known.items()):
            if known.due is not None and now >= known.due:
                self._ask(job, known, now)

    def _ask(self, job: JobKey, known: _Known, now: float) -> None:
        store_id = self._known_stores.of(job)
        if store_id is None or known.asked:  # the session's number, or the look at it, brings that
            self._failed(known, now)
            return
        known.due, known.asked, known.waiting = None, True, []
        place = self._place(job)
        self._stores.ask(
            job.store,
            lambda i: ReadAccount(
                id=i,
                store_id=store_id,
                job=job.job,
                writer=place.writer,
                last=place.last,
                seen=known.others,
                segments=place.segments,
            ),
            partial(self._answered, job, known),
        )

    def _answered(self, job: JobKey, known: _Known, reply: Done | Failed) -> None:
        now, known.asked = time.monotonic(), False
        waiting, known.waiting = known.waiting, []
        if problem := problem_of(reply):
            log.info(line("journal cannot be read yet", job=job.job, problem=problem))
            self._failed(known, now)
        else:
            assert isinstance(reply, Done)  # noqa: S101 - problem_of looked
            read = reply.result
            assert isinstance(read, AccountRead)  # noqa: S101 - the answer to ReadAccount
            if read.account is not None and len(waiting) >= _MAX_WAITING:
                self._failed(known, now)
            else:
                known.read_at, known.pause_s, known.others = now, 0.0, read.others
                self._continue(known, read.account, waiting)
        if not self._uses(job.store):
            self._stores.retire(job.store)

    def _continue(self, known: _Known, account: Account | None, waiting: list[Entry]) -> None:
        """None: the one that is known has all."""
        if account is None:
            return
        for began, entry in zip(waiting[::2], waiting[1::2], strict=True):
            assert isinstance(began, RunBegan)  # noqa: S101 - put there by add
            _add(account, began, entry)
        if known.account is None or account.records >= known.account.records:  # else the oldest have made room
            known.account = account

    def _failed(self, known: _Known, now: float) -> None:
        known.pause_s = min(2 * known.pause_s or _PAUSE_S, _MAX_PAUSE_S)
        known.due = now + known.pause_s


def _add(account: Account, began: RunBegan, entry: Entry) -> None:
    run = account.run
    if run is None or (run.incarnation, run.run) != (began.incarnation, began.run):
        account.add(began)
    account.add(entry)
