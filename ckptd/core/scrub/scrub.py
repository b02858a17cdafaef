"""The scrubs of one job in one daemon: of this node's memory, and, where it coordinates, of the store. Pure."""

from collections.abc import Callable
from typing import Any

from ckptd.core import events as ev
from ckptd.core.actions import Action, Mend
from ckptd.core.coordinator.coordinator import Coordinator
from ckptd.core.coordinator.scrub_order import Pace
from ckptd.core.links import Links
from ckptd.core.node.node import JobNode
from ckptd.core.policy import Policy
from ckptd.core.scrub.findings import Findings, Spot
from ckptd.core.scrub.memory import MemoryScrub
from ckptd.core.scrub.store import StoreScrub
from ckptd.shared.protocol.messages import Tier


class Paces:
    """The rates of a daemon: all its jobs share them."""

    def __init__(self, policy: Policy) -> None:
        self.memory, self.store = Pace(policy.scrub_memory), Pace(policy.scrub_store)


class Scrub:
    """Gets the events of the job, after its two halves."""

    def __init__(  # noqa: PLR0913, PLR0917 - the job's parts
        self, node: JobNode, coordinator: Coordinator, links: Links, policy: Policy, paces: Paces,
        quiet: Callable[[], bool],
    ) -> None:  # fmt: skip
        self._job, self._node, self._coordinator = node.job, node, coordinator
        self.findings = Findings(node)
        self.memory = MemoryScrub(node, links, self.findings, paces.memory, policy.scrub_memory_every_s)
        self.store = StoreScrub(coordinator, self.findings, paces.store, policy.scrub_store_every_s, quiet)
        self.on = bool(policy.scrub_memory or policy.scrub_store)
        self.due: float | None = None  # when tick has something to do
        self._mending: int | None = None  # the order that is carried out here
        memory, store = self.memory, self.store
        self.events: dict[type[ev.Event], Callable[[Any, float], list[Action] | None]] = {
            ev.BlockScrubbed: memory.scrubbed,
            ev.BlockCopied: memory.copied,
            ev.SegmentFetched: memory.fetched,
            ev.Encoded: memory.encoded,
            ev.PieceScrubbed: store.scrubbed,
            ev.MendOrdered: self._ordered,
            ev.MendEnded: self._ended_here,
            ev.PeerDown: store.went,
            ev.DigestsSealed: lambda event, now: memory.is_new(event.save, now),
            ev.CommitEnded: lambda event, now: None if event.problem else store.is_new(event.save, now),
            **dict.fromkeys((ev.SlotAdopted, ev.ChunkAdopted, ev.StoreScanned), lambda _event, _now: None),
        }

    def follow(self, event: ev.Event, now: float) -> list[Action]:
        """What to do about an event. One that is of no concern costs nothing."""
        if isinstance(event, ev.Report):
            return self._reported(event) if isinstance(event.event, ev.ScrubFound | ev.MendEnded) else []
        if (handler := self.events.get(type(event))) is None:
            return []
        actions = handler(event, now)
        self._plan()
        return actions or []

    def tick(self, now: float) -> list[Action]:
        """What is due by now."""
        if self.due is None or now < self.due:
            return []
        actions: list[Action] = []
        for scrub in (self.memory, self.store):
            if (due := scrub.due()) is not None and due <= now:
                actions += scrub.turn(now)
        self._plan()
        return actions

    def _plan(self) -> None:
        if self.on:
            store = self.store.due() if self._coordinates else None
            self.due = min((due for due in (self.memory.due(), store) if due is not None), default=None)

    @property
    def _coordinates(self) -> bool:
        return self._node.coordinator == self._node.node

    # --- between nodes

    def _ordered(self, order: ev.MendOrdered, _now: float) -> list[Action]:
        """Images of a checkpoint on the store are to be written again here, one order at a time."""
        if order.node != self._node.coordinator or order.number == self._mending:
            return []
        if self._mending is not None:
            busy = ev.MendEnded(
                job=self._job, number=order.number, save=order.save, lost=order.ranks,
                problem=f"node {self._node.node} still writes what it was to write before",
            )  # fmt: skip
            return [self._node.membership.report(busy)]
        self._mending = order.number
        here = {slot.rank: slot.name for slot in self._node.slots.holding(order.save) if slot.digested}
        slots = tuple((rank, here[rank]) for rank in order.ranks if rank in here)
        return [Mend(job=self._job, number=order.number, save=order.save, ranks=order.ranks, slots=slots)]

    def _ended_here(self, event: ev.MendEnded, _now: float) -> list[Action]:
        """For the coordinator."""
        self._mending = None
        return [self._node.membership.report(event)]

    def _reported(self, report: ev.Report) -> list[Action]:
        match report.event:
            case ev.ScrubFound() as found:
                self.findings.heard(report.node, found)
            case ev.MendEnded() as ended:
                actions = self.store.mended(report.node, ended)
                self._plan()
                return actions
        return []

    # --- what others see

    @property
    def damaged(self) -> list[tuple[Spot, ev.ScrubFound]]:
        """Damage that is still there, as far as is known here."""
        return [(spot, found) for spot, found in sorted(self.findings.damaged.items(), key=str) if self._lasts(spot)]

    def _lasts(self, spot: Spot) -> bool:
        facts = self._coordinator.facts
        if spot.tier is Tier.PFS:
            return spot.save in facts.on_store
        if spot.node == self._node.node:
            return self.memory.is_there(spot.tier, spot.save, spot.rank)
        return spot.save in facts.places.get(spot.node, {})
