"""Which ranks of a session hold the same tensors, and what each of them attests of its slice in a save.

Once in a while one of them is no replica: its structure changed, its bytes drifted, or it saves all of its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from random import Random

from ckptd.shared.format.rank_members import members_of, ranks_in
from ckptd.shared.format.replica_attestations import SUM_NBYTES, Attestation

_ODD = ("structure", "bytes", "alone")


def _sum(*words: object) -> bytes:
    return blake2b(repr(words).encode(), digest_size=SUM_NBYTES).digest()


@dataclass(frozen=True, slots=True)
class Replicas:
    """``odd``: (rank, how, from which step on), or None."""

    sets: tuple[tuple[int, ...], ...] = ()
    odd: tuple[int, str, int] | None = None

    def said(self, rank: int, step: int, *, first_look: bool) -> tuple[Attestation, ...]:
        """The rank's word in a save of that step. first_look: no save that it looked at was staged yet."""
        how = self._how(rank, step)
        if how == "alone":
            return ()
        part = b"f" if first_look else b"l"
        return tuple(
            Attestation(
                members=members_of(ranks),
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
    """Which ranks hold replicas in a session. The chances: that any do, and that one of them is no replica some day."""
    if ranks < 2 or random.random() >= shared:
        return Replicas()
    everybody, incomplete = tuple(range(ranks)), ranks // 2
    pairs = tuple((rank, rank + incomplete) for rank in range(incomplete))
    rows = (tuple(range(incomplete)), tuple(range(incomplete, ranks)))
    ways = [(everybody,), (everybody,), pairs]
    if incomplete > 1:
        ways += [(everybody, *pairs), rows]
    if ranks > 2:
        ways += [_stages(random, ranks), (tuple(sorted(random.sample(everybody, random.randint(2, ranks - 1)))),)]
    sets = random.choice(ways)
    if random.random() >= odd or not sets:
        return Replicas(sets)
    rank = random.choice(sorted({rank for ranks in sets for rank in ranks}))
    return Replicas(sets, (rank, random.choice(_ODD), 10 * random.randrange(1, 8)))


def _stages(random: Random, ranks: int) -> tuple[tuple[int, ...], ...]:
    """Stages of a pipeline, of as many ranks as it happens: of each the set of all, pairs, or none."""
    cuts = sorted(random.sample(range(1, ranks), random.randint(1, min(4, ranks - 1))))
    sets: list[tuple[int, ...]] = []
    for first, stop in pairwise([0, *cuts, ranks]):
        stage = tuple(range(first, stop))
        half = len(stage) // 2
        ways = [(stage,), tuple(zip(stage[:half], stage[half:], strict=False)), ()]
        sets += [found for found in random.choice(ways) if len(found) > 1]
    return tuple(sets)


# --- what follows from their words, found in another way than the core finds it


def mismatched(said: Mapping[int, tuple[Attestation, ...]]) -> bool:
    """Whether the words of all ranks are not those of replicas."""
    everything = [(rank, attestation) for rank, attestations in sorted(said.items()) for attestation in attestations]
    for members in {attestation.members for _, attestation in everything}:
        ranks = [rank for rank, attestation in everything if attestation.members == members]
        words = [attestation for _, attestation in everything if attestation.members == members]
        seen = {attestation.content for attestation in words}
        if ranks != list(ranks_in(members)) or len({attestation.cut for attestation in words}) > 1:
            return True
        if len(seen) != len({content[:1] for content in seen}):
            return True
    return False
