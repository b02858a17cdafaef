"""The last state of a job, from its runs and what is committed: what happened last, what would be lost. Pure."""

import math
from collections.abc import Iterable, Sequence
from itertools import groupby

import msgspec

from ckptd.history.runs import Fault, Loss, Run, Save

Order = tuple[int, int]  # of a save: incarnation and counter


class LastRun(msgspec.Struct, frozen=True, kw_only=True):
    """The newest run. ended: None without a record of it; how, over: as of a RunRow; loss, problem: its last ones."""

    incarnation: int
    began: float
    last: float
    ended: float | None
    how: str
    over: bool
    world_size: int
    nodes: int
    coordinator: str
    loss: Loss | None
    problem: Fault | None


class LastSave(msgspec.Struct, frozen=True, kw_only=True):
    """A save that is staged on all ranks, or committed. at: when; None: no record says so."""

    incarnation: int
    counter: int
    step: int
    at: float | None = None
    protected: bool = False


class LastState(msgspec.Struct, frozen=True, kw_only=True):
    """run: None without a journal. unsaved: newer than what is durable, the newest first. newest_step: reached."""

    run: LastRun | None
    durable: LastSave | None
    unsaved: list[LastSave]
    newest_step: int | None


def last_of(runs: Sequence[Run], committed: Iterable[tuple[int, int, int]]) -> LastState:
    """Of a job's runs, the oldest first, and of the (incarnation, counter, step) of what its store has."""
    saves = _kept(runs)
    newest = max(committed, default=None)
    durable = None
    if newest is not None:
        known = saves.get(newest[:2])
        durable = LastSave(
            incarnation=newest[0], counter=newest[1], step=newest[2], at=known.at if known else None,
            protected=known is not None and known.protected_s is not None,
        )  # fmt: skip
    behind: Order = newest[:2] if newest is not None else (-1, -1)
    unsaved = [_staged(order, saves[order]) for order in sorted(saves, reverse=True) if order > behind]
    top = max((run.top for run in runs), default=-1)
    return LastState(
        run=_last_run(runs[-1]) if runs else None,
        durable=durable,
        unsaved=unsaved,
        newest_step=top if top >= 0 else None,
    )


def _kept(runs: Sequence[Run]) -> dict[Order, Save]:
    """Staged saves. A load gave up what is newer than what it loaded, and of an earlier run: so the last run first."""
    found: dict[Order, Save] = {}
    loaded: tuple[float, float] = (math.inf, 0)  # the oldest, by all later runs
    for number, same in groupby(sorted(runs, key=_number, reverse=True), key=_number):
        these = list(same)
        staged = (((number, save.counter), save) for run in these for save in run.saves if save.staged_s is not None)
        found.update((order, save) for order, save in staged if order <= loaded)
        loaded = min([loaded, *((one.incarnation, one.counter) for run in these for one in run.restores)])
    return found


def _number(run: Run) -> int:
    return run.incarnation


def _staged(order: Order, save: Save) -> LastSave:
    protected = save.protected_s is not None
    return LastSave(incarnation=order[0], counter=order[1], step=save.step, at=save.at, protected=protected)


def _last_run(run: Run) -> LastRun:
    return LastRun(
        incarnation=run.incarnation, began=run.began, last=run.last, ended=run.ended, how=run.how, over=run.over,
        world_size=run.world_size, nodes=run.nodes, coordinator=run.coordinator,
        loss=run.losses[-1] if run.losses else None, problem=run.problems[-1] if run.problems else None,
    )  # fmt: skip
