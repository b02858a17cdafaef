"""How often to save: intervals between checkpoints that cost the least, and what each costs. Pure.

All durations are seconds. A period is one interval of training and the stall of the save that ends it. Failures come at
random (exponential), mtbf_s apart on average. Sources: docs/history.md.
"""

import math
from typing import Final

import msgspec

ROOM: Final = 1.25  # between two drains, for one that takes a little longer than usual
AUTO_MOST_S: Final = 3600.0  # between two saves that connect(drain_every="auto") finds due
_FEW: Final = 8  # choices that are compared one by one
_NEVER: Final = 500  # times the mean time between failures: no period so long ends


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """What a job's saves and failures cost.

    step_s: of training. stall_s: training waits, each save. usable_s: from the save until a restart from memory can
    have it. drain_s: the store is busy, each drain. restart_s: from a failure to the first step, without steps that are
    repeated. store_share: of the failures, those from which only the store helps.
    """

    step_s: float
    stall_s: float
    usable_s: float
    drain_s: float
    restart_s: float
    store_share: float


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """Save every so many steps, drain each so manieth: shares of the wall time that are lost in the long run."""

    steps: int
    seconds: float
    drain_saves: int
    drain_seconds: float
    stalls: float
    repeated: float
    restarts: float
    checkpoints: float  # stalls and repeated steps: what the choice decides
    ettr: float


def young_s(stall_s: float, mtbf_s: float) -> float:
    """Training between two saves: the first order, Young 1974."""
    return math.sqrt(2 * stall_s * mtbf_s)


def daly_s(stall_s: float, mtbf_s: float) -> float:
    """Training between two saves: the higher order, Daly 2006."""
    if stall_s >= 2 * mtbf_s:
        return mtbf_s
    part = stall_s / (2 * mtbf_s)
    return young_s(stall_s, mtbf_s) * (1 + math.sqrt(part) / 3 + part / 9) - stall_s


def available_s(stall_s: float, mtbf_s: float, restart_s: float) -> float:
    """Training between two saves: the most availability, Saxena et al. 2024. Their interval has the stall in it."""
    return math.sqrt(2 * (mtbf_s + restart_s) * stall_s + stall_s * stall_s)


def drain_every_s(drain_s: float, save_s: float) -> float:
    """Least seconds from one drain to the next that the store keeps up with; at least save_s."""
    return max(save_s, ROOM * drain_s)


def drain_saves(costs: Costs, period_s: float) -> int:
    """Saves from one drain to the next, of saves each period_s, that the store keeps up with."""
    return max(1, math.ceil(drain_every_s(costs.drain_s, period_s) / period_s - 1e-9))


def choice(costs: Costs, mtbf_s: float, steps: int, saves: int = 0) -> Choice:
    """What it costs to save every so many steps, and to drain one of so many saves; 0: as the store keeps up with."""
    train_s = steps * costs.step_s
    period_s = train_s + costs.stall_s
    saves = saves or drain_saves(costs, period_s)
    kept_s, whole_s = _kept_s(costs, mtbf_s, period_s, saves), mtbf_s + costs.restart_s
    ettr, stalls = (kept_s / whole_s * part_s / period_s for part_s in (train_s, costs.stall_s))
    repeated = (mtbf_s - kept_s) / whole_s
    return Choice(
        steps=steps, seconds=period_s, drain_saves=saves, drain_seconds=saves * period_s, stalls=stalls,
        repeated=repeated, restarts=costs.restart_s / whole_s, checkpoints=stalls + repeated, ettr=ettr,
    )  # fmt: skip


def least_steps(costs: Costs) -> int:
    """Fewest steps between two saves of which one is usable before the next is staged."""
    return max(1, math.ceil((costs.usable_s - costs.stall_s) / costs.step_s - 1e-9))


def best(costs: Costs, mtbf_s: float) -> Choice:
    """The choice with the highest ETTR, not below ``least_steps``."""
    low = least_steps(costs)
    high = max(low, math.ceil(4 * (mtbf_s + costs.stall_s) / costs.step_s))
    while high - low > _FEW:  # ETTR rises to its highest point, then falls
        third = (high - low) // 3
        if choice(costs, mtbf_s, low + third).ettr < choice(costs, mtbf_s, high - third).ettr:
            low += third
        else:
            high -= third
    return max((choice(costs, mtbf_s, steps) for steps in range(low, high + 1)), key=lambda one: one.ettr)


def table(costs: Costs, mtbf_s: float, *others: Choice) -> list[Choice]:
    """Choices around the best one, by powers of two, and others; in order."""
    middle, least = best(costs, mtbf_s).steps, least_steps(costs)
    steps = {max(least, round(middle * 2.0**power)) for power in range(-3, 4)}
    found = {*(choice(costs, mtbf_s, number) for number in steps), *others}
    return sorted(found, key=lambda one: (one.steps, one.drain_saves))


def _kept_s(costs: Costs, mtbf_s: float, period_s: float, saves: int) -> float:
    """Of the time between two failures, on average, what no restart takes back. docs/history.md has the formula."""
    memory_s = period_s * _usable_periods(period_s, costs.usable_s, mtbf_s)
    first_s = period_s + costs.usable_s + costs.drain_s  # the first save of a run is drained, then one of so many
    drained = math.exp(-first_s / mtbf_s)  # the share of runs that put something on the store
    store_s = period_s * drained + saves * period_s * _usable_periods(saves * period_s, first_s, mtbf_s)
    lasting = drained + costs.store_share * (1 - drained)
    share = drained / lasting if lasting else 1.0  # of what memory has more, that was drained before it was needed
    return min(mtbf_s, store_s + (1 - costs.store_share) * (memory_s - store_s) * share)


def _usable_periods(period_s: float, usable_s: float, mtbf_s: float) -> float:
    """Saves that are usable when a failure comes, on average, counted from the restart before."""
    if period_s > _NEVER * mtbf_s:
        return 0.0
    return math.exp(-usable_s / mtbf_s) / math.expm1(period_s / mtbf_s)
