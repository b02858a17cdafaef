"""What ckptd says of the demo's job when all daemons are gone, held against the ranks' own records. Pure.

``ckptd history``, ``advise`` and ``status`` know nothing of the demo; each figure that both have must agree.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from ckptd_client.demo import DemoError
from ckptd_client.demo.journal import Loss, Reached, Restored, Saved
from ckptd_client.demo.promises import Records

Json = dict[str, Any]
_SLACK_S = 0.5  # two processes look at two ends of a call
_NOTICED_S = 5.0  # until a daemon knows of the end of its ranks


class Attempt(NamedTuple):
    """One start of the training. how: the end that its run must have; began, ended: seconds since 1970."""

    records: Records
    how: str
    began: float
    ended: float


def check_history(told: Json, attempts: Sequence[Attempt], nodes: int) -> str:
    """Raises DemoError unless each run, save, milestone, loss and restore is as the ranks have it. Returns a line."""
    runs = told["runs"]
    _same("runs", len(runs), len(attempts))
    reached = -1
    for number, (run, attempt) in enumerate(zip(runs, attempts, strict=True), 1):
        where = f"start {number}"
        _same(f"{where}: its end", run["how"], attempt.how)
        _same(f"{where}: ranks and nodes", (run["world_size"], run["nodes"]), (len(attempt.records), nodes))
        _within(f"{where}: its begin", run["began"], attempt.began, attempt.ended)
        if attempt.how:  # else no daemon lived to record it
            _within(f"{where}: its end", run["ended"], run["began"], attempt.ended + _NOTICED_S)
        _check_saves(where, run["saves"], attempt.records)
        _check_restores(where, run["restores"], attempt.records, reached)
        ranks = sum(one["ranks"] for one in run["losses"] if one["what"] == "ranks")
        _same(f"{where}: ranks that were lost", ranks, len(attempt.records) if attempt.how == "lost" else 0)
        reached = max(reached, _last_step(attempt.records))
    _check_time(told["goodput"], attempts)
    saves = sum(len(run["saves"]) for run in runs)
    return f"{len(runs)} starts, {saves} saves, {sum(len(run['restores']) for run in runs)} restores"


def check_advice(told: Json, attempts: Sequence[Attempt]) -> None:
    """Raises DemoError unless the advice counts with the failures and restores that there were."""
    restores = [one for attempt in attempts for one in _of(attempt.records[0], Restored)]
    _same("failures", told["failures"], sum(attempt.how != "closed" for attempt in attempts))
    _same("restores", told["restores"], len(restores))
    _same("restores from the store", told["restores_from_store"], sum(one.tier == "pfs" for one in restores))
    stalls = [one.stall_s for attempt in attempts for rank in attempt.records for one in _of(rank, Saved)]
    _within("the stall of a save", told["costs"]["stall_s"], 0.0, max(stalls))


def check_state(told: Json, steps: int) -> None:
    """Raises DemoError unless the job's last state is closed, with its last step durable and nothing lost."""
    _same("how the last run ended", told["run"]["how"], "closed")
    _same("the durable step", told["durable"]["step"], steps - 1)
    _same("saves that are not on the store", told["unsaved"], [])


def _check_saves(where: str, told: Sequence[Json], records: Records) -> None:
    stalls: dict[int, list[float]] = {}
    for rank in records:
        for one in _of(rank, Saved):
            stalls.setdefault(one.step, []).append(one.stall_s)
    whole = [step for step, found in stalls.items() if len(found) == len(records)]
    _same(f"{where}: saves", [one["step"] for one in told if one["step"] in whole], sorted(whole))
    begun = {one["step"] for one in told} - stalls.keys()  # all ranks were killed before they could say so
    if begun and min(begun) <= max(stalls, default=-1):
        raise DemoError(f"{where}: ckptd history has saves of steps {sorted(begun)}, which no rank began")
    for one in told:
        step = one["step"]
        for milestone, field in (("staged", "staged_s"), ("protected", "protected_s"), ("durable", "durable_s")):
            waited_for = one[field] if milestone == "staged" else one[field] or one["durable_s"]  # durable is more
            if waited_for is None and step in _reached(records, milestone):
                raise DemoError(f"{where}: step {step} was reported {milestone}, and ckptd history lacks it")
        if step in stalls:
            _within(f"{where}: the stall of step {step}", one["stall_s"], 0.0, max(stalls[step]) + 0.001)


def _check_restores(where: str, told: Sequence[Json], records: Records, reached: int) -> None:
    came_back = [one for rank in records for one in _of(rank, Restored)]
    _same(f"{where}: restores", [one["step"] for one in told], sorted({one.step for one in came_back}))
    for one in told:
        tiers: dict[str, int] = {}
        for rank in came_back:
            tiers[rank.tier] = tiers.get(rank.tier, 0) + 1
        _same(f"{where}: where ranks read", one["tiers"], tiers)
        slowest = max(rank.seconds for rank in came_back)
        _within(f"{where}: seconds of the restore", one["seconds"], 0.0, slowest + _SLACK_S)
        if one["nbytes"]:
            _same(f"{where}: bytes of the restore", one["nbytes"], sum(rank.nbytes for rank in came_back))
        _within(f"{where}: steps lost", one["lost_steps"], 0, reached - one["step"])


def _check_time(told: Json, attempts: Sequence[Attempt]) -> None:
    parts = [told[f"{kind}_s"] for kind in ("training", "stall", "restore", "repeated", "start", "unexplained")]
    if abs(sum(parts) - told["total_s"]) > _SLACK_S:
        raise DemoError(f"ckptd history: the parts of the time add up to {sum(parts)}, not to {told['total_s']}")
    _within("the wall time", told["total_s"], 0.0, attempts[-1].ended - attempts[0].began + _NOTICED_S)
    _same("failures", told["failures"], sum(attempt.how != "closed" for attempt in attempts))
    ours = sum(stall for attempt in attempts for stall in _longest_stalls(attempt.records))
    _within("the time of all stalls", told["stall_s"], 0.0, ours + _SLACK_S)


def _longest_stalls(records: Records) -> list[float]:
    found: dict[int, float] = {}
    for rank in records:
        for one in _of(rank, Saved):
            found[one.step] = max(found.get(one.step, 0.0), one.stall_s)
    return list(found.values())


def _reached(records: Records, milestone: str) -> set[int]:
    return {one.step for rank in records for one in _of(rank, Reached) if one.milestone == milestone}


def _last_step(records: Records) -> int:
    return max((one.step for rank in records for one in _of(rank, Loss)), default=-1)


def _of(records: Sequence[Any], kind: type[Any]) -> list[Any]:
    return [record for record in records if isinstance(record, kind)]


def _same(what: str, told: object, ours: object) -> None:
    if told != ours:
        raise DemoError(f"{what}: ckptd tells {told}, the ranks' own records have {ours}")


def _within(what: str, told: float | None, least: float, most: float) -> None:
    if told is None or not least <= told <= most:
        raise DemoError(f"{what}: ckptd tells {told}, which is not between {least} and {most}")
