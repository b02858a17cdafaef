"""Sets of ranks in few bytes: those of meshes are a few runs with a step each. Pure."""

from collections.abc import Iterable, Sequence
from typing import Annotated

import msgspec

from ckptd.shared.base.ids import MAX_RANKS, Rank


class RankRun(msgspec.Struct, frozen=True, array_like=True):
    """``count`` ranks from ``first`` on, each ``step`` above the one before."""

    first: Rank
    count: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)]
    step: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)] = 1

    @property
    def ranks(self) -> range:
        """Their numbers."""
        return range(self.first, self.first + self.count * self.step, self.step)


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


def joined_with(sets: Iterable[Sequence[RankRun]], ranks: Iterable[int]) -> set[int]:
    """These ranks, and all that are in a set with one of them."""
    own = set(ranks)
    shared = [some for some in sets if any(rank in run.ranks for run in some for rank in own)]
    return own | {rank for some in shared for run in some for rank in run.ranks}
