"""What a job's runs have come to so far, as its records come: counts, and where its time went. Pure.

Its size does not grow, nor does what a record costs: what is far back is added up. A daemon continues the account that
all records before give, so a restart of it changes no figure, and the figures are those of ``runs_of`` and ``spans``.
"""

from collections.abc import Iterable
from copy import deepcopy
from typing import Final

import msgspec

from ckptd.history.distribution import DRAIN_RATE, STALL, Distributions
from ckptd.history.goodput import Course, Kind, Span, added, first_chunk, goodput_of, of_run
from ckptd.history.runs import LOADED, since_staged
from ckptd.history.spread import percentile
from ckptd.history.times import Times
from ckptd.shared.protocol.journal import (
    Durable,
    Ended,
    Entry,
    Lost,
    Missing,
    Protected,
    Restored,
    RunBegan,
    RunEnded,
    Staged,
    Steps,
)
from ckptd.shared.protocol.messages import End, Milestone
from ckptd.shared.protocol.status import Goodput, TotalsStatus

_OPEN_SAVES: Final = 128  # of which is known how far they came


class _Save(msgspec.Struct):
    """at: as history has it. staged_s: since its first rank's training went on, until it was staged. end: the last."""

    at: float
    staged_s: float | None = None
    protected: bool = False
    end: str = ""


class _Present(Times, kw_only=True):
    """The newest run. empty: it has neither saves nor steps nor losses: the next one may be the same start."""

    record: RunBegan
    empty: bool = True


class Account(msgspec.Struct, kw_only=True):
    """Of one job. ``add`` each of its records, in order."""

    records: int = 0  # but those of begins: each segment has one
    ends: dict[str, int] = {}  # saves by the last end that each came to
    losses: dict[str, int] = {}
    closed: int = 0  # runs whose time is divided for good
    failures: int = 0  # of those
    staged_nbytes: int = 0
    drained_nbytes: int = 0
    lost_steps: int = 0
    missing: int = 0
    histograms: Distributions = msgspec.field(default_factory=Distributions)
    spent: dict[Kind, float] = {}  # of time that is divided for good
    course: Course = msgspec.field(default_factory=Course)
    reached: int = -1  # the last step known to have been done before the newest run, or a load of it
    present: _Present | None = None
    run: RunBegan | None = None  # whose records come
    old: bool = False  # they are of a run before the newest
    last_saves: dict[str, _Save] = {}  # by incarnation and counter, the newest last

    def add(self, entry: Entry) -> None:
        """The next record."""
        self.records += not isinstance(entry, RunBegan)
        if isinstance(entry, RunBegan):
            self._begin(entry)
        present = self.present if not self.old else None
        if present is not None:
            self._timed(present, entry)
        match entry:
            case Staged() | Protected() | Durable() | Ended() if self.run is not None:
                self._save(entry, self.run, present)
            case Lost():
                self.losses[entry.what] = self.losses.get(entry.what, 0) + 1
            case Restored():
                self._restored(entry, present)
            case Missing():
                self.missing += entry.records
            case _:
                pass

    def _timed(self, present: _Present, entry: Entry) -> None:
        present.last = max(present.last, entry.at)
        if isinstance(entry, Staged | Steps | Restored):
            present.goes_on()
        match entry:
            case Lost():
                present.empty = False
            case Steps():
                self._mark(present, entry.at, entry.step)
            case RunEnded():
                present.ends(entry)
            case _:
                pass

    # --- saves: each milestone counts once, also when another daemon finds the save and says it again

    def _save(self, entry: Staged | Protected | Durable | Ended, run: RunBegan, present: _Present | None) -> None:
        number = (entry.incarnation if isinstance(entry, Durable | Ended) else 0) or run.incarnation
        name = f"{number}.{entry.counter}"
        save = self.last_saves.get(name)
        match entry:
            case Staged() if save is None or save.staged_s is None:
                save = self.last_saves[name] = _Save(entry.at, entry.seconds, end=save.end if save is not None else "")
                self._staged(entry, present)
            case Protected() if save is not None and not save.protected:
                save.protected = True
                self._milestone(Milestone.PROTECTED, save, since_staged(entry, save.at))
            case Durable() if save is not None and save.end != End.DURABLE:
                self._durable(save, entry)
            case Ended() if save is None and not entry.incarnation:
                save = self.last_saves[name] = _Save(entry.at)
                self._ended(save, entry.end)
                if present is not None:
                    present.empty = False
            case Ended() if save is not None and save.end != End.DURABLE:
                self._ended(save, entry.end)
            case _:
                pass  # it is known, or the record of its begin is missing
        if len(self.last_saves) > _OPEN_SAVES:
            del self.last_saves[next(iter(self.last_saves))]

    def _milestone(self, milestone: Milestone, save: _Save, seconds: float) -> None:
        self.histograms.saves[milestone].add((save.staged_s or 0.0) + seconds)

    def _staged(self, entry: Staged, present: _Present | None) -> None:
        self.histograms.saves[Milestone.STAGED].add(entry.seconds)
        self.histograms.saves[STALL].add(entry.stall_s)
        self.staged_nbytes += entry.nbytes
        if present is not None:
            present.stall(entry.at - entry.seconds, entry.stall_s)
            self._mark(present, entry.at - entry.seconds, entry.step)

    def _durable(self, save: _Save, entry: Durable) -> None:
        self._milestone(Milestone.DURABLE, save, since_staged(entry, save.at))
        if entry.drain_s > 0:
            self.histograms.saves[DRAIN_RATE].add(entry.nbytes / entry.drain_s)
        self.drained_nbytes += entry.nbytes
        self._ended(save, End.DURABLE)

    def _ended(self, save: _Save, end: End) -> None:
        """It may have ended before: one that was kept, or failed, may become durable."""
        if save.end:
            self.ends[save.end] -= 1
        save.end = str(end)
        self.ends[save.end] = self.ends.get(save.end, 0) + 1

    # --- the time

    def _begin(self, began: RunBegan) -> None:
        self.run, before = began, self.present
        known = before.record if before is not None else None
        same = known is not None and (known.incarnation, known.run) == (began.incarnation, began.run)
        self.old = known is not None and not same and began.incarnation <= known.incarnation
        if same or self.old:
            return
        self.present = present = _Present(
            record=began, began=began.at, last=began.at, at=began.at, reached=self.reached,
            marks=[], stalls=[], restores=[],
        )  # fmt: skip
        if before is None:
            return
        if before.empty and before.how in {"", LOADED} and before.record.world_size == began.world_size:
            present.began = present.at = min(before.began, began.at)
            present.step, present.reached, present.restores = before.step, before.reached, before.restores
            return
        before.over = True
        self._spend(of_run(before, began.at, self.course))
        self.closed += 1
        self.failures += before.failed
        self.reached = present.reached = max(self.reached, before.top)

    def _spend(self, found: Iterable[Span]) -> None:
        self.spent = added(self.spent, found)

    def _restored(self, entry: Restored, present: _Present | None) -> None:
        usual = max(entry.tiers, key=lambda tier: entry.tiers[tier], default=None)
        if usual is not None:
            self.histograms.loads[usual].add(entry.seconds)
        newest = max(self.reached, entry.newest)
        self.lost_steps += max(0, newest - entry.step) if newest >= 0 else 0
        self.reached = max(newest, entry.step)
        if present is None:
            return
        present.restore(entry.at, entry.seconds)
        if present.top < 0:
            present.step, present.reached = entry.step, self.reached

    def _mark(self, present: _Present, at: float, step: int) -> None:
        present.mark(at, step)
        present.empty = False
        self._spend(first_chunk(present, self.course))

    def goodput(self, now: float) -> Goodput | None:
        """now: seconds since 1970, until which a run counts that is not over. None: there is no run."""
        if self.present is None:
            return None
        last, course = deepcopy(self.present), msgspec.structs.replace(self.course)
        last.last = max(last.last, 0.0 if last.over else now)
        sums = added(self.spent, of_run(last, last.end, course))
        known = [
            *(self.course.known if self.course.own and course.known is not self.course.known else ()),
            *course.known,
        ]
        usual = percentile(known, 0.5) if known else None
        return goodput_of(sums, self.failures + last.failed, usual)

    def totals(self) -> TotalsStatus:
        """The counts. None of them falls."""
        return TotalsStatus(
            runs=self.closed + (self.present is not None), failed_runs=self.failures, staged_nbytes=self.staged_nbytes,
            drained_nbytes=self.drained_nbytes, losses=dict(self.losses), lost_steps=self.lost_steps,
            missing=self.missing,
        )  # fmt: skip


def account_of(entries: Iterable[Entry]) -> Account:
    """Of a journal."""
    account = Account()
    for entry in entries:
        account.add(entry)
    return account
