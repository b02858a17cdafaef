"""How often a job should save and drain, from what its journal has measured. Pure."""

import itertools
import math
from collections.abc import Sequence
from typing import Final

import msgspec

from ckptd.history import goodput, intervals
from ckptd.history.goodput import Kind, Span
from ckptd.history.intervals import Choice, Costs
from ckptd.history.runs import Run
from ckptd.history.spread import percentile
from ckptd.shared.protocol.messages import Tier

_ROUGH: Final = 4  # failures; of fewer the mean is hardly known


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """Intervals for a job. Shares are of the wall time, in the long run."""

    costs: Costs
    stage_s: float  # after the stall, until it is staged on all ranks
    protect_s: float | None  # after that; None: no redundancy, or none was measured
    mtbf_s: float  # of running: what a restart takes is not in it
    mtbf_from: str  # "given", "journal", "none": no failure so far, the time that was seen without one
    failures: int
    observed_s: float  # of running: the wall time without starts and restores
    restores: int
    restores_from_store: int
    young_s: float  # training between saves by the closed forms
    daly_s: float
    availability_s: float
    best: Choice
    drain_every: int  # steps, for connect(drain_every=...)
    now: Choice | None  # as the last run saved, with its drain_every; None: it had no two saves
    choices: list[Choice]
    notes: list[str]


def advise(runs: Sequence[Run], found: Sequence[Span], mtbf_s: float | None = None) -> Advice | str:
    """Of a job's runs and the spans of its time; mtbf_s: as the user knows it. A text says what the journal lacks."""
    staged = [save for run in runs for save in run.saves if save.staged_s is not None]
    step_s = goodput.step_s(runs[-1:]) or goodput.step_s(runs)
    if not staged or step_s is None:
        return "it needs two saves of one run at different steps, staged on all ranks"
    drains = [save.drain_s for save in staged if save.drain_s is not None]
    if not drains:
        return "no save of the job was drained yet"
    stage_s = percentile([save.staged_s or 0.0 for save in staged], 0.5)
    protected = [save.protected_s for save in staged if save.protected_s is not None]
    protect_s = percentile(protected, 0.5) if protected and runs[-1].scheme != "none" else None
    restores = [one for run in runs for one in run.restores]
    stored = sum(Tier.PFS in one.tiers for one in restores)
    costs = Costs(
        step_s=step_s, stall_s=percentile([save.stall_s for save in staged], 0.5),
        usable_s=stage_s + (protect_s or 0.0), drain_s=percentile(drains, 0.5), restart_s=_restart_s(runs, found),
        store_share=(stored + 0.5) / (len(restores) + 1),
    )  # fmt: skip
    spent = goodput.added({}, found)
    observed_s = sum(spent.values()) - spent[Kind.START] - spent[Kind.RESTORE]  # which _restart_s counts
    failures = sum(run.failed for run in runs)
    used_s = mtbf_s or max(observed_s / max(1, failures), step_s)
    best = intervals.best(costs, used_s)
    now = _now(runs[-1], costs, used_s)
    return Advice(
        costs=costs, stage_s=stage_s, protect_s=protect_s, mtbf_s=used_s,
        mtbf_from="given" if mtbf_s else "journal" if failures else "none", failures=failures, observed_s=observed_s,
        restores=len(restores), restores_from_store=stored, young_s=intervals.young_s(costs.stall_s, used_s),
        daly_s=intervals.daly_s(costs.stall_s, used_s),
        availability_s=intervals.available_s(costs.stall_s, used_s, costs.restart_s), best=best,
        drain_every=1 if best.drain_saves == 1 else best.drain_saves * best.steps, now=now,
        choices=intervals.table(costs, used_s, *([now] if now else [])),
        notes=_notes(best, costs, failures, len(restores), given=mtbf_s is not None),
    )  # fmt: skip


def _restart_s(runs: Sequence[Run], found: Sequence[Span]) -> float:
    """On average from the end of a run to the first step of the next, where the run had failed; else of all runs."""
    failed = sum(run.failed for run in runs[:-1])
    starts = {place for place, run in enumerate(runs) if place and runs[place - 1].failed} or set(range(len(runs)))
    seconds = 0.0
    for span in found:
        ended = runs[span.run].end  # what follows it belongs to the start of the next run
        after = span.kind is Kind.START and span.start >= ended
        if span.kind in {Kind.START, Kind.RESTORE} and span.run + after in starts:
            seconds += span.stop - span.start
    return seconds / max(1, failed or len(runs))


def _now(run: Run, costs: Costs, mtbf_s: float) -> Choice | None:
    """As the run saves and drains."""
    reached = sorted({save.step for save in run.saves if save.staged_s is not None})
    between = [high - low for low, high in itertools.pairwise(reached)]
    if not between:
        return None
    steps = int(percentile(between, 0.5))
    period_s = steps * costs.step_s + costs.stall_s
    return intervals.choice(costs, mtbf_s, steps, _drain_saves(run.drain_every, steps, period_s, costs))


def _drain_saves(drain_every: str, steps: int, period_s: float, costs: Costs) -> int:
    """Saves from one drain to the next, by the setting as the user gave it; a drain waits for the one before it."""
    if drain_every == "auto":
        return intervals.drain_saves(costs, period_s)
    try:
        wanted = float(drain_every.removesuffix("s"))
    except ValueError:
        wanted = 0.0  # an older journal has none
    each = wanted / (period_s if drain_every.endswith("s") else steps) if 0 < wanted < math.inf else 1.0
    return max(1, math.ceil(max(each, costs.drain_s / period_s) - 1e-9))


def _notes(best: Choice, costs: Costs, failures: int, restores: int, *, given: bool) -> list[str]:
    notes: list[str] = []
    if not given and not failures:
        what = "the mean time between failures is not known, and what was seen without one is taken"
        notes.append(f"no failure so far: {what}; --mtbf gives it")
    elif not given and failures < _ROUGH:
        notes.append(f"the mean of {failures} failure(s) is a rough one; --mtbf gives it")
    if not restores:
        notes.append("no restore so far: every second failure is taken to need the store")
    if best.steps == intervals.least_steps(costs):
        notes.append("more often is of no use: a save would begin before the one before it can be restored")
    return notes
