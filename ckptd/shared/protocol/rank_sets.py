"""Sets of ranks in few bytes: those of meshes are a few runs with a step each. Pure.

A run of a few bytes may name a million ranks. So it is never made a list of but below the world size of a job.
"""

from collections.abc import Iterable, Sequence
from typing import Annotated, Protocol

import msgspec

from ckptd.shared.base.ids import MAX_RANKS, Rank

MAX_RUNS = 1 << 18  # of a message: ranks without any order


class RankRun(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """``count`` ranks from ``first`` on, each ``step`` above the one before."""

    first: Rank
    count: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)]
    step: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)] = 1

    def __post_init__(self) -> None:
        """Raises ValueError when the last one is no number of a rank."""
        check_last(self.first + (self.count - 1) * self.step)

    def below(self, world_size: int) -> range:
        """Their numbers, as far as the job has such ranks."""
        return range(self.first, min(self.first + self.count * self.step, world_size), self.step)


RankSet = Annotated[tuple[RankRun, ...], msgspec.Meta(max_length=MAX_RANKS)]


def runs_of(ranks: Sequence[int]) -> tuple[RankRun, ...]:
    """The set of these ranks, which ascend."""
    found: list[RankRun] = []
    at = 0
    while at < len(ranks):
        step = ranks[at + 1] - ranks[at] if at + 1 < len(ranks) else 1
        stop = at + 1
        while stop < len(ranks) and ranks[stop] - ranks[stop - 1] == step:
            stop += 1
        found.append(RankRun(ranks[at], stop - at, step))
        at = stop
    return tuple(found)


class Counted(Protocol):
    """A run of ranks."""

    @property
    def count(self) -> int:
        """How many."""


def check_last(rank: int) -> None:
    """Raises ValueError when the last rank of a run is none."""
    if rank >= MAX_RANKS:
        raise ValueError(f"no job has more than {MAX_RANKS} ranks")


def check_total(runs: Iterable[Counted]) -> None:
    """Raises ValueError for more runs than a message has, or when they name more ranks than a job can have."""
    counts = [run.count for run in runs]
    if sum(counts) > MAX_RANKS:
        raise ValueError(f"the runs of a message name more than {MAX_RANKS} ranks")
    if len(counts) > MAX_RUNS:
        raise ValueError(f"the ranks of a message are more than {MAX_RUNS} runs")


def ranks_of(runs: Iterable[RankRun], world_size: int) -> set[int]:
    """The ranks of a set, as far as the job has them."""
    return {rank for run in runs for rank in run.below(world_size)}
