"""Who coordinates a job, on which nodes it runs, and which doors a session stands at: one node's view. Pure."""

from ckptd.core import events as ev
from ckptd.core.actions import Action, KeepTopology, MeetPeers, ToNode
from ckptd.core.node.ranks import LocalRanks
from ckptd.core.node.standing import Standing
from ckptd.shared.base.ids import JobKey
from ckptd.shared.protocol.topology import Peer, Topology


class Membership:
    """Whose orders count here, and who is told what happens here."""

    def __init__(self, job: JobKey, node: str, ranks: LocalRanks, standing: Standing) -> None:
        self._job = job
        self._standing = standing
        self._node = node
        self._ranks = ranks
        self.session = ""  # the one that was opened last
        self.coordinator = node  # whose orders count
        self.topology: Topology | None = None  # of the session; None: this node alone
        self.epoch = 0  # the incarnation in which this topology began
        self.since = 0  # the epoch in which the job first came to this arena
        self.former: tuple[str, ...] = ()  # nodes of the sessions before, as far back as something is not safe since
        self._doors: set[str] = set()  # nodes that were told who lives here
        self._visits: dict[str, str] = {}  # sessions at the door that use other nodes -> who may come to coordinate
        self._down: set[str] = set()  # peers that do not answer

    def attached(self, event: ev.RankAttached) -> list[Action]:
        """A rank stands at the door."""
        meet = self._meet(event.topology.peers) if event.topology is not None else []
        introductions = [self._introduce(event, peer.node) for peer in self._outside(event)]
        return [*meet, *introductions, *self._knock(event)]

    def is_of(self, event: ev.RankAttached) -> bool:
        """Whether the rank is of the session that was opened last, as far as is known: it may have missed a load.

        Ranks of others are refused here: the door of their session may not know that it is over.
        """
        return event.session == self.session if self.session else event.topology == self.topology

    def opened(self, order: ev.SessionOpened, settled: int) -> list[Action] | None:
        """Another session, perhaps on other nodes, is the job now; None when it is the one that was.

        settled: the newest incarnation that has a checkpoint as safe as it was to become.
        """
        same = order.session == self.session and order.node == self.coordinator
        if same and (order.topology is None or order.epoch == self.epoch):
            return None
        if order.session != self.session and self.topology is not None:
            before = self.former if settled < self.epoch else ()
            self.former = tuple(sorted({*before, *self.topology.nodes}))
        self.session, self.coordinator = order.session, order.node
        self.topology, self.epoch = order.topology, order.epoch
        self._visits.pop(order.session, None)
        meet = self._meet(order.outside)
        if order.topology is None:
            return meet
        self.since = self.since or order.epoch
        keep = KeepTopology(
            job=self._job,
            topology=order.topology,
            epoch=order.epoch,
            since=self.since,
            outside=order.outside,
            former=self.former,
        )
        return [*meet, keep]

    def peer_up(self, event: ev.PeerUp) -> list[Action]:
        """Whatever it was told before may be lost."""
        node = event.node
        self._down.discard(node)
        actions: list[Action] = []
        if node in self._doors and node != self.coordinator:
            actions += [self.report(found, node) for found in self._ranks.live.values()]
        for local in self._ranks.waiting.values():
            if _coordinator_of(local.attached, self._node) == node:
                actions += self._knock(local.attached)
            if any(peer.node == node for peer in self._outside(local.attached)):
                actions.append(self._introduce(local.attached, node))
        for session, door in self._visits.items():
            actions += self._visit(session, door) if door == node else []
        return actions

    @property
    def succeeds(self) -> bool:
        """Whether this node is the first that answers, after the coordinator."""
        nodes = self.topology.nodes if self.topology is not None else ()
        answering = [node for node in nodes if node == self._node or node not in self._down | {self.coordinator}]
        return bool(answering) and answering[0] == self._node

    @property
    def down(self) -> frozenset[str]:
        """Nodes that do not answer this one."""
        return frozenset(self._down)

    @property
    def nodes(self) -> tuple[str, ...]:
        """Where the session runs."""
        return self.topology.nodes if self.topology is not None else (self._node,)

    def has(self) -> ev.NodeHas:
        """What this node knows of who is where; what lies here is to be added."""
        return ev.NodeHas(
            job=self._job,
            incarnation=self._standing.incarnation,
            former=self.former,
            session=self.session,
            live=tuple(self._ranks.live),
            epoch=self.epoch,
            since=self.since,
        )

    def emptied(self) -> list[Action]:
        """What a coordinator elsewhere is told when all that lies here is given up by hand."""
        return [self.report(self.has(), self.coordinator)] if self.coordinator != self._node else []

    def told(self, node: str) -> None:
        """It was told who lives here, so it must hear who is gone."""
        self._doors.add(node)

    def peer_down(self, event: ev.PeerDown) -> list[Action]:
        """It is not waited for."""
        self._down.add(event.node)
        return []

    def report(self, event: ev.Fact, to: str | None = None) -> Action:
        """To the coordinator, or to one that may come to be it."""
        report = ev.Report(job=self._job, node=self._node, event=event)
        return ToNode(job=self._job, node=to, message=report)

    def report_to_all(self, event: ev.Fact) -> list[Action]:
        """To the coordinator, and to those that may come to be it."""
        self._doors |= {self.coordinator, *self._candidates}
        return [self.report(event, node) for node in dict.fromkeys((self.coordinator, *self._candidates))]

    def report_gone(self, event: ev.Fact) -> list[Action]:
        """To all that were ever told that the rank lives: a door that misses it would wait for the rank for ever."""
        told = dict.fromkeys((self.coordinator, *self._candidates, *sorted(self._doors)))
        return [self.report(event, node) for node in told]

    @property
    def _candidates(self) -> list[str]:
        return [
            *(_coordinator_of(local.attached, self._node) for local in self._ranks.waiting.values()),
            *self._visits.values(),
        ]

    def _knock(self, event: ev.RankAttached) -> list[Action]:
        """Tells who may come to coordinate that the rank stands at the door, and who lives here already."""
        door = _coordinator_of(event, self._node)
        self._doors.add(door)
        outside, known, store_id = self._outside(event), self._standing.incarnation, self._standing.store_id
        knocked = ev.Knocked(
            job=self._job, session=event.session, outside=outside, incarnation=known, store_id=store_id
        )
        tells = outside or ((known or store_id) and not event.incarnation)
        return [
            *(self.report(found, door) for found in self._ranks.live.values()),
            *([self.report(knocked, door)] if tells else []),
            self.report(event, door),
        ]

    def _outside(self, event: ev.RankAttached) -> tuple[Peer, ...]:
        """Nodes that the job ran on before and the rank's session does not use."""
        if event.session == self.session or self.topology is None:
            return ()
        inside = {peer.node for peer in event.topology.peers} if event.topology else set()
        gone = inside | self._down | {self._node}
        return tuple(peer for peer in self.topology.peers if peer.node not in gone)

    def _introduce(self, event: ev.RankAttached, node: str) -> Action:
        topology = event.topology or Topology((Peer(self._node, "alone", "", "-" * 40),), (0,))
        introduced = ev.Introduced(job=self._job, node=self._node, session=event.session, topology=topology)
        return ToNode(job=self._job, node=node, message=introduced)

    def introduced(self, order: ev.Introduced) -> list[Action]:
        """A session that does not use this node has come: who may coordinate it is told who lives here."""
        door = order.topology.coordinator
        self._visits[order.session] = door
        return [*self._meet(order.topology.peers), *self._visit(order.session, door)]

    def _visit(self, session: str, door: str) -> list[Action]:
        known = self._standing
        visited = ev.Visited(job=self._job, session=session, incarnation=known.incarnation, store_id=known.store_id)
        self._doors.add(door)
        facts: list[ev.Fact] = [*self._ranks.live.values(), visited]
        return [self.report(fact, door) for fact in facts]

    def kept(self, event: ev.TopologyKept) -> list[Action]:
        """What an earlier life of this daemon knew."""
        self.topology, self.epoch, self.since = event.topology, event.epoch, event.since
        self.coordinator, self.former = event.topology.coordinator, event.former
        return self._meet((*event.topology.peers, *event.outside))

    def _meet(self, peers: tuple[Peer, ...]) -> list[Action]:
        others = tuple(peer for peer in peers if peer.node != self._node)
        return [MeetPeers(job=self._job, peers=others)] if others else []


def _coordinator_of(event: ev.RankAttached, node: str) -> str:
    """The node whose daemon coordinates the session that the rank belongs to."""
    return event.topology.coordinator if event.topology is not None else node
