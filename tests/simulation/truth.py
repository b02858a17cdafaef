"""What is really so with one job, over all nodes: where each segment and each chunk lies."""

from dataclasses import dataclass, field
from itertools import chain

from ckptd.shared.base.ids import SaveId
from ckptd.shared.format.replica_attestations import Attestation
from ckptd.shared.format.schemes import Scheme
from ckptd.shared.format.slot import Seal
from ckptd.shared.protocol.parity_types import ParityChunk
from tests.simulation import replicas
from tests.simulation.parity import solvable

Ident = str  # of an arena
Members = list[tuple[frozenset[Ident], int]]
SetKey = tuple[int, tuple[str, ...], bytes]  # epoch, members, digest of the first seal: names one encoding of one set


@dataclass(slots=True)
class ParitySet:
    """One set's encoding of one save."""

    scheme: Scheme
    columns: tuple[frozenset[int], ...]  # ranks of each member
    chunks: dict[int, set[Ident]] = field(default_factory=dict)  # member -> arenas
    whole: bool = False  # every member's chunk was there once

    @property
    def ranks(self) -> frozenset[int]:
        """All that it protects."""
        return frozenset(chain.from_iterable(self.columns))


@dataclass(slots=True)
class SaveTruth:
    """One save."""

    save: SaveId
    world_size: int
    where: dict[int, dict[Ident, int]] = field(default_factory=dict)  # rank -> arena -> copies
    contents: dict[int, bytes] = field(default_factory=dict)
    said: dict[int, tuple[Attestation, ...]] = field(default_factory=dict)  # rank -> what its seal attests
    writers: set[str] = field(default_factory=set)
    sets: dict[SetKey, ParitySet] = field(default_factory=dict)
    ever_whole: bool = False
    ever_protected: bool = False
    bereft: bool = False  # a segment was lost with its node
    covered: dict[int, set[int]] = field(default_factory=dict)  # epoch -> ranks of sets that were whole once
    replicas: dict[bytes, set[int]] = field(default_factory=dict)  # who attests of the same replicas

    _mismatched: bool | None = None
    _epochs: list[int] | None = None  # None: chunks came or went
    _members: dict[int, Members] = field(default_factory=dict)

    @property
    def mismatched(self) -> bool:
        """Whether all ranks sealed it, and what they attest is not what replicas attest: it is no checkpoint."""
        if len(self.said) < self.world_size:
            return False
        if self._mismatched is None:
            self._mismatched = replicas.mismatched(self.said)
        return self._mismatched

    @property
    def whole(self) -> bool:
        """Every rank's sealed segment lies in some arena, and their slices make a whole."""
        return len(self.where) == self.world_size and not self.mismatched

    @property
    def lost_when_staged(self) -> bool:
        """Every rank had sealed its segment, and a node was lost with one: maybe before anybody could have heard."""
        return self.bereft and len(self.contents) == self.world_size and not self.mismatched

    def attested(self, rank: int, attestations: tuple[Attestation, ...]) -> None:
        """The first seal of the rank says so."""
        if rank not in self.said:
            self.said[rank] = attestations
            for attestation in attestations:
                self.replicas.setdefault(attestation.members, set()).add(rank)

    def needed(self, rank: int) -> set[int]:
        """Whose images have a part of what the rank holds."""
        return {rank}.union(*(self.replicas[said.members] for said in self.said.get(rank, ())))

    def members(self, epoch: int) -> Members:
        """Of each set that was encoded in the epoch: arenas with its chunks, and how many losses it bears."""
        if epoch not in self._members:
            sets = [s for k, s in self.sets.items() if k[0] == epoch]
            self._members[epoch] = [(frozenset().union(*s.chunks.values()), s.scheme.losses) for s in sets]
        return self._members[epoch]

    def chunks_changed(self) -> None:
        """What was found out of them holds no more."""
        self._epochs = None
        self._members.clear()

    def epochs_protected(self) -> list[int]:
        """Epochs in which every set's chunks lie there, each member's on a node of its own."""
        if self._epochs is None:
            self._epochs = self._protected()
        return self._epochs

    def _protected(self) -> list[int]:
        found = []
        for epoch in {key[0] for key in self.sets}:
            sets = [s for key, s in self.sets.items() if key[0] == epoch and len(s.chunks) == len(s.columns)]
            covered = sum(len(s.ranks) for s in sets)
            if covered == self.world_size and len(frozenset().union(*(s.ranks for s in sets))) == covered:
                found.append(epoch)
        return found

    def restorable(self, without: frozenset[Ident] = frozenset()) -> bool:
        """From memory alone, when these arenas are lost too."""
        if self.mismatched:
            return False
        have = {rank for rank, arenas in self.where.items() if set(arenas) - without}
        if len(have) == self.world_size:
            return True
        for rank in set(range(self.world_size)) - have:
            if not any(self._made_good(s, rank, have, without) for s in self.sets.values()):
                return False
        return True

    @staticmethod
    def _made_good(of: ParitySet, rank: int, have: set[int], without: frozenset[Ident]) -> bool:
        wanted = next((m for m, ranks in enumerate(of.columns) if rank in ranks), None)
        if wanted is None:
            return False
        columns = [ranks <= have for ranks in of.columns]
        parities = [bool(of.chunks.get(m, set()) - without) for m in range(len(of.columns))]
        return solvable(of.scheme, columns, parities, wanted)


@dataclass(slots=True)
class Promise:
    """The newest save of which some rank was told that it is protected, and what that bears."""

    save: SaveId
    sets: Members  # members' arenas, losses that they bear
    losses: dict[int, int] = field(default_factory=dict)  # set -> members lost since

    def lost(self, ident: Ident) -> bool:
        """One more node is lost; whether the promise still holds."""
        for number, (members, _) in enumerate(self.sets):
            if ident in members:
                self.losses[number] = self.losses.get(number, 0) + 1
        return all(self.losses.get(n, 0) <= bears for n, (_, bears) in enumerate(self.sets))


class Truth:
    """One job."""

    def __init__(self) -> None:
        self.saves: dict[SaveId, SaveTruth] = {}
        self.staged: SaveId | None = None  # the newest that some rank was told of
        self.protected: Promise | None = None
        self.owners: dict[int, str] = {}  # incarnation -> session
        self.sizes: dict[SaveId, int] = {}

    def of(self, save: SaveId, world_size: int) -> SaveTruth:
        """The save's entry, made when it is first asked for."""
        if save not in self.saves:
            self.saves[save] = SaveTruth(save, world_size)
            self.sizes[save] = world_size
        return self.saves[save]

    def held(self, ident: Ident, seal: Seal, *, there: bool) -> SaveTruth:
        """A seal came into force, or went."""
        assert seal.save is not None
        truth = self.of(seal.save, seal.world_size)
        arenas = truth.where.setdefault(seal.rank, {})
        arenas[ident] = arenas.get(ident, 0) + (1 if there else -1)
        if arenas[ident] <= 0:
            del arenas[ident]
        if not arenas:
            del truth.where[seal.rank]
        if there:
            truth.contents.setdefault(seal.rank, seal.leaves_digest)
            truth.attested(seal.rank, seal.attestations)
            truth.ever_whole |= truth.whole
        return truth

    def chunk(self, ident: Ident, chunk: ParityChunk, *, there: bool) -> SaveTruth:
        """A chunk was sealed, or went."""
        ranks = tuple(frozenset(s.rank for s in c.seals) for c in chunk.columns)
        size = next((s.world_size for c in chunk.columns for s in c.seals), 0)
        truth = self.of(chunk.save, size)
        truth.chunks_changed()
        first = next((s.leaves_digest for c in chunk.columns for s in c.seals), b"")
        key = (chunk.epoch, tuple(c.node for c in chunk.columns), first)
        found = truth.sets.setdefault(key, ParitySet(chunk.scheme, ranks))
        holders = found.chunks.setdefault(chunk.index, set())
        if there:
            holders.add(ident)
            if len(found.chunks) == len(ranks) and not found.whole:
                found.whole = True
                covered = truth.covered.setdefault(chunk.epoch, set())
                covered |= found.ranks  # a node may be lost while the last set is still at it, and the word goes round
                truth.ever_protected |= len(covered) == truth.world_size
        else:
            holders.discard(ident)
            if not holders:
                del found.chunks[chunk.index]
            if not found.chunks:
                del truth.sets[key]
        return truth

    def forget_old(self) -> None:
        """Saves of which nothing lies anywhere, but for the newest ones."""
        if len(self.saves) > 200:
            for save in sorted(s for s, t in self.saves.items() if not t.where and not t.sets)[:-50]:
                del self.saves[save]
