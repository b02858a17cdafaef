"""The runs of a job, from the entries of its journal. Pure. Times are seconds since 1970, durations seconds."""

from collections.abc import Iterable, Sequence

import msgspec
from msgspec import structs

from ckptd.shared.protocol.journal import (
    Damaged,
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
LOADED = "loaded"  # a load began the next run


class Save(msgspec.Struct, kw_only=True):
    """A save. Durations but staged_s count from staged; None: it did not come so far, or no record says so."""

    counter: int
    step: int
    at: float  # staged on all ranks, or what it ended by
    nbytes: int = 0
    staged_s: float | None = None  # since the training of its first rank went on
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
        """When the training of its first rank went on."""
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


class Damage(msgspec.Struct, frozen=True, kw_only=True):
    """What a scrub found damaged. mended: from where it was made good; empty: it is not."""

    at: float
    node: str
    tier: str
    step: int
    rank: int | None
    what: str
    mended: str


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """A problem that was reported, as often as times."""

    at: float
    text: str
    times: int


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """The training had reached a step."""

    at: float
    step: int


class Life(msgspec.Struct, kw_only=True):
    """From when to when a run lasted."""

    began: float
    last: float  # the newest record of it
    ended: float | None = None  # None: no record says so
    how: str = ""
    over: bool = False  # it ended, or another run began after it

    @property
    def end(self) -> float:
        """When it ended, as far as is known."""
        return self.last if self.ended is None else self.ended

    @property
    def failed(self) -> bool:
        """Whether it was over without its own doing."""
        return self.over and self.how not in {CLOSED, TAKEN_OVER, LOADED}

    def ends(self, entry: RunEnded) -> None:
        """Its record says so."""
        self.ended, self.how, self.over = entry.at, entry.how, True

    def goes_on(self) -> None:
        """Its ranks were away, and came back."""
        self.ended, self.how, self.over = None, "", False


class Run(Life, kw_only=True):
    """A run of the job, from its connect to its end."""

    incarnation: int
    run: str  # its id, in hexadecimal
    world_size: int
    nodes: int
    coordinator: str
    scheme: str
    set_size: int
    drain_every: str
    version: str
    incarnations: list[int]  # that this start of the training took: connect takes one, load the next
    loads: int = 0  # restores before its first mark: the last of them is where it begins
    reached: int = -1  # the last step known to have been done before it
    top: int = -1  # the last step that it is known to have reached; -1: none
    saves: list[Save] = []
    losses: list[Loss] = []
    restores: list[Restore] = []
    steps: list[Mark] = []
    problems: list[Fault] = []
    damages: list[Damage] = []
    missing: int = 0  # records that were dropped while the store was away

    @property
    def marks(self) -> list[Mark]:
        """Steps that it is known to have reached, in order of time: from saves and from ``client.step``."""
        staged = [Mark(at=save.began, step=save.step) for save in self.saves if save.staged_s is not None]
        return sorted([*staged, *self.steps], key=lambda mark: (mark.at, mark.step))


def runs_of(entries: Iterable[Entry]) -> list[Run]:
    """The runs that a journal's entries tell of, the oldest first. Entries before the first begin are left out."""
    found: dict[tuple[int, bytes], Run] = {}
    saves: dict[tuple[int, int], Save] = {}  # by incarnation and counter
    run: Run | None = None
    for entry in entries:
        if isinstance(entry, RunBegan):
            name = (entry.incarnation, entry.run)
            run = found[name] = found.get(name) or _begun(entry)
            run.coordinator = entry.coordinator  # another daemon may continue a run
        if run is not None:
            run.last = max(run.last, entry.at)
            _add(run, saves, entry)
    newest = {run.incarnation: run for run in found.values()}
    for (number, _), save in sorted(saves.items()):
        newest[number].saves.append(save)
    return _with_lost_steps(_joined(list(found.values())))


def _begun(entry: RunBegan) -> Run:
    return Run(
        incarnation=entry.incarnation, run=entry.run.hex(), began=entry.at, last=entry.at,
        world_size=entry.world_size, nodes=entry.nodes, coordinator=entry.coordinator, scheme=entry.scheme,
        set_size=entry.set_size, drain_every=entry.drain_every, version=entry.version,
        incarnations=[entry.incarnation], saves=[], losses=[], restores=[], steps=[], problems=[], damages=[],
    )  # fmt: skip


def _joined(runs: Sequence[Run]) -> list[Run]:
    """Connect takes a number, and the load after it the next one: they are one start of the training."""
    found: list[Run] = []
    for run in runs:
        before = found[-1] if found else None
        if before is not None:
            before.over = True
            nothing = not before.saves and not before.steps and not before.losses
            if nothing and before.how in {"", LOADED} and before.world_size == run.world_size:
                found.pop()
                run.began = min(before.began, run.began)
                run.loads += len(before.restores)
                run.missing += before.missing
                for name in ("incarnations", "restores", "problems", "damages"):  # in place: many may follow each other
                    first = getattr(before, name)
                    first += getattr(run, name)
                    setattr(run, name, first)
        found.append(run)
    return found


def _with_lost_steps(runs: list[Run]) -> list[Run]:
    """How far the runs before had come is known where a load recorded it, or they did."""
    reached = -1
    for run in runs:
        run.reached = reached
        for place, one in enumerate(run.restores):
            newest = reached if one.lost_steps is None else max(reached, one.step + one.lost_steps)
            lost = None if newest < 0 else max(0, newest - one.step)
            run.restores[place] = structs.replace(one, lost_steps=lost)
            reached = max(newest, one.step)
            run.reached = reached if place < run.loads else run.reached
        reached = max(reached, run.top)
    return runs


def _add(run: Run, saves: dict[tuple[int, int], Save], entry: Entry) -> None:
    if isinstance(entry, Staged | Steps | Restored):
        run.goes_on()
    if isinstance(entry, Staged | Steps):
        run.top = max(run.top, entry.step)
    match entry:
        case RunEnded():
            run.ends(entry)
        case Lost() | Restored() | Steps() | Damaged() | Problem():
            _add_event(run, entry)
        case Missing():
            run.missing += entry.records
        case Staged() | Protected():
            _add_to_save(saves, (run.incarnation, entry.counter), entry)
        case Durable() | Ended():
            _add_to_save(saves, (entry.incarnation or run.incarnation, entry.counter), entry)


def _add_event(run: Run, entry: Lost | Restored | Steps | Damaged | Problem) -> None:
    match entry:
        case Lost():
            run.losses.append(Loss(at=entry.at, node=entry.node, what=entry.what, ranks=entry.ranks))
        case Restored():
            run.restores.append(_restore(entry))
            run.loads += run.top < 0
        case Steps():
            run.steps.append(Mark(at=entry.at, step=entry.step))
        case Damaged():
            run.damages.append(_damage(entry))
        case Problem():
            run.problems.append(Fault(at=entry.at, text=entry.text, times=entry.times))


def _damage(entry: Damaged) -> Damage:
    return Damage(
        at=entry.at, node=entry.node, tier=str(entry.tier), step=entry.step,
        rank=entry.rank if entry.rank >= 0 else None, what=entry.what, mended=entry.mended,
    )  # fmt: skip


def _restore(entry: Restored) -> Restore:
    return Restore(
        at=entry.at, incarnation=entry.incarnation, counter=entry.counter, step=entry.step, seconds=entry.seconds,
        tiers={str(tier): ranks for tier, ranks in entry.tiers.items()}, nbytes=entry.nbytes,
        lost_steps=None if entry.newest < 0 else max(0, entry.newest - entry.step),
    )  # fmt: skip


def _add_to_save(
    saves: dict[tuple[int, int], Save], name: tuple[int, int], entry: Staged | Protected | Durable | Ended
) -> None:
    save = saves.get(name)
    match entry:
        case Staged() if save is None or save.staged_s is None:  # else another daemon has found it again
            saves[name] = Save(
                counter=entry.counter, step=entry.step, at=entry.at, nbytes=entry.nbytes, staged_s=entry.seconds,
                stall_s=entry.stall_s, mean_stall_s=entry.mean_stall_s, late_nbytes=entry.late_nbytes,
                end=save.end if save is not None else "", reason=save.reason if save is not None else "",
            )  # fmt: skip
        case Protected() if save is not None and save.protected_s is None:
            save.protected_s = since_staged(entry, save.at)
        case Durable() if save is not None and save.durable_s is None:
            save.durable_s = since_staged(entry, save.at)
            save.drain_s, save.tries = entry.drain_s or None, entry.tries
            save.drained_nbytes, save.end = entry.nbytes, End.DURABLE.value
        case Ended() if save is None and not entry.incarnation:
            saves[name] = Save(counter=entry.counter, step=entry.step, at=entry.at, end=entry.end.value)
            saves[name].reason = entry.reason
        case Ended() if save is not None and save.durable_s is None:
            save.end, save.reason = entry.end.value, entry.reason
        case _:
            pass  # the record of its begin is missing, damaged, or of a journal that made room


def since_staged(entry: Protected | Durable, at: float) -> float:
    """Seconds since it was staged, or what it ended by, at that time."""
    return entry.seconds or max(0.0, entry.at - at)  # 0: another daemon saw it staged
