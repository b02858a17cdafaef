"""What ranks that hold the same tensors say of them when each saves its share only: that the shares make a whole. Pure.

Nothing is exchanged beforehand: each replica cuts the tensors by itself, and seals how it did and a digest of what it
sees in them. A save counts as staged only when all replicas cut alike, and saw the same where they looked at the same.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec

from ckptd.protocol.ids import MAX_RANKS

MAX_SHARES = 16  # sets of replicas that a rank is of
SUM_NBYTES = 8
_Sum = Annotated[bytes, msgspec.Meta(min_length=SUM_NBYTES, max_length=SUM_NBYTES)]


class Share(msgspec.Struct, frozen=True, array_like=True):
    """One rank's word of the tensors that it shares with some others."""

    replicas: _Sum  # of the ranks' numbers
    count: Annotated[int, msgspec.Meta(ge=2, le=MAX_RANKS)]  # of the ranks
    cut: _Sum  # of names, dtypes and local shapes, in their order: the replicas' cuts follow from it
    content: _Sum  # of the bytes that were looked at this time; the first byte says which those are


def difference(shares: Mapping[int, Sequence[Share]]) -> str:
    """Why the shares of all ranks, by rank, are no whole; empty when they are."""
    sets: dict[tuple[bytes, int], dict[int, Share]] = {}
    for rank, said in sorted(shares.items()):
        for share in said:
            sets.setdefault((share.replicas, share.count), {})[rank] = share
    for (_, count), said_by in sets.items():
        first = min(said_by)
        seen: dict[bytes, tuple[int, bytes]] = {}  # by what was looked at: the first rank that did, what it saw
        for rank, share in said_by.items():
            if share.cut != said_by[first].cut:
                return f"ranks {first} and {rank} hold different tensors where replicas should be"
            # A rank that failed a save, or heard later how one ended, may look elsewhere than the others.
            other, content = seen.setdefault(share.content[:1], (rank, share.content))
            if share.content != content:
                return f"ranks {other} and {rank} are no replicas: what should be equal on both differs"
        if len(said_by) != count:
            return f"of {count} replicas only {len(said_by)} saved a share, rank {first} among them"
    return ""
