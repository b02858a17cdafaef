"""What an arena without a daemon shows of its jobs: ranks that live, and what is staged. Changes nothing."""

import os
from dataclasses import dataclass

from ckptd.daemon.liveness import job_of, living
from ckptd.shared.base.errors import DamagedError, IntegrityError, OtherVersionError
from ckptd.shared.base.ids import JobKey
from ckptd.shared.format import arena_paths
from ckptd.shared.format.integrity import XXH3, Integrity
from ckptd.shared.format.slot import SEALS_NBYTES, Seal, SlotState, decode_seals

_SEALED = frozenset({SlotState.SEALED, SlotState.DIGESTED})


@dataclass(frozen=True, slots=True)
class LeftJob:
    """One job in an arena without a daemon."""

    job: JobKey
    ranks: tuple[int, ...]  # whose processes live
    step: int | None  # the newest that some rank of this node has sealed; None: none that can be read from here
    holders: tuple[int, ...]  # ranks that have that step here
    world_size: int


def left_behind(arena: str, integrity: Integrity = XXH3) -> list[LeftJob]:
    """Every job with ranks or sealed slots, by name. Raises OSError where the arena may not be read."""
    alive: dict[JobKey, list[int]] = {}
    for rank in living(arena):
        alive.setdefault(rank.job, []).append(rank.rank)
    seals: dict[JobKey, list[Seal]] = {}
    jobs = os.path.join(arena, arena_paths.JOBS)
    for entry in sorted(os.listdir(jobs)) if os.path.isdir(jobs) else []:
        directory = os.path.join(jobs, entry)
        sealed = [] if os.path.islink(directory) else _sealed(directory, integrity)
        job = next((seal.job for seal in sealed if seal.job is not None), None) or job_of(directory)
        if job is not None and sealed:
            seals.setdefault(job, []).extend(sealed)
    return [_left(job, alive.get(job, []), seals.get(job, [])) for job in sorted(alive.keys() | seals.keys())]


def _left(job: JobKey, ranks: list[int], seals: list[Seal]) -> LeftJob:
    newest = max((seal.save for seal in seals if seal.save is not None), default=None)
    holders = sorted({seal.rank for seal in seals if seal.save == newest})
    world_size = max((seal.world_size for seal in seals), default=0)
    return LeftJob(job, tuple(sorted(ranks)), newest.step if newest is not None else None, tuple(holders), world_size)


def _sealed(directory: str, integrity: Integrity) -> list[Seal]:
    found = (_seal(os.path.join(directory, name), integrity) for name in sorted(os.listdir(directory)))
    return [seal for seal in found if seal is not None and seal.state in _SEALED]


def _seal(path: str, integrity: Integrity) -> Seal | None:
    """None: no slot, or none that can be read from here."""
    if arena_paths.parse_slot_name(os.path.basename(path)) is None:
        return None
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(fd, "rb") as file:
            file.seek(-SEALS_NBYTES, os.SEEK_END)
            return decode_seals(file.read(SEALS_NBYTES), integrity, where=path)[2]
    except (OSError, DamagedError, IntegrityError, OtherVersionError):
        return None
