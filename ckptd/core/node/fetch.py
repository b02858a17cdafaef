"""Segments that this node gets from elsewhere for a load: from a peer's arena, or rebuilt from parity. Pure."""

from ckptd.core import events as ev
from ckptd.core.actions import Action, FetchSegment, ToNode
from ckptd.core.links import Links
from ckptd.core.policy import Policy
from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.format.slot import Seal
from ckptd.shared.protocol.messages import Tier
from ckptd.shared.protocol.parity_types import ParityChunk


class Fetching:
    """What was ordered and has not ended. First the holder sends its seal, or its chunk; then it is pulled."""

    def __init__(self, job: JobKey, node: str, policy: Policy, links: Links) -> None:
        self._job = job
        self._node = node
        self._patience_s = policy.outside_wait_s
        self._links = links
        self._late: dict[tuple[SaveId, int], float] = {}  # when the wait for a holder, or for sources, is over
        self._orders: dict[tuple[SaveId, int], ev.FetchOrdered] = {}
        self._pulling: set[tuple[SaveId, int]] = set()
        self._described: dict[tuple[SaveId, int], tuple[Seal, ParityChunk]] = {}  # rebuilds that wait for sources

    @property
    def saves(self) -> set[SaveId]:
        """Saves of which something is on its way."""
        return {save for save, _ in self._orders}

    @property
    def nodes(self) -> set[str]:
        """From which something is on its way."""
        orders = self._orders.values()
        return {node for o in orders for node in (o.holder, *(n for _, n in (*o.homes, *o.chunks)))}

    def order(self, order: ev.FetchOrdered, own: ParityChunk | None) -> list[Action]:
        """Begins, or continues when ordered again. own: this node's chunk of that save and epoch, if it has one."""
        key = (order.save, order.rank)
        if key in self._pulling:
            self._orders[key] = order
            return []
        self._described.pop(key, None)
        self._orders[key] = order
        if order.tier is Tier.PEER:
            return [self._ask(order, ev.SealAsked(job=self._job, node=self._node, save=order.save, rank=order.rank))]
        if own is not None and any(seal.rank == order.rank for column in own.columns for seal in column.seals):
            return self._rebuild(order, own)  # else it is of another set: the rank has moved
        asked = ev.ChunkRequested(job=self._job, node=self._node, save=order.save, epoch=order.epoch)
        return [self._ask(order, asked)]

    def _ask(self, order: ev.FetchOrdered, message: ev.Message) -> Action:
        return ToNode(job=self._job, node=order.holder, message=message)

    def sealed(self, told: ev.SealTold) -> list[Action]:
        """The holder has answered."""
        order = self._orders.get((told.save, told.rank))
        if order is None or order.tier is not Tier.PEER or order.holder != told.node:
            return []
        if told.seal is None:
            return self._failed(order, f"{told.node} has no such segment")
        return self._pull(order, told.seal, None)

    def described(self, told: ev.ChunkReported) -> list[Action]:
        """The holder of a chunk has answered, for all segments that wait for it."""
        waiting = [
            o
            for o in self._orders.values()
            if (o.save, o.epoch, o.holder, o.tier) == (told.save, told.epoch, told.node, Tier.REBUILT)
        ]
        actions: list[Action] = []
        for order in waiting:
            if told.chunk is None:
                actions += self._failed(order, f"{told.node} has no such parity")
            else:
                actions += self._rebuild(order, told.chunk)
        return actions

    def _rebuild(self, order: ev.FetchOrdered, chunk: ParityChunk) -> list[Action]:
        seals = [seal for column in chunk.columns for seal in column.seals if seal.rank == order.rank]
        if not seals:
            return self._failed(order, f"the parity of {order.holder} does not cover rank {order.rank}")
        if not self._reaches_sources(order):
            self._forget_waits((order.save, order.rank))
            self._described[order.save, order.rank] = seals[0], chunk
            return []
        return self._pull(order, seals[0], chunk)

    def _reaches_sources(self, order: ev.FetchOrdered) -> bool:
        return {node for _, node in (*order.homes, *order.chunks)} <= self._links.up

    def _rebuild_described(self, keys: list[tuple[SaveId, int]]) -> list[Action]:
        return [action for key in keys for action in self._pull(self._orders[key], *self._described.pop(key))]

    def _forget_waits(self, key: tuple[SaveId, int]) -> None:
        self._described.pop(key, None)
        self._late.pop(key, None)

    def _pull(self, order: ev.FetchOrdered, seal: Seal, chunk: ParityChunk | None) -> list[Action]:
        key = (order.save, order.rank)
        if key in self._pulling:
            return []
        if seal.rank != order.rank or order.rank >= seal.world_size:
            return self._failed(order, f"its seal is of rank {seal.rank} of {seal.world_size}")
        self._pulling.add(key)
        fetch = FetchSegment(
            job=self._job,
            rank=order.rank,
            save=order.save,
            tier=order.tier,
            holder=order.holder,
            seal=seal,
            chunk=chunk,
            homes=order.homes,
            chunks=order.chunks,
        )
        return [fetch]

    def ended(self, event: ev.SegmentFetched) -> None:
        """It lies here now, or cannot be had."""
        self._orders.pop((event.save, event.rank), None)
        self._pulling.discard((event.save, event.rank))
        self._forget_waits((event.save, event.rank))

    def next_deadline(self) -> float | None:
        """When to call tick."""
        if not self._orders:
            return None
        return min((self._late.get(key, 0.0) for key in self._unreached), default=None)

    def tick(self, now: float) -> list[Action]:
        """Gives up what lies at nodes that this one does not reach, though the coordinator does.

        A rebuild begins then without links to all of its sources: it may not need each of them.
        """
        unreached = self._unreached
        self._late = {key: self._late.get(key, now + self._patience_s) for key in unreached}
        late = [key for key in unreached if now >= self._late[key]]
        described = [key for key in late if key in self._described]
        lost = [self._orders[key] for key in late if key not in self._described]
        failed = [action for order in lost for action in self._failed(order, f"{order.holder} cannot be reached")]
        return failed + self._rebuild_described(described)

    @property
    def _unreached(self) -> list[tuple[SaveId, int]]:
        waiting = [key for key in self._orders if key not in self._pulling]
        return [key for key in waiting if key in self._described or self._orders[key].holder not in self._links.up]

    def peer_up(self, event: ev.PeerUp) -> list[Action]:
        """What it was asked, or has answered, may be lost."""
        node = event.node
        linked = [key for key in self._described if self._reaches_sources(self._orders[key])]
        actions = self._rebuild_described(linked)
        asked = [o for o in self._orders.values() if o.holder == node and (o.save, o.rank) not in self._pulling]
        return actions + [action for order in asked for action in self.order(order, None)]

    def forget(self) -> None:
        """The job is over; what is being pulled is given back when it comes."""
        self._orders.clear()
        self._described.clear()
        self._late.clear()

    def peer_down(self, event: ev.PeerDown) -> list[Action]:
        """Who was asked will not answer. What is being pulled ends by its own deadlines."""
        node = event.node
        lost = [o for o in self._orders.values() if o.holder == node and (o.save, o.rank) not in self._pulling]
        return [action for order in lost for action in self._failed(order, f"{node} does not answer")]

    def drop(self, order: ev.FetchOrdered) -> None:
        """It is not waited for any more."""
        self._orders.pop((order.save, order.rank), None)
        self._forget_waits((order.save, order.rank))

    def _failed(self, order: ev.FetchOrdered, problem: str) -> list[Action]:
        self.drop(order)
        event = ev.SegmentFetched(job=self._job, rank=order.rank, save=order.save, tier=order.tier, problem=problem)
        return [ToNode(job=self._job, message=ev.Report(job=self._job, node=self._node, event=event))]
