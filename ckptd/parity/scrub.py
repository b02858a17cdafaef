"""Blocks of slots and of parity in the arena read again where they lie, while the daemon may give them back.

A block is damaged only if nothing was sealed there while it was read: the daemon that gives memory back puts another
seal in force first, and only then lets a rank write. Seals count up, so that one that came back is another one.
"""

from typing import NamedTuple

from ckptd.arena.arena import Arena
from ckptd.parity.files import ParityFile
from ckptd.parity.served import ServedSegment
from ckptd.parity.streams import TAIL, block_range
from ckptd.shared.base.errors import CkptdError, DamagedError
from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.format import arena_paths
from ckptd.shared.format.digest import BLOCK_NBYTES, block_count
from ckptd.shared.format.slot import SEALS_NBYTES, SlotState


class Look(NamedTuple):
    """What a block was found to be. last: none follows. gone: it is not what was meant any more."""

    nbytes: int = 0
    last: bool = False
    damage: str = ""
    gone: bool = False


GONE = Look(gone=True)


def look_at_slot(arena: Arena, job: JobKey, name: str, save: SaveId, block: int) -> Look:
    """The block of the slot's image; TAIL: what follows the image, the digests among it. Blocks; for threads."""
    try:
        view = arena.view(job, name)
        sealed = bytes(view[-SEALS_NBYTES:])
        slot = ServedSegment(arena, job, name)
    except (OSError, CkptdError):  # unlinked, or of no whole seal
        return GONE
    seal = slot.seal
    if (seal.save, seal.state) != (save, SlotState.DIGESTED):
        return GONE
    blocks = block_count(seal.image_nbytes)
    if block >= blocks:
        return Look(last=True)
    start, stop = block_range(seal, block)
    damage = ""
    try:
        slot.check(start, 0)
    except DamagedError as error:
        damage = error.message
    except OSError:
        return GONE
    if damage and bytes(view[-SEALS_NBYTES:]) != sealed:
        return GONE
    return Look(stop - start, last=block == blocks - 1 or (block == TAIL and not blocks), damage=damage)


def look_at_parity(arena: Arena, job: JobKey, save: SaveId, epoch: int, block: int) -> Look:
    """The block of this node's parity of the save. Blocks; for threads."""
    name = arena_paths.parity_name(save, epoch)
    if name not in arena.sizes(job, arena_paths.PARITY_SUFFIX):
        return GONE
    try:
        view = arena.view(job, name)
        sealed = bytes(view[-SEALS_NBYTES:])
    except OSError:
        return GONE
    try:
        file = ParityFile(arena, job, name)
        file.check(block * BLOCK_NBYTES, 0)
    except DamagedError as error:
        return Look(damage=error.message) if bytes(view[-SEALS_NBYTES:]) == sealed else GONE
    except (OSError, CkptdError):
        return GONE
    nbytes = max(0, min(BLOCK_NBYTES, file.nbytes - block * BLOCK_NBYTES))
    return Look(nbytes, last=block + 1 >= block_count(file.nbytes))
