"""The coordinator of a job, its nodes, and where its sessions wait for admission: one node's view. Pure."""

from collections.abc import Sequence

from ckptd.core import events as ev
from ckptd.core.actions import Action, MeetPeers, ToNode
from ckptd.core.links import Links
from ckptd.core.node.known_topologies import KnownTopologies
from ckptd.core.node.ranks import LocalRanks
from ckptd.core.node.reports import Reports
from ckptd.core.node.standing import Standing
from ckptd.shared.base.ids import JobKey, SetName
from ckptd.shared.format.schemes import Scheme
from ckptd.shared.format.set_places import set_folder
from ckptd.shared.protocol.messages import Attached
from ckptd.shared.protocol.topology import Place, Topology


class Membership:
    """The coordinator whose orders count here, and the nodes that receive reports from here."""

    def __init__(self, job: JobKey, node: str, ranks: LocalRanks, standing: Standing, links: Links) -> None:
        self._job = job
        self._standing = standing
        self._node = node
        self._ranks = ranks
        self.session = ""  # the one that was opened last
        self.coordinator = node  # whose orders count
        self.topologies = KnownTopologies(job, node, links)
        self.reports = Reports(job, node, ranks, standing)
        self.epoch = 0  # the incarnation in which this topology began
        self.former: tuple[str, ...] = ()  # nodes of the sessions before, as far back as something is not safe since
        self._named: frozenset[str] = frozenset()  # those whose names the coordinator has
        self._informed: set[str] = set()  # nodes that know the live ranks here
        self._pending_sessions: dict[str, str] = {}  # pending sessions on other nodes -> candidate
        self._announced: dict[str, ev.AnnounceOrdered] = {}  # sessions that wait to join, for nodes that trust this one
        self._links = links

    @property
    def topology(self) -> Topology | None:
        """Of the session; None while this node does not have it."""
        return self.topologies.present

    @property
    def place(self) -> Place | None:
        """Of this node in it, which is known before it is."""
        return self.topologies.place

    def attached(self, event: ev.RankAttached) -> list[Action]:
        """A rank waits to join."""
        meet = self.reports.meet(event)
        return [*meet, *self._report_session(event.session)]

    def _report_session(self, session: str) -> list[Action]:
        """At once on this node; to others soon, together with other ranks that come."""
        candidate = self.reports.candidate(session)
        if candidate != self._node:
            self.reports.due.add(session)
            return []
        return self._attached_to(candidate, session)

    def _attached_to(self, node: str, session: str) -> list[Action]:
        """What the node must know of a session's ranks here."""
        self.reports.due.discard(session)
        self._informed.add(node)
        digest, former = self.topologies.digest_for(session), self._former(session)
        report = self.reports.attached(session, digest=digest, former=former)
        return [self.report(report, node)] if report is not None else []

    def _former(self, session: str) -> ev.Former:
        """Where the job ran before that session."""
        if session == self.session or not self.topologies.digest:
            return ev.Former()
        names = self.topology.nodes if self.topology is not None else ()
        down = self._links.down
        silent = [name for name in names if name in down] if down else []
        return ev.Former(self.topologies.digest, tuple(silent[: ev.MAX_SILENT]))

    def found(self, _: ev.RankFound) -> list[Action]:
        """A process lives here. Its coordinator learns it at once on this node, from others soon."""
        others = {self.coordinator, *self._candidates} - {self._node}
        self.reports.changed_for |= others
        if self._node not in (self.coordinator, *self._candidates):
            return []
        self._informed.add(self._node)
        return [self.report(self.reports.found(), self._node)]

    def is_of(self, event: ev.RankAttached) -> bool:
        """Whether the rank is of the session that was opened last, as far as is known: it may have missed a load.

        Ranks of others are refused here: the coordinator of their session may not know that it is over.
        """
        return event.session == (self.session or self.topologies.session or event.session)

    def opened(self, order: ev.SessionOpened, settled: int) -> list[Action] | None:
        """Another session, perhaps on other nodes, is the job now; None when it is the one that was.

        settled: the newest incarnation that has a checkpoint as safe as it was to become.
        """
        same = order.session == self.session and order.node == self.coordinator
        if same and order.epoch == self.epoch and self.topologies.has(order.place):
            return None
        if (order.session, order.node) != (self.session, self.coordinator):
            known = order.session != self.session and self.topologies.digest in order.former
            self._named = frozenset(self.topologies.nodes if known else ())
        if order.session != self.session and self.topologies.digest:
            before = self.former if settled < self.epoch else ()
            self.former = tuple(sorted({*before, *self.topologies.nodes}))
        self.session, self.coordinator, self.epoch = order.session, order.node, order.epoch
        self._pending_sessions.pop(order.session, None)
        self._announced.pop(order.session, None)
        return self.topologies.opened(order, self.former)

    def welcome(self, order: ev.SessionOpened, request: int, scheme: Scheme, *, client_started: bool) -> Attached:
        """The answer to a rank that is in: it belongs to the session of this order, as far as that is known here."""
        place = self.place
        return Attached(
            reply_to=request,
            node=self._node,
            incarnation=order.incarnation,
            run=order.run,
            store_id=order.store_id,
            client_started=client_started,
            scheme=scheme,
            ranks=list(place.ranks) if place is not None else [],
            nodes=place.nodes if place is not None else 0,
            known=list(order.known),
            warnings=list(order.warnings),
        )

    def topology_reported(self, event: ev.TopologyReported) -> list[Action]:
        """A node has sent a topology."""
        return self.topologies.reported(event, self.former)

    def topology_asked(self, event: ev.TopologyAsked) -> list[Action]:
        """A node asks for one."""
        return self.topologies.asked_by(event)

    def announce_ordered(self, order: ev.AnnounceOrdered) -> list[Action]:
        """Nodes of this node's last topology are to know of a session that does not use them."""
        self._announced[order.session] = order
        return [action for node in order.nodes for action in self._announce(order, node)]

    def _announce(self, order: ev.AnnounceOrdered, node: str) -> list[Action]:
        announced = ev.SessionAnnounced(
            job=self._job, node=self._node, session=order.session, coordinator=order.coordinator
        )
        return [ToNode(job=self._job, node=node, message=announced)]

    def session_announced(self, order: ev.SessionAnnounced) -> list[Action]:
        """A session that does not use this node has come: reports the live ranks here to its candidate coordinator."""
        candidate = order.coordinator.node
        if candidate == self._node or self.reports.waits(order.session):
            return []
        self._pending_sessions[order.session] = candidate
        meet = MeetPeers(job=self._job, peers=(order.coordinator,))
        return [meet, *self._report_former(order.session, candidate)]

    def _report_former(self, session: str, candidate: str) -> list[Action]:
        known = self._standing
        self._informed.add(candidate)
        former = ev.FormerNodeReported(
            job=self._job,
            session=session,
            living=self._ranks.living,
            incarnation=known.incarnation,
            store_id=known.store_id,
        )
        return [self.report(former, candidate)]

    def peer_up(self, event: ev.PeerUp) -> list[Action]:
        """Earlier messages to it may be lost."""
        node = event.node
        actions: list[Action] = []
        if node != self.coordinator:
            sessions = [session for session in self.reports.sessions if self.reports.candidate(session) == node]
            actions += [action for session in sessions for action in self._attached_to(node, session)]
            if node in self._informed and not sessions:
                actions.append(self.report(self.reports.found(), node))
        for order in self._announced.values():
            actions += self._announce(order, node) if node in order.nodes else []
        for session, candidate in self._pending_sessions.items():
            actions += self._report_former(session, candidate) if candidate == node else []
        return [*actions, *self.topologies.peer_up(node)]

    def coordinator_came(self) -> None:
        """Its daemon may be another one, which has no names."""
        self._named = frozenset()

    def resync(self, answer: ev.SessionOpened | None = None) -> list[Action]:
        """What its coordinator must know of the ranks here, reported before or not.

        answer: an order that followed from such a report: what it shows to have arrived is not sent again.
        """
        self._informed.add(self.coordinator)
        its, candidate = self.coordinator, self.reports.candidate
        sessions = [one for one in self.reports.sessions if one == self.session or candidate(one) == its]
        if answer is not None and self.reports.ranks_of(answer.session) <= set(answer.ranks):
            sessions = [one for one in sessions if one != answer.session]
        return [action for session in sessions for action in self._attached_to(self.coordinator, session)]

    @property
    def coordinates(self) -> bool:
        """Whether other nodes belong to a job that this one coordinates, or is about to."""
        return self.reports.meets_here or (self.topology is not None and self.coordinator == self._node)

    @property
    def correspondents(self) -> set[str]:
        """Nodes that coordinate, may come to, or know the ranks here from a time when they did."""
        return {self.coordinator, *self._candidates, *self._informed}

    def is_first(self, members: Sequence[str]) -> bool:
        """Whether this node is the first of these that answers, after the coordinator."""
        gone = self._links.down | {self.coordinator}
        return next((node for node in members if node == self._node or node not in gone), "") == self._node

    @property
    def down(self) -> set[str]:
        """Nodes that do not answer this one."""
        return self._links.down

    @property
    def nodes(self) -> tuple[str, ...]:
        """Where the session runs."""
        return self.topologies.nodes or (self._node,)

    @property
    def since(self) -> int:
        """The epoch in which the job first came to this arena."""
        return self.topologies.since

    @property
    def folder(self) -> SetName:
        """The directory of this node's redundancy set in a checkpoint that is drained now."""
        members = self.place.members if self.place is not None else ()
        return set_folder(self.epoch, tuple(peer.node for peer in members) or (self._node,))

    def has(self) -> ev.NodeHas:
        """What this node knows of which rank is where; what lies here is to be added."""
        return ev.NodeHas(
            job=self._job,
            incarnation=self._standing.incarnation,
            former=self._unnamed,
            session=self.session,
            living=self._ranks.living,
            epoch=self.epoch,
            since=self.since,
        )

    @property
    def _unnamed(self) -> tuple[str, ...]:
        """Former nodes of which the coordinator may not have the names: else each node would name all of the job."""
        present, outside = self.topology, (peer.node for peer in self.topologies.outside)
        known = self._named.union(present.nodes if present is not None else (), outside)
        return tuple(node for node in self.former if node not in known)

    def emptied(self) -> list[Action]:
        """The report to a coordinator elsewhere when all memory here is given up by hand."""
        return [self.report(self.has(), self.coordinator)] if self.coordinator != self._node else []

    def peer_down(self, event: ev.PeerDown) -> list[Action]:
        """It is not waited for."""
        return self.topologies.peer_down(event.node)

    def report(self, event: ev.Fact, to: str | None = None) -> Action:
        """To the coordinator, or to one that may come to be it."""
        report = ev.Report(job=self._job, node=self._node, event=event)
        return ToNode(job=self._job, node=to, message=report)

    def report_gone(self, event: ev.Fact) -> list[Action]:
        """To all that know the rank: a coordinator that misses it would wait for the rank for ever."""
        return [self.report(event, node) for node in self._told]

    @property
    def tells_itself(self) -> bool:
        """Whether this node is one of those."""
        return self._node in self._told

    @property
    def _told(self) -> dict[str, None]:
        """Nodes that know the ranks here."""
        return dict.fromkeys((self.coordinator, *self._candidates, *sorted(self._informed)))

    @property
    def _candidates(self) -> list[str]:
        waiting = (self.reports.candidate(session) for session in self.reports.sessions)
        return [*waiting, *self._pending_sessions.values()]

    def kept(self, event: ev.TopologyKept) -> list[Action]:
        """What an earlier process of this daemon knew."""
        self.epoch, self.former = event.epoch, event.former
        self.coordinator = event.topology.coordinator
        return self.topologies.kept(event)

    def end_meetings(self) -> list[Action]:
        """Tickets of sessions that are neither the job nor wait to join are good for nothing."""
        return self.reports.end_meetings(self.session)

    def next_deadline(self) -> float | None:
        """When ranks that have come are reported, or a topology that has not come is asked for again."""
        times = (self.reports.next_deadline(), self.topologies.next_deadline())
        return min((t for t in times if t is not None), default=None)

    def tick(self, now: float) -> list[Action]:
        """Reports the ranks that have come since, one message for all of a session."""
        asked = self.topologies.tick(now)
        due = self.reports.take_due(now)
        actions = [action for session in due for action in self._attached_to(self.reports.candidate(session), session)]
        informed = {self.reports.candidate(session) for session in due}
        others = sorted(self.reports.take_changed() - informed)
        self._informed |= set(others)
        return [*asked, *actions, *(self.report(self.reports.found(), node) for node in others)]
