"""Which ranks of a session hold the same tensors, and what each of them says of its share in a save.

Once in a while one of them is no replica: its structure changed, its bytes drifted, or it saves all of its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from random import Random

from ckptd.shared.format.replica_shares import SUM_NBYTES, Share

_ODD = ("structure", "bytes", "alone")


def _sum(*words: object) -> bytes:
    return blake2b(repr(words).encode(), digest_size=SUM_NBYTES).digest()


@dataclass(frozen=True, slots=True)
class Replicas:
    """``odd``: (rank, how, from which step on), or None."""

    sets: tuple[tuple[int, ...], ...] = ()
    odd: tuple[int, str, int] | None = None

    def said(self, rank: int, step: int, *, first_look: bool) -> tuple[Share, ...]:
        """The rank's word in a save of that step. first_look: no save that it looked at was staged yet."""
        how = self._how(rank, step)
        if how == "alone":
            return ()
        part = b"f" if first_look else b"l"
        return tuple(
            Share(
                replicas=_sum("ranks", ranks),
                count=len(ranks),
                cut=_sum("cut", ranks, how == "structure"),
                content=part + _sum("bytes", ranks, step, part, how == "bytes")[1:],
            )
            for ranks in self.sets
            if rank in ranks
        )

    def _how(self, rank: int, step: int) -> str:
        if self.odd is None or self.odd[0] != rank or step < self.odd[2]:
            return ""
        return self.odd[1]


def draw(random: Random, ranks: int, *, shared: float, odd: float) -> Replicas:
    """Who shares in a session. The chances: that anybody does, and that one of them is no replica some day."""
    if ranks < 2 or random.random() >= shared:
        return Replicas()
    everybody, incomplete = tuple(range(ranks)), ranks // 2
    pairs = tuple((rank, rank + incomplete) for rank in range(incomplete))
    rows = (tuple(range(incomplete)), tuple(range(incomplete, ranks)))
    ways = [(everybody,), (everybody,), pairs]
    if incomplete > 1:
        ways += [(everybody, *pairs), rows]
    sets = random.choice(ways)
    if random.random() >= odd:
        return Replicas(sets)
    rank = random.choice(sorted({rank for ranks in sets for rank in ranks}))
    return Replicas(sets, (rank, random.choice(_ODD), 10 * random.randrange(1, 8)))


# --- what follows from their words, found in another way than the core finds it


def apart(said: Mapping[int, tuple[Share, ...]]) -> bool:
    """Whether the words of all ranks are not those of replicas."""
    everything = [(rank, share) for rank, shares in said.items() for share in shares]
    sets = {(share.replicas, share.count) for _, share in everything}
    for key in sets:
        words = [share for _, share in everything if (share.replicas, share.count) == key]
        seen = {share.content for share in words}
        if len(words) != key[1] or len({share.cut for share in words}) > 1:
            return True
        if len(seen) != len({content[:1] for content in seen}):
            return True
    return False


def needed(said: Mapping[int, tuple[Share, ...]], rank: int) -> set[int]:
    """Whose images have a part of what the rank holds."""
    mine = {share.replicas for share in said.get(rank, ())}
    return {rank} | {other for other, shares in said.items() if mine & {share.replicas for share in shares}}
