"""What a rank reads in a load: its own image, those of its replicas, or all of a checkpoint of another world."""

from typing import TYPE_CHECKING, NamedTuple

from ckptd.shared.base.ids import SaveId
from ckptd.shared.format.slot import SlotState
from ckptd.shared.protocol.messages import LoadFrom, Tier

if TYPE_CHECKING:
    from tests.simulation.ranks import Proc

Images = dict[int, bytes]  # rank -> what stands for its bytes


class Read(NamedTuple):
    """What a rank has read."""

    save: SaveId
    tier: Tier
    images: Images


class ElsewhereError(Exception):
    """Images that the rank needs are not where it was sent."""


def read(proc: "Proc", order: LoadFrom) -> Images:
    """What the rank needs, from where the order sends it. Empty: nothing is there. Raises ElsewhereError."""
    assert order.save is not None
    wanted = proc.world.promises.needed(proc, order.save)
    if order.tier is Tier.PFS:
        directory = proc.world.store(proc.job).committed.get(order.save)
        files = directory.files if directory is not None else {}
        return {rank: files[rank] for rank in wanted} if wanted <= set(files) else {}
    if order.saved_by:
        return _here(proc, order.save, wanted)
    slot = proc.machine.arena.slot(proc.job, order.slot)
    if slot is None or slot.save != order.save or (slot.rank != proc.rank and not order.whole):
        return {}
    return _of_this_node(proc, order, wanted)


def _here(proc: "Proc", save: SaveId, wanted: set[int]) -> Images:
    """What the daemon says that it has here for the rank."""
    memory, found = proc.machine.arena.job(proc.job), Images()
    for rank, name in proc.here.items():
        slot = memory.slots.get(name)
        if slot is not None and (slot.save, slot.rank) == (save, rank):
            assert slot.seal.state is SlotState.DIGESTED, f"{proc} is sent to read {name} before it is digested"
            found[rank] = slot.seal.leaves_digest
        elif (save, rank) in memory.pulled:
            found[rank] = memory.pulled[save, rank].leaves_digest
    return found if wanted <= set(found) else {}


def _of_this_node(proc: "Proc", order: LoadFrom, wanted: set[int]) -> Images:
    found: Images = {}
    for rank in wanted if order.whole else {proc.rank}:
        slot = proc.machine.arena.holding(proc.job, rank, order.save)
        if slot is not None:
            assert slot.seal.state is SlotState.DIGESTED, f"{proc} is sent to read {slot.name} before it is digested"
            found[rank] = slot.seal.leaves_digest
    if wanted - set(found):
        raise ElsewhereError(f"images of ranks {sorted(wanted - set(found))[:8]} are needed")
    return found
