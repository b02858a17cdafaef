"""Seals as a digested slot has them, for tests of the core, which only passes them on."""

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
    members = members_of(range(rank % sets, world_size, sets))
    return (Attestation(members, b"cutalike", b"wcontent"),) if world_size > sets else ()
