"""The cores of played nodes, as the product has them, with effects that succeed at once: no arena, no store.

Members of a set reach each other in this process; what they say to real daemons goes over the wire,
directly or by the leader of their group.
"""

import functools
import time
from collections.abc import Iterable

from bench.large.plan import SEGMENT_NBYTES, STEP, Connect, Plan
from bench.large.wire import Wire
from ckptd import __version__
from ckptd.core import actions as act
from ckptd.core import events as ev
from ckptd.daemon.status_query import Answer, encode_answer
from ckptd.shared.base.ids import SaveId
from ckptd.shared.format.schemes import Scheme
from ckptd.shared.protocol.messages import Attached, LoadFrom, Refused
from ckptd.shared.protocol.status import NodeReport, RankStatus
from ckptd.shared.protocol.topology import Peer, Topology
from tests.unit.core.nodes import a_cluster
from tests.unit.core.nodes.a_cluster import ACluster, ANode

_GIB = 1 << 30
_TICK_S = 1.0
_SERVE_S = 0.025  # links are served so often, whatever the cores have to do
Topology.unpacked = functools.cache(Topology.unpacked)  # type: ignore[method-assign]  # all members have the same one


class Member(ANode):
    """A node of the crowd."""

    cluster: "Members"

    @property
    def peer(self) -> Peer:
        """As it is reached over real links."""
        return self.cluster.wire.peer(self.name)


class Members(ACluster):
    """All members of one job."""

    def __init__(self, plan: Plan) -> None:
        super().__init__("", scheme=Scheme.XOR, set_size=8)
        a_cluster.KEY = plan.job  # the cluster's one job
        self.plan = plan
        self.real = {peer.node for peer in plan.daemons}
        self.wire = Wire(plan, self._heard, self._answer)
        self.held = {act.Drain}
        self.answers: dict[tuple[type, int], object] = {}  # by kind and rank: the last message to the rank
        self._met: list[tuple[str, str]] = []
        self._wanted_by: dict[str, set[str]] = {}  # of members
        self._tick_at = self._serve_at = 0.0
        self._active: dict[str, ANode] = {}  # nodes where something may be due
        self.now = time.monotonic()

    def add(self, name: str) -> ANode:
        """A machine with an empty arena."""
        self.nodes[name] = Member(self, name, "crowd")
        self.wire.add(name)
        return self.nodes[name]

    def lose(self, name: str) -> None:
        """It is gone for the real daemons, too."""
        super().lose(name)
        self.wire.lose(name)

    # --- ranks

    def attach(self, order: Connect) -> None:
        """All ranks of a session whose homes are members."""
        self.session, self.alive, self.attached = int(order.session[1:]), True, {}
        self.homes = order.homes
        self.answers.clear()
        for rank in self.mine:
            self.attached[rank] = ev.RankAttached(
                job=self.plan.job, request=self.seq(), session=self.sid, rank=rank, world_size=len(self.homes),
                host="h", pid=1, rendezvous=order.rendezvous, here=self.node(rank).peer,
            )  # fmt: skip
            self.say(self.node(rank), self.attached[rank])
        self.settle()

    @property
    def mine(self) -> list[int]:
        """Ranks that run on members."""
        return [rank for rank, home in enumerate(self.homes) if home in self.nodes]

    def hand_over(self, step: int) -> None:
        """A segment of each."""
        told = self.answers[Attached, self.mine[0]]
        assert isinstance(told, Attached)  # noqa: S101 - by its place
        for rank in self.mine:
            self._ask_slots(rank)
        self.settle()
        self.stage(SaveId(told.incarnation, 1, step, told.run), self.mine)

    def ask_loads(self) -> None:
        """The newest is asked for by each."""
        for rank in self.mine:
            self.answers.pop((LoadFrom, rank), None)
            asked = ev.LoadAsked(job=self.plan.job, rank=rank, session=self.sid, request=self.seq())
            self.say(self.node(rank), asked)
        self.settle()

    def come_out(self, rank: int, told: LoadFrom) -> None:
        """The rank has read what it was sent to."""
        assert told.save is not None  # noqa: S101 - the caller looked
        report = ev.LoadReported(
            job=self.plan.job, rank=rank, session=self.sid, request=self.seq(), save=told.save, tier=told.tier
        )
        self.say(self.node(rank), report)

    # --- the world

    def turn(self) -> None:
        """One round: what has come, what is due."""
        self.now = time.monotonic()
        self.wire.turn()
        if self.now >= self._tick_at:
            self._tick_at, self._active = self.now + _TICK_S, dict(self.nodes)
        active, self._active = self._active, {}
        for name, node in active.items():
            due = node.catalogue.next_deadline() if self.nodes.get(name) is node else None
            if due is not None and due <= self.now:
                for action in node.catalogue.tick(self.now):
                    self.perform(node, action)
            if due is not None and due <= self._tick_at:
                self._active[name] = node
        self.settle()

    def settle(self) -> None:
        """Runs until nothing is left to do. Other daemons' packets come in meanwhile."""
        while True:
            while self._queue:
                node, event = self._queue.popleft()
                if self.nodes.get(node.name) is node:
                    for action in node.catalogue.handle(event, self.now):
                        self.perform(node, action)
                if time.monotonic() >= self._serve_at:
                    self.wire.turn()
                    self._serve_at = time.monotonic() + _SERVE_S
            if not self._meet() and not self._report():
                return

    def say(self, node: ANode, event: ev.Event) -> None:
        """Queues an event for a node, after which something may be due there."""
        super().say(node, event)
        self._active[node.name] = node

    def _heard(self, member: str, event: ev.Event) -> None:
        if member not in self.nodes:
            return
        self.say(self.nodes[member], event)
        if isinstance(event, ev.FetchOrdered):
            for other in {event.holder, *(node for _, node in (*event.homes, *event.chunks))} & self.nodes.keys():
                self._link(member, other)

    def perform(self, node: ANode, action: act.Action) -> None:
        """Carries an action out."""
        match action:
            case act.ToNode(node=str() as to) if to in self.real:
                self.wire.links[node.name].carry(action)
            case act.ToNode(node=str() as to, message=message):
                self._send(node, to, message)
            case act.MeetPeers(peers=peers):
                self._accept(node, peers)
            case act.KeepTopology(topology=topology):
                self._accept(node, topology.peers)
            case act.Meet(job=job, session=session, rendezvous=place):
                self._accept(node, [place.peer])
                self.wire.links[node.name].meetings.show(job, session, place, node.peer)
            case act.EndMeeting(job=job, session=session):
                self.wire.links[node.name].meetings.end(job, session)
            case act.KeepLinks():
                self._keep_links(node, action)
            case act.ToRank(rank=rank, message=message):
                self.answers[type(message), rank] = message
            case _:
                super().perform(node, action)

    def _send(self, node: ANode, to: str, message: ev.Message) -> None:
        if frozenset((node.name, to)) in self.links:
            self.say(self.nodes[to], message)
        elif to in node.met and to in self.nodes:  # the message is lost, and makes a link
            self._link(node.name, to)

    def _keep_links(self, node: ANode, action: act.KeepLinks) -> None:
        node.wanted = frozenset(action.nodes or ())
        for name in node.wanted & self.nodes.keys():
            self._wanted_by.setdefault(name, set()).add(node.name)
            self._met.append((node.name, name))
        self.wire.keep_links(node.name, action)

    def _accept(self, node: ANode, peers: Iterable[Peer]) -> None:
        names = {peer.node for peer in peers} - {node.name}
        node.met |= names
        of_use = (node.wanted or frozenset()) | self._wanted_by.get(node.name, set())
        self._met += [(node.name, name) for name in names & of_use & self.nodes.keys()]
        real = [self.wire.daemons[name] for name in names & self.real]
        self.wire.links[node.name].meet(self.plan.job, real)

    def _meet(self) -> bool:
        """Links between members that know each other, where one of them keeps one."""
        met, self._met, new = self._met, [], False
        for name, other in met:
            one, two = self.nodes.get(name), self.nodes.get(other)
            both = one is not None and two is not None and name in two.met and other in one.met
            new |= both and self._link(name, other)
        return new

    def _link(self, name: str, other: str) -> bool:
        """Whether it is a new link."""
        pair = frozenset((name, other))
        if name == other or pair in self.links:
            return False
        self.links.add(pair)
        for one, two in ((name, other), (other, name)):
            self.say(self.nodes[one], ev.PeerUp(job=self.plan.job, node=two))
        return True

    @property
    def refused(self) -> list[str]:
        """What ranks were refused."""
        return [f"{m.message} ({m.hint})" for (kind, _), m in self.answers.items() if isinstance(m, kind & Refused)]

    def _answer(self, member: str) -> bytes:
        """The status of a daemon: every rank at another position of its drain."""
        number = int(member.rpartition("-")[2])
        told = [
            RankStatus(
                rank=rank, host="a-host-of-the-job", pid=4000 + rank, alive=True, slots=3, slots_in_use=2,
                slot_nbytes=SEGMENT_NBYTES, newest_step=STEP, drain_nbytes=SEGMENT_NBYTES,
                drain_nbytes_done=SEGMENT_NBYTES * (10 * place + number % 10) // 100,
            )
            for place, rank in enumerate(rank for rank, home in enumerate(self.homes) if home == member)
        ]  # fmt: skip
        report = NodeReport(
            version=__version__, pid=4000 + number, uptime_s=3600.0, budget_nbytes=1200 * _GIB,
            used_nbytes=(600 + number % 100) * _GIB, tightest_limit="MemAvailable of /proc/meminfo",
            ranks=told, problems=[],
        )  # fmt: skip
        return encode_answer(Answer(report=report))
