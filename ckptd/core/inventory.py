"""What lies at a node, as it tells its coordinator, and others who ask. Pure."""

from collections.abc import Iterable, Mapping

from ckptd.core import events as ev
from ckptd.core.actions import ToNode
from ckptd.core.slots import SlotTable
from ckptd.protocol.ids import JobKey, SaveId


def inventory(
    job: JobKey, incarnation: int, slots: SlotTable, pieces: Iterable[ev.Piece], former: tuple[str, ...]
) -> ev.NodeHas:
    """Every segment and every piece; former: nodes that the job ran on before."""
    segments = tuple(ev.HeldSegment(s.save, s.rank, s.world_size, s.nbytes) for s in slots if s.save)
    held = tuple(
        ev.HeldPiece(
            *(p.save, p.epoch, p.scheme, p.index),
            ranks=tuple(tuple(seal.rank for seal in column.seals) for column in p.columns),
            members=tuple(column.node for column in p.columns),
        )
        for p in pieces
    )
    return ev.NodeHas(job=job, incarnation=incarnation, segments=segments, pieces=held, former=former)


def asked_of(
    order: ev.SealAsked | ev.PieceAsked,
    job: JobKey,
    node: str,
    slots: SlotTable,
    pieces: Mapping[tuple[SaveId, int], ev.Piece],
) -> ToNode:
    """The answer to a node of the job that is to copy a segment, or to rebuild one."""
    told: ev.NodeMessage
    if isinstance(order, ev.SealAsked):
        seal = next((slot.seal for slot in slots.holding(order.save) if slot.rank == order.rank), None)
        told = ev.SealTold(job=job, node=node, save=order.save, rank=order.rank, seal=seal)
    else:
        piece = pieces.get((order.save, order.epoch))
        told = ev.PieceTold(job=job, node=node, save=order.save, epoch=order.epoch, piece=piece)
    return ToNode(job=job, node=order.node, message=told)
