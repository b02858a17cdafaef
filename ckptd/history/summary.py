"""A row of figures for each run of a job, and figures of all: what ``ckptd history --json`` prints. Pure."""

from collections import Counter
from collections.abc import Sequence

import msgspec

from ckptd.history.goodput import Span, totals
from ckptd.history.runs import Damage, Fault, Loss, Restore, Run, Save
from ckptd.history.spread import Spread, spread
from ckptd.shared.protocol.status import Goodput


class RunRow(msgspec.Struct, frozen=True, kw_only=True):
    """A run in figures. None: there is no such figure."""

    incarnation: int
    incarnations: list[int]
    run: str
    began: float
    ended: float | None
    last: float
    how: str
    over: bool
    world_size: int
    nodes: int
    coordinator: str
    scheme: str
    set_size: int
    drain_every: str
    version: str
    saves_by_end: dict[str, int]
    newest_step: int | None
    newest_staged_step: int | None
    newest_protected_step: int | None
    newest_durable_step: int | None
    stall: Spread | None
    to_protected: Spread | None
    to_durable: Spread | None
    drain: Spread | None
    staged_nbytes: int
    drained_nbytes: int
    store_bytes_per_s: float | None
    goodput: Goodput
    losses: list[Loss]
    restores: list[Restore]
    problems: list[Fault]
    damages: list[Damage]
    missing: int
    saves: list[Save]


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Of a job. goodput: of the runs that are listed. damaged: parts of the journal that cannot be read."""

    schema: int
    job: str
    store: str
    damaged: int
    goodput: Goodput
    stall: Spread | None
    to_durable: Spread | None
    staged_nbytes: int
    drained_nbytes: int
    store_bytes_per_s: float | None
    runs: list[RunRow]


def rows(runs: Sequence[Run], found: Sequence[Span], *, saves: bool = False) -> list[RunRow]:
    """Of all runs of a job and the spans of their time."""
    of: dict[int, list[Span]] = {}
    for span in found:
        of.setdefault(span.run, []).append(span)
    return [row(run, of.get(place, []), saves=saves) for place, run in enumerate(runs)]


def store_bytes_per_s(saves: Sequence[Save]) -> float | None:
    """Of the drains of saves that became durable, while they ran."""
    took_s = sum(save.drain_s or 0.0 for save in saves)
    return sum(save.drained_nbytes for save in saves) / took_s if took_s else None


def row(run: Run, found: Sequence[Span] = (), *, saves: bool = False) -> RunRow:
    """The figures of a run and of the spans of its time; saves: with a list of them."""
    staged = [save for save in run.saves if save.staged_s is not None]
    same = {name: getattr(run, name) for name in RunRow.__struct_fields__ if name in Run.__struct_fields__}
    return RunRow(
        **same | {"saves": run.saves if saves else []},
        saves_by_end=dict(sorted(Counter(save.end or "open" for save in run.saves).items())),
        newest_step=run.top if run.top >= 0 else None,
        newest_staged_step=_newest(staged),
        newest_protected_step=_newest([save for save in staged if save.protected_s is not None]),
        newest_durable_step=_newest([save for save in staged if save.durable_s is not None]),
        stall=spread(save.stall_s for save in staged),
        to_protected=spread(save.protected_s for save in staged),
        to_durable=spread(save.durable_s for save in staged),
        drain=spread(save.drain_s for save in staged),
        staged_nbytes=sum(save.nbytes for save in staged),
        drained_nbytes=sum(save.drained_nbytes for save in staged),
        store_bytes_per_s=store_bytes_per_s(staged),
        goodput=totals(found, [run]),
    )


def _newest(saves: Sequence[Save]) -> int | None:
    return max(saves, key=lambda save: save.counter).step if saves else None
