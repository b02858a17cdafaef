"""Seals as a digested slot has them, for tests of the core, which only passes them on."""

from collections.abc import Iterable, Sequence

from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.format.rank_members import members_of
from ckptd.shared.format.replica_attestations import Attestation
from ckptd.shared.format.slot import Seal, SlotState


def a_seal(job: JobKey, save: SaveId, rank: int = 0, world_size: int = 1, nbytes: int = 10, *, attestations=()) -> Seal:
    """Of a segment whose digests are taken."""
    return Seal(
        state=SlotState.DIGESTED, job=job, save=save, rank=rank, world_size=world_size, image_nbytes=nbytes,
        attestations=attestations,
    )  # fmt: skip


def attestations_of(world_size: int, rank: int = 0, sets: int = 1) -> tuple[Attestation, ...]:
    """What a rank says of a state of which its set of replicas holds as much as each of the others."""
    ranks = range(rank % sets, world_size, sets)
    return attestations_in([ranks], rank) if world_size > sets else ()


def attestations_in(sets: Iterable[Sequence[int]], rank: int) -> tuple[Attestation, ...]:
    """What a rank says of a state of which each of these sets of replicas holds a part."""
    return tuple(Attestation(members_of(ranks), b"cutalike", b"wcontent") for ranks in sets if rank in ranks)
