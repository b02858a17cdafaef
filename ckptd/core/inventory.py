"""What lies on a node, as it tells the coordinator and its peers. Pure."""

from ckptd.core import events as ev
from ckptd.core.protection import Protection
from ckptd.core.slots import SlotTable
from ckptd.protocol.ids import JobKey


def segments_of(slots: SlotTable) -> tuple[ev.HeldSegment, ...]:
    """Every segment in a slot of the node."""
    return tuple(
        ev.HeldSegment(slot.save, slot.rank, slot.world_size, slot.nbytes, slot.shares) for slot in slots if slot.save
    )


def pieces_of(protection: Protection) -> tuple[ev.HeldPiece, ...]:
    """Every piece of parity that is sealed on the node."""
    return tuple(
        ev.HeldPiece(
            *(p.save, p.epoch, p.scheme, p.index),
            ranks=tuple(tuple(seal.rank for seal in column.seals) for column in p.columns),
            members=tuple(column.node for column in p.columns),
        )
        for p in protection.pieces.values()
    )


def told(
    job: JobKey, node: str, order: ev.SealAsked | ev.PieceAsked, slots: SlotTable, protection: Protection
) -> ev.SealTold | ev.PieceTold:
    """The answer to a node of the job that is to copy a segment, or to rebuild one."""
    if isinstance(order, ev.SealAsked):
        seals = [slot.seal for slot in slots.holding(order.save) if slot.rank == order.rank]
        return ev.SealTold(job=job, node=node, save=order.save, rank=order.rank, seal=seals[0] if seals else None)
    piece = protection.pieces.get((order.save, order.epoch))
    return ev.PieceTold(job=job, node=node, save=order.save, epoch=order.epoch, piece=piece)
