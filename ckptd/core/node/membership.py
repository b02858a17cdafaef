"""The coordinator of a job, its nodes, and where its sessions wait for admission: one node's view. Pure."""

from ckptd.core import events as ev
from ckptd.core.actions import Action, KeepTopology, MeetPeers, ToNode
from ckptd.core.links import Links
from ckptd.core.node.ranks import LocalRanks
from ckptd.core.node.standing import Standing
from ckptd.core.redundancy_sets import set_of
from ckptd.shared.base.ids import JobKey, SetName
from ckptd.shared.format.set_places import set_folder
from ckptd.shared.protocol.topology import Peer, Topology


class Membership:
    """The coordinator whose orders count here, and the nodes that receive reports from here."""

    def __init__(self, job: JobKey, node: str, ranks: LocalRanks, standing: Standing, links: Links) -> None:
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
        self._informed: set[str] = set()  # nodes that know the live ranks here
        self._pending_sessions: dict[str, str] = {}  # pending sessions on other nodes -> candidate
        self._links = links

    def attached(self, event: ev.RankAttached) -> list[Action]:
        """A rank waits to join."""
        meet = self._meet(event.topology.peers) if event.topology is not None else []
        announcements = [self._announce(event, peer.node) for peer in self._outside(event)]
        return [*meet, *announcements, *self._request_join(event)]

    def is_of(self, event: ev.RankAttached) -> bool:
        """Whether the rank is of the session that was opened last, as far as is known: it may have missed a load.

        Ranks of others are refused here: the coordinator of their session may not know that it is over.
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
        self._pending_sessions.pop(order.session, None)
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
        """Earlier messages to it may be lost."""
        node = event.node
        actions: list[Action] = []
        if node in self._informed and node != self.coordinator:
            actions += [self.report(found, node) for found in self._ranks.live.values()]
        for local in self._ranks.waiting.values():
            if _coordinator_of(local.attached, self._node) == node:
                actions += self._request_join(local.attached)
            if any(peer.node == node for peer in self._outside(local.attached)):
                actions.append(self._announce(local.attached, node))
        for session, candidate in self._pending_sessions.items():
            actions += self._report_former(session, candidate) if candidate == node else []
        return actions

    @property
    def succeeds(self) -> bool:
        """Whether this node is the first that answers, after the coordinator."""
        nodes = self.topology.nodes if self.topology is not None else ()
        answering = [node for node in nodes if node == self._node or node not in self._links.down | {self.coordinator}]
        return bool(answering) and answering[0] == self._node

    @property
    def down(self) -> set[str]:
        """Nodes that do not answer this one."""
        return self._links.down

    @property
    def nodes(self) -> tuple[str, ...]:
        """Where the session runs."""
        return self.topology.nodes if self.topology is not None else (self._node,)

    @property
    def folder(self) -> SetName:
        """The directory of this node's redundancy set in a checkpoint that is drained now."""
        topology = self.topology
        nodes = (self._node,) if topology is None else set_of(topology.peers, topology.set_size, self._node)
        return set_folder(self.epoch, nodes)

    def has(self) -> ev.NodeHas:
        """What this node knows of which rank is where; what lies here is to be added."""
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
        """The report to a coordinator elsewhere when all memory here is given up by hand."""
        return [self.report(self.has(), self.coordinator)] if self.coordinator != self._node else []

    def told(self, node: str) -> None:
        """It knows the live ranks here, so it must receive the end of each."""
        self._informed.add(node)

    def report(self, event: ev.Fact, to: str | None = None) -> Action:
        """To the coordinator, or to one that may come to be it."""
        report = ev.Report(job=self._job, node=self._node, event=event)
        return ToNode(job=self._job, node=to, message=report)

    def report_to_all(self, event: ev.Fact) -> list[Action]:
        """To the coordinator, and to those that may come to be it."""
        self._informed |= {self.coordinator, *self._candidates}
        return [self.report(event, node) for node in dict.fromkeys((self.coordinator, *self._candidates))]

    def report_gone(self, event: ev.Fact) -> list[Action]:
        """To all that know the rank: a coordinator that misses it would wait for the rank for ever."""
        told = dict.fromkeys((self.coordinator, *self._candidates, *sorted(self._informed)))
        return [self.report(event, node) for node in told]

    @property
    def _candidates(self) -> list[str]:
        return [
            *(_coordinator_of(local.attached, self._node) for local in self._ranks.waiting.values()),
            *self._pending_sessions.values(),
        ]

    def _request_join(self, event: ev.RankAttached) -> list[Action]:
        """Reports the rank that waits to join, and the living ranks here, to nodes that may come to coordinate."""
        candidate = _coordinator_of(event, self._node)
        self._informed.add(candidate)
        outside, known, store_id = self._outside(event), self._standing.incarnation, self._standing.store_id
        request = ev.JoinRequested(
            job=self._job, session=event.session, outside=outside, incarnation=known, store_id=store_id
        )
        notify = outside or ((known or store_id) and not event.incarnation)
        return [
            *(self.report(found, candidate) for found in self._ranks.live.values()),
            *([self.report(request, candidate)] if notify else []),
            self.report(event, candidate),
        ]

    def _outside(self, event: ev.RankAttached) -> tuple[Peer, ...]:
        """Nodes that the job ran on before and the rank's session does not use."""
        if event.session == self.session or self.topology is None:
            return ()
        inside = {peer.node for peer in event.topology.peers} if event.topology else set()
        gone = inside | self._links.down | {self._node}
        return tuple(peer for peer in self.topology.peers if peer.node not in gone)

    def _announce(self, event: ev.RankAttached, node: str) -> Action:
        topology = event.topology or Topology((Peer(self._node, "alone", "", "-" * 40),), (0,))
        session_announced = ev.SessionAnnounced(
            job=self._job, node=self._node, session=event.session, topology=topology
        )
        return ToNode(job=self._job, node=node, message=session_announced)

    def session_announced(self, order: ev.SessionAnnounced) -> list[Action]:
        """A session that does not use this node has come: reports the live ranks here to its candidate coordinator."""
        candidate = order.topology.coordinator
        self._pending_sessions[order.session] = candidate
        return [*self._meet(order.topology.peers), *self._report_former(order.session, candidate)]

    def _report_former(self, session: str, candidate: str) -> list[Action]:
        known = self._standing
        former = ev.FormerNodeReported(
            job=self._job, session=session, incarnation=known.incarnation, store_id=known.store_id
        )
        self._informed.add(candidate)
        facts: list[ev.Fact] = [*self._ranks.live.values(), former]
        return [self.report(fact, candidate) for fact in facts]

    def kept(self, event: ev.TopologyKept) -> list[Action]:
        """What an earlier process of this daemon knew."""
        self.topology, self.epoch, self.since = event.topology, event.epoch, event.since
        self.coordinator, self.former = event.topology.coordinator, event.former
        return self._meet((*event.topology.peers, *event.outside))

    def _meet(self, peers: tuple[Peer, ...]) -> list[Action]:
        others = tuple(peer for peer in peers if peer.node != self._node)
        return [MeetPeers(job=self._job, peers=others)] if others else []


def _coordinator_of(event: ev.RankAttached, node: str) -> str:
    """The node whose daemon coordinates the session that the rank belongs to."""
    return event.topology.coordinator if event.topology is not None else node
