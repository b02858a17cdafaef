"""Segments of other nodes' ranks that this node copies for one load, by a rule: each lies where its rank runs. Pure.

The order is the same for all nodes, whatever their number. The seals of the segments of a node's ranks name the ranks
that saved slices of what they hold alike. From these and the topology each node knows which segments its ranks need,
and copies those that it lacks from the nodes of their ranks. The coordinator receives one report. The copies go when
the load is agreed: they are where they were. Those of a load that is refused stay until another is agreed, something
newer is staged or memory is short, and a coordinator that asks what lies here receives them in the report: their own
node may be lost.
"""

from ckptd.core import events as ev
from ckptd.core.actions import Action
from ckptd.core.links import Links
from ckptd.core.node.fetch import Fetching
from ckptd.core.node.membership import Membership
from ckptd.core.node.ranks import LocalRanks
from ckptd.core.node.slots import SlotTable
from ckptd.core.policy import Policy
from ckptd.shared.base.ids import JobKey
from ckptd.shared.format.rank_members import ranks_in
from ckptd.shared.protocol.messages import Tier
from ckptd.shared.protocol.rank_sets import runs_of


class Gathering(Fetching):
    """One order at a time: the newest."""

    def __init__(  # noqa: PLR0913, PLR0917 - the node's parts that it asks
        self,
        job: JobKey,
        node: str,
        policy: Policy,
        links: Links,
        membership: Membership,
        ranks: LocalRanks,
        slots: SlotTable,
    ) -> None:
        super().__init__(job, node, policy, links)
        self._membership = membership
        self._ranks = ranks
        self._slots = slots
        self._order: ev.GatherOrdered | None = None
        self._failures: dict[str, list[int]] = {}  # ranks, by why their segments did not come
        self._copied = 0

    def ordered(self, order: ev.GatherOrdered) -> list[Action]:
        """Begins, or begins again."""
        self.forget()
        self._order = order
        topology, own, world_size = self._membership.topology, set(self._ranks.admitted), self._ranks.world_size
        homes = [topology.peers[index].node for index in topology.homes] if topology is not None else []
        slots = self._slots.holding(order.save)
        here = {slot.rank for slot in slots if not slot.unreadable}
        sets = {said.members for s in slots if s.rank in own for said in s.attestations if not said.only_told}
        needed = own.union(rank for members in sets for rank in ranks_in(members) if rank < world_size)
        self._copied = len(needed - own)
        actions: list[Action] = []
        for rank in sorted(needed - here):
            if rank >= len(homes) or homes[rank] == self._node:
                known = rank < len(homes)
                why = "it is not in the memory of its own node" if known else "its node is not known here yet"
                self._fail(rank, why)
                continue
            fetch = ev.FetchOrdered(
                job=self._job, node=order.node, rank=rank, save=order.save, tier=Tier.PEER, holder=homes[rank]
            )
            actions += self.order(fetch, None)
        return [*actions, *self._reported()]

    def forget(self) -> None:
        """The load is over."""
        super().forget()
        self._order, self._failures, self._copied = None, {}, 0

    def fetched(self, event: ev.SegmentFetched) -> list[Action] | None:
        """A segment that was copied for the load lies here now, or cannot be had; None for any other."""
        key = event.save, event.rank
        if key not in self._orders and key not in self._pulling:
            return None
        self.ended(event)
        taken = self._slots.fetched(event, event.seal, copied=True) if event.seal is not None else []
        if event.problem:
            self._fail(event.rank, event.problem)
        return [*taken, *self._reported()]

    def _failed(self, order: ev.FetchOrdered, problem: str) -> list[Action]:
        self.drop(order)
        self._fail(order.rank, problem)
        return self._reported()

    def _fail(self, rank: int, problem: str) -> None:
        self._failures.setdefault(problem, []).append(rank)

    def _reported(self) -> list[Action]:
        order = self._order
        if order is None or self._orders:
            return []
        self._order = None
        failures = tuple(ev.GatherFailure(runs_of(sorted(ranks)), why) for why, ranks in self._failures.items())
        fact = ev.SegmentsGathered(
            job=self._job, save=order.save, attempt=order.attempt, copied=self._copied, failures=failures
        )
        return [self._membership.report(fact)]
