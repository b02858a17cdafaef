"""Finds what was promised before a kill, and checks that it was kept. Pure, from the ranks' own records."""

from collections.abc import Sequence

from ckptd_client.demo import DemoError
from ckptd_client.demo.journal import Reached, Record, Restored

Records = Sequence[Sequence[Record]]  # by rank


def newest(records: Records, milestone: str, *, reported: int | None = None) -> int:
    """The newest step that a rank reported to have reached milestone. reported: a step from ``ckptd status``.

    Raises DemoError if there is none.
    """
    reached = [record for rank in records for record in rank if isinstance(record, Reached)]
    steps = [record.step for record in reached if record.milestone == milestone]
    steps += [] if reported is None else [reported]
    if not steps:
        raise DemoError(f"no checkpoint was reported {milestone}")
    return max(steps)


def restored(records: Records) -> list[Restored]:
    """The checkpoint that each rank restored. Raises DemoError if a rank began from nothing."""
    found = [next((record for record in rank if isinstance(record, Restored)), None) for rank in records]
    missing = [rank for rank, one in enumerate(found) if one is None]
    if missing:
        raise DemoError(f"ranks {missing} began from nothing, though a checkpoint was in memory")
    return [one for one in found if one is not None]


def check(came_back: Sequence[Restored], promised: int, milestone: str, tiers: Sequence[str]) -> None:
    """Raises DemoError unless all ranks restored one step, not older than promised, each from its expected tier."""
    steps = {one.step for one in came_back}
    if len(steps) != 1:
        raise DemoError(f"the ranks came back at different steps: {sorted(steps)}")
    step = steps.pop()
    if step < promised:
        raise DemoError(f"step {promised} was reported {milestone}, but step {step} came back")
    found = [one.tier for one in came_back]
    if found != list(tiers):
        raise DemoError(f"step {step} came from {found}, by rank, and not from {list(tiers)}")
