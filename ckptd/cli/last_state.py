"""What ``ckptd status`` can say of jobs while no daemon runs.

The arena shows it: ranks that live, and what is staged. A job's journal on its store has the rest, its last state too:
``lines`` is where its words are added.
"""

from collections.abc import Iterator

from ckptd.daemon.left_behind import LeftJob, left_behind
from ckptd.shared.base.wording import named_ranks
from ckptd.system import human


def lines(arena: str) -> list[str]:
    """A line for each fact, the worst first; none where nothing is left, or nothing can be read."""
    try:
        found = left_behind(arena)
    except OSError:
        return []
    return [*(line for job in found for line in _living(job)), *(line for job in found for line in _staged(job))]


def _living(left: LeftJob) -> Iterator[str]:
    if left.ranks:
        verb = "runs" if len(left.ranks) == 1 else "run"
        yield f"job {left.job.job}: {named_ranks(left.ranks)} {verb} here, and no save succeeds until a daemon does"


def _staged(left: LeftJob) -> Iterator[str]:
    if left.step is not None:
        ranks = f"{len(left.holders)} of {human.counted(left.world_size, 'rank')}"
        yield f"job {left.job.job}: step {left.step} is in memory here ({ranks})"
