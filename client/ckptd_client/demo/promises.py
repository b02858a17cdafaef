"""What was promised before a death, and whether it was kept: pure, from the ranks' own records."""

from collections.abc import Sequence

from ckptd_client.demo.errors import DemoError
from ckptd_client.demo.journal import Reached, Record, Restored

Records = Sequence[Sequence[Record]]  # by rank


def newest(records: Records, milestone: str, *, told: int | None = None) -> int:
    """Newest step that any rank reported to have reached milestone, or that ``told``, by the status, has.

    Raises DemoError if there is none.
    """
    reached = [record for rank in records for record in rank if isinstance(record, Reached)]
    steps = [record.step for record in reached if record.milestone == milestone] + ([] if told is None else [told])
    if not steps:
        raise DemoError(f"no checkpoint was reported {milestone}")
    return max(steps)


def restored(records: Records) -> list[Restored]:
    """What each rank went on from. Raises DemoError if one began from nothing."""
    found = [next((record for record in rank if isinstance(record, Restored)), None) for rank in records]
    missing = [rank for rank, one in enumerate(found) if one is None]
    if missing:
        raise DemoError(f"ranks {missing} began from nothing, though a checkpoint was in memory")
    return [one for one in found if one is not None]


def check(came_back: Sequence[Restored], promised: int, milestone: str, tiers: Sequence[str]) -> None:
    """Raises DemoError unless all ranks have one step, not older than promised, each from the tier expected of it."""
    steps = {one.step for one in came_back}
    if len(steps) != 1:
        raise DemoError(f"the ranks came back at different steps: {sorted(steps)}")
    step = steps.pop()
    if step < promised:
        raise DemoError(f"step {promised} was reported {milestone}, but step {step} came back")
    found = [one.tier for one in came_back]
    if found != list(tiers):
        raise DemoError(f"step {step} came from {found}, by rank, and not from {list(tiers)}")
