"""The runs of a job, from the entries of its journal. Pure. Times are seconds since 1970, durations seconds."""

from collections.abc import Iterable, Sequence

import msgspec

from ckptd.shared.protocol.journal import (
    Durable,
    Ended,
    Entry,
    Lost,
    Missing,
    Problem,
    Protected,
    Restored,
    RunBegan,
    RunEnded,
    Staged,
    Steps,
)
from ckptd.shared.protocol.messages import End

CLOSED = "closed"  # what RunEnded says of a run that ended by itself
TAKEN_OVER = "taken over"


class Save(msgspec.Struct, kw_only=True):
    """A save. Durations but staged_s count from staged; None: it did not come so far, or no record says so."""

    counter: int
    step: int
    at: float  # staged on all ranks, or what it ended by
    nbytes: int = 0
    staged_s: float | None = None  # since its first rank
    stall_s: float = 0.0  # the longest of a rank's
    mean_stall_s: float = 0.0
    late_nbytes: int = 0
    protected_s: float | None = None
    durable_s: float | None = None
    drain_s: float | None = None
    drained_nbytes: int = 0
    tries: int = 0
    end: str = ""  # empty: no record of its end
    reason: str = ""

    @property
    def began(self) -> float:
        """When its first rank was known to have staged it."""
        return self.at - (self.staged_s or 0.0)


class Loss(msgspec.Struct, frozen=True, kw_only=True):
    """A node or ranks that were lost."""

    at: float
    node: str
    what: str
    ranks: int


class Restore(msgspec.Struct, frozen=True, kw_only=True):
    """A load. lost_steps: that were reached before and are not in what was loaded; None: not known."""

    at: float
    incarnation: int
    counter: int
    step: int
    seconds: float
    tiers: dict[str, int]
    nbytes: int
    lost_steps: int | None


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """A problem that was reported, as often as times."""

    at: float
    text: str
    times: int


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """The training had reached a step."""

    at: float
    step: int


class Run(msgspec.Struct, kw_only=True):
    """A run of the job, from its connect to its end."""

    incarnation: int
    run: str  # its id, in hexadecimal
    began: float
    last: float  # the newest record of it
    world_size: int
    nodes: int
    coordinator: str
    scheme: str
    set_size: int
    drain_every: str
    version: str
    incarnations: list[int]  # that this start of the training took: connect takes one, load the next
    ended: float | None = None  # None: no record says so
    how: str = ""
    over: bool = False  # it ended, or another run began after it
    saves: list[Save] = []
    losses: list[Loss] = []
    restores: list[Restore] = []
    steps: list[Mark] = []
    problems: list[Fault] = []
    missing: int = 0  # records that were dropped while the store was away

    @property
    def end(self) -> float:
        """When it ended, as far as is known."""
        return self.last if self.ended is None else self.ended

    @property
    def failed(self) -> bool:
        """Whether it was over without its own doing."""
        return self.over and self.how not in {CLOSED, TAKEN_OVER}

    @property
    def marks(self) -> list[Mark]:
        """Steps that it is known to have reached, in order of time: from saves and from ``client.step``."""
        staged = [Mark(at=save.began, step=save.step) for save in self.saves if save.staged_s is not None]
        return sorted([*staged, *self.steps], key=lambda mark: (mark.at, mark.step))

    @property
    def top(self) -> int:
        """The last step that it is known to have reached; -1: none."""
        return max((mark.step for mark in self.marks), default=-1)


def runs_of(journal: Iterable[Sequence[Entry]]) -> list[Run]:
    """Of the entries of each run, in order of incarnations. Entries without the begin of their run are left out."""
    found: list[Run] = []
    top = -1
    for entries in journal:
        run = _run(entries, top)
        if run is None:
            continue
        if found and _is_connect_of(found[-1], run):
            _joined(found.pop(), run)
        for before in found[-1:]:
            before.over = True
        found.append(run)
        top = max(top, run.top)
    return found


def _is_connect_of(before: Run, run: Run) -> bool:
    """Whether the two are one start: connect takes a number, and the load after it the next one."""
    nothing = not before.saves and not before.steps and not before.losses
    return nothing and not before.how and before.world_size == run.world_size


def _joined(before: Run, run: Run) -> None:
    run.began = min(before.began, run.began)
    run.incarnations = [*before.incarnations, *run.incarnations]
    run.restores = [*before.restores, *run.restores]
    run.problems = [*before.problems, *run.problems]
    run.missing += before.missing


def _run(entries: Sequence[Entry], top: int) -> Run | None:
    first = next((entry for entry in entries if isinstance(entry, RunBegan)), None)
    if first is None:
        return None
    run = Run(
        incarnation=first.incarnation, run=first.run.hex(), began=first.at, last=first.at,
        world_size=first.world_size, nodes=first.nodes, coordinator=first.coordinator, scheme=first.scheme,
        set_size=first.set_size, drain_every=first.drain_every, version=first.version,
        incarnations=[first.incarnation], saves=[], losses=[], restores=[], steps=[], problems=[],
    )  # fmt: skip
    saves: dict[int, Save] = {}
    for entry in entries:
        run.last = max(run.last, entry.at)
        _add(run, saves, entry, top)
    run.saves = sorted(saves.values(), key=lambda save: save.counter)
    return run


def _add(run: Run, saves: dict[int, Save], entry: Entry, top: int) -> None:
    match entry:
        case RunBegan():
            run.coordinator = entry.coordinator  # of a run that another daemon continues
        case RunEnded():
            run.ended, run.how, run.over = entry.at, entry.how, True
        case Lost():
            run.losses.append(Loss(at=entry.at, node=entry.node, what=entry.what, ranks=entry.ranks))
        case Restored():
            run.restores.append(_restore(entry, top))
        case Steps():
            run.steps.append(Mark(at=entry.at, step=entry.step))
        case Problem():
            run.problems.append(Fault(at=entry.at, text=entry.text, times=entry.times))
        case Missing():
            run.missing += entry.records
        case Staged() | Protected() | Durable() | Ended():
            _add_to_save(saves, entry)


def _restore(entry: Restored, top: int) -> Restore:
    newest = max(entry.newest, top)
    return Restore(
        at=entry.at, incarnation=entry.incarnation, counter=entry.counter, step=entry.step, seconds=entry.seconds,
        tiers={str(tier): ranks for tier, ranks in entry.tiers.items()}, nbytes=entry.nbytes,
        lost_steps=None if newest < 0 else max(0, newest - entry.step),
    )  # fmt: skip


def _add_to_save(saves: dict[int, Save], entry: Staged | Protected | Durable | Ended) -> None:
    save = saves.get(entry.counter)
    match entry:
        case Staged():
            saves[entry.counter] = Save(
                counter=entry.counter, step=entry.step, at=entry.at, nbytes=entry.nbytes, staged_s=entry.seconds,
                stall_s=entry.stall_s, mean_stall_s=entry.mean_stall_s, late_nbytes=entry.late_nbytes,
            )  # fmt: skip
        case Protected() if save is not None:
            save.protected_s = entry.seconds
        case Durable() if save is not None:
            save.durable_s, save.drain_s, save.tries = entry.seconds, entry.drain_s, entry.tries
            save.drained_nbytes, save.end = entry.nbytes, End.DURABLE.value
        case Ended():
            ended = save or saves.setdefault(entry.counter, Save(counter=entry.counter, step=entry.step, at=entry.at))
            ended.end, ended.reason = entry.end.value, entry.reason
        case _:
            pass  # the record of its begin is missing or damaged
