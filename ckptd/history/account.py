"""What a job's runs have come to so far, as its records come: counts, and where its time went. Pure.

Its size does not grow: what is far back is added up. A daemon continues the account that all records before give, so a
restart of it changes no figure, and the figures are those of ``runs_of`` and ``spans``.
"""

import itertools
from collections.abc import Iterable
from typing import Final

import msgspec

from ckptd.history.distribution import DRAIN_RATE, STALL, Distributions
from ckptd.history.goodput import CHUNK, Course, Kind, Span, added, first_chunk, goodput_of, of_run
from ckptd.history.runs import runs_of
from ckptd.history.spread import percentile
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

_OPEN_SAVES: Final = 128  # of which is known how they ended last
_MOST_ENTRIES: Final = 8 * CHUNK


class _Save(msgspec.Struct):
    """staged_s: since its first rank's training went on, until it was staged. end: the last one that it came to."""

    staged_s: float = 0.0
    end: str = ""


class Account(msgspec.Struct, kw_only=True, tag="account"):
    """Of one job. ``add`` each of its records, in order."""

    records: int = 0  # but those of begins: each segment has one
    ends: dict[str, int] = {}  # saves by the last end that each came to
    losses: dict[str, int] = {}
    closed: int = 0  # runs whose time is divided for good
    staged_nbytes: int = 0
    drained_nbytes: int = 0
    lost_steps: int = 0
    missing: int = 0
    histograms: Distributions = msgspec.field(default_factory=Distributions)
    spent: dict[Kind, float] = {}  # of time that is divided for good
    failures: int = 0  # of those runs
    course: Course = msgspec.field(default_factory=Course)
    open: list[Entry] = []  # of the time that is not
    at: float = 0.0  # of the newest record of the newest run
    run: RunBegan | None = None  # whose records come
    old: bool = False  # they are of a run before the newest
    last_saves: dict[str, _Save] = {}  # by incarnation and counter, the newest last

    def add(self, entry: Entry) -> None:
        """The next record."""
        self.records += not isinstance(entry, RunBegan)
        match entry:
            case RunBegan():
                self._begin(entry)
            case Staged():
                self._staged(entry)
            case Protected():
                self._milestone(Milestone.PROTECTED, self._save(0, entry.counter), entry.seconds)
            case Durable():
                self._durable(entry)
            case Ended():
                self._ended(self._save(entry.incarnation, entry.counter), entry.end)
            case Lost():
                self.losses[entry.what] = self.losses.get(entry.what, 0) + 1
            case Restored():
                self._restored(entry)
            case Missing():
                self.missing += entry.records
            case _:
                pass
        self.at = entry.at if not self.old else self.at
        if isinstance(entry, RunEnded | Staged | Steps | Restored | Lost) and not self.old and self.open:
            self._follow(entry)

    # --- counts

    def _save(self, incarnation: int, counter: int) -> _Save:
        """incarnation: 0: of the run whose records come."""
        number = incarnation or (self.run.incarnation if self.run is not None else 0)
        save = self.last_saves.setdefault(f"{number}.{counter}", _Save())
        while len(self.last_saves) > _OPEN_SAVES:
            del self.last_saves[next(iter(self.last_saves))]
        return save

    def _milestone(self, milestone: Milestone, save: _Save, seconds: float) -> None:
        self.histograms.saves[milestone].add(save.staged_s + seconds)

    def _staged(self, entry: Staged) -> None:
        save = self._save(0, entry.counter)
        save.staged_s = entry.seconds
        self._milestone(Milestone.STAGED, save, 0.0)
        self.histograms.saves[STALL].add(entry.stall_s)
        self.staged_nbytes += entry.nbytes

    def _durable(self, entry: Durable) -> None:
        save = self._save(entry.incarnation, entry.counter)
        self._milestone(Milestone.DURABLE, save, entry.seconds)
        if entry.drain_s > 0:
            self.histograms.saves[DRAIN_RATE].add(entry.nbytes / entry.drain_s)
        self.drained_nbytes += entry.nbytes
        self._ended(save, End.DURABLE)

    def _ended(self, save: _Save, end: End) -> None:
        """It may have ended before: one that was kept, or failed, may become durable."""
        if save.end == End.DURABLE:
            return
        if save.end:
            self.ends[save.end] -= 1
        save.end = str(end)
        self.ends[save.end] = self.ends.get(save.end, 0) + 1

    def _restored(self, entry: Restored) -> None:
        usual = max(entry.tiers, key=lambda tier: entry.tiers[tier], default=None)
        if usual is not None:
            self.histograms.loads[usual].add(entry.seconds)
        self.lost_steps += max(
            0, max(entry.newest, self.course.reached, *(run.top for run in runs_of(self.open))) - entry.step
        )

    # --- the time

    def _begin(self, began: RunBegan) -> None:
        name = (began.incarnation, began.run)
        known = {(one.incarnation, one.run) for one in self.open if isinstance(one, RunBegan)}
        newest = max((number for number, _ in known), default=0)
        self.run, self.old = began, name not in known and began.incarnation < newest
        if name in known or self.old:
            return
        self.open.append(began)
        runs = runs_of(self.open)
        for run, following in itertools.pairwise(runs):  # the last one may turn out to be the begin of the next
            run.last = max(run.last, self.at)
            self._spend(of_run(run, following.began, self.course))
            self.closed += 1
            self.failures += run.failed
        first = runs[-1].incarnations[0]
        begins = [isinstance(one, RunBegan) and one.incarnation == first for one in self.open]
        del self.open[: begins.index(True)]

    def _spend(self, found: Iterable[Span]) -> None:
        self.spent = added(self.spent, found)

    def _follow(self, entry: Entry) -> None:
        if isinstance(entry, Lost) and isinstance(self.open[-1], Lost):
            return  # one shows that something happened
        self.open.append(entry)
        if sum(isinstance(one, Staged | Steps) for one in self.open) < CHUNK + CHUNK // 2:
            return
        if found := first_chunk(runs_of(self.open)[-1], self.course):
            self._spend(found)
            until = found[-1].stop
            self.open = [one for one in self.open if not isinstance(one, Staged | Steps) or _mark(one) > until]
        elif len(self.open) > _MOST_ENTRIES:  # of steps that do not rise
            del self.open[next(i for i, one in enumerate(self.open) if isinstance(one, Staged | Steps))]

    def goodput(self, now: float) -> Goodput | None:
        """now: seconds since 1970, until which a run counts that is not over. None: there is no run."""
        runs = runs_of(self.open)
        if not runs:
            return None
        last, course = runs[-1], msgspec.structs.replace(self.course)
        last.last = max(last.last, self.at, 0.0 if last.over else now)
        sums = added(self.spent, of_run(last, last.end, course))
        known = [
            *(self.course.known if self.course.own and course.known is not self.course.known else ()),
            *course.known,
        ]
        usual = percentile(known, 0.5) if known else None
        return goodput_of(sums, self.failures + last.failed, usual)

    def totals(self) -> TotalsStatus:
        """The counts."""
        return TotalsStatus(
            runs=self.closed + len(runs_of(self.open)), staged_nbytes=self.staged_nbytes,
            drained_nbytes=self.drained_nbytes, losses=dict(self.losses), lost_steps=self.lost_steps,
            missing=self.missing,
        )  # fmt: skip


def _mark(entry: Staged | Steps) -> float:
    return entry.at - entry.seconds if isinstance(entry, Staged) else entry.at


def account_of(entries: Iterable[Entry]) -> Account:
    """Of a journal."""
    account = Account()
    for entry in entries:
        account.add(entry)
    return account
