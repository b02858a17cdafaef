"""Where each rank of a load reads from: one tier for all, and runs of ranks that read from another. Pure."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Annotated, Self

import msgspec

from ckptd.shared.base.ids import MAX_RANKS, Rank
from ckptd.shared.protocol.messages import Tier
from ckptd.shared.protocol.rank_sets import check_last, check_total


class TierRun(msgspec.Struct, frozen=True, array_like=True):
    """``count`` ranks from ``first`` on that read from this tier."""

    first: Rank
    count: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)]
    tier: Tier

    def __post_init__(self) -> None:
        """Raises ValueError when the last one is no number of a rank."""
        check_last(self.first + self.count - 1)

    def __contains__(self, rank: int) -> bool:
        """Whether it is one of them."""
        return self.first <= rank < self.first + self.count

    def below(self, world_size: int) -> range:
        """Their numbers, as far as the job has such ranks."""
        return range(self.first, min(self.first + self.count, world_size))


class Tiers(msgspec.Struct, frozen=True, array_like=True):
    """``usual`` is the tier of every rank that is in no run of ``others``: its size is that of the exceptions."""

    usual: Tier = Tier.PFS
    others: Annotated[tuple[TierRun, ...], msgspec.Meta(max_length=MAX_RANKS)] = ()

    def __post_init__(self) -> None:
        """Raises ValueError when the runs name more ranks than a job can have."""
        check_total(self.others)

    @classmethod
    def of(cls, tiers: Sequence[Tier]) -> Self:
        """Of the tier of each rank, at least one."""
        usual = Counter(tiers).most_common(1)[0][0]
        return cls(usual, tuple(run for run in _runs(tiers) if run.tier is not usual))

    def of_rank(self, rank: int) -> Tier:
        """From where the rank reads."""
        return next((run.tier for run in self.others if rank in run), self.usual)

    def readers(self, tier: Tier, world_size: int) -> set[int]:
        """The ranks of this tier."""
        found = set(range(world_size)) if self.usual is tier else set()
        for run in self.others:
            (found.update if run.tier is tier else found.difference_update)(run.below(world_size))
        return found


def _runs(tiers: Sequence[Tier]) -> Iterator[TierRun]:
    first = 0
    for tier, group in groupby(tiers):
        count = sum(1 for _ in group)
        yield TierRun(first, count, tier)
        first += count
