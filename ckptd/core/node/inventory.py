"""What lies on a node, as it reports it to the coordinator and to its peers. Pure."""

from collections.abc import Container

from ckptd.core import events as ev
from ckptd.core.actions import Action, ToNode
from ckptd.core.node.parity import Protection
from ckptd.core.node.slots import SlotTable
from ckptd.shared.base.ids import JobKey, SaveId


def segments_of(slots: SlotTable, forced: Container[SaveId]) -> tuple[ev.HeldSegment, ...]:
    """Every segment in a slot of the node. What was copied for a load is reported with the others from here on.

    forced: saves that a rank wants durable for sure.
    """
    for slot in slots:
        slot.reported = slot.copied
    return tuple(
        ev.HeldSegment(slot.save, slot.rank, slot.world_size, slot.nbytes, slot.attestations, slot.save in forced)
        for slot in slots
        if slot.save
    )


def chunks_of(protection: Protection) -> tuple[ev.HeldChunk, ...]:
    """Every parity chunk that is sealed on the node."""
    return tuple(
        ev.HeldChunk(
            *(p.save, p.epoch, p.scheme, p.index),
            ranks=tuple(tuple(seal.rank for seal in column.seals) for column in p.columns),
            members=tuple(column.node for column in p.columns),
        )
        for p in protection.chunks.values()
    )


class PeerAnswers:
    """What other nodes ask of this one's segments and parity, to copy or to rebuild.

    They learn of a segment once its digests are taken: an earlier answer would make the peer treat it as lost.
    """

    def __init__(self, job: JobKey, node: str, slots: SlotTable, protection: Protection) -> None:
        self._job = job
        self._node = node
        self._slots = slots
        self._protection = protection
        self._waiting: list[ev.SealAsked] = []

    def seal_asked(self, order: ev.SealAsked) -> list[Action]:
        """At once, if it can be."""
        self._waiting = [*(other for other in self._waiting if other != order), order]
        return self.settled()

    def chunk_requested(self, order: ev.ChunkRequested) -> list[Action]:
        """At once: it lies here, or it does not."""
        chunk = self._protection.chunks.get((order.save, order.epoch))
        told = ev.ChunkReported(job=self._job, node=self._node, save=order.save, epoch=order.epoch, chunk=chunk)
        return [ToNode(job=self._job, node=order.node, message=told)]

    def settled(self) -> list[Action]:
        """Answers of whom waits: digests are taken, or cannot be, or the slot holds something else by now."""
        asked, self._waiting = self._waiting, []
        actions: list[Action] = []
        for order in asked:
            slot = next((s for s in self._slots.holding(order.save) if s.rank == order.rank), None)
            if slot is not None and slot.seal is None and not slot.unreadable:
                self._waiting.append(order)
                continue
            seal = slot.seal if slot is not None else None
            told = ev.SealTold(job=self._job, node=self._node, save=order.save, rank=order.rank, seal=seal)
            actions.append(ToNode(job=self._job, node=order.node, message=told))
        return actions
