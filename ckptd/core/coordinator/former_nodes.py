"""Nodes that a job ran on before and that a new session does not use: found, notified, waited for. Pure.

Each node names the topology that it was in by its digest; one node is asked for each. A former node accepts a new
coordinator when a node of its own topology announces it.
"""

from ckptd.core import events as ev
from ckptd.core.actions import Action, MeetPeers, ToNode
from ckptd.core.placement import Placement
from ckptd.shared.base.ids import JobKey
from ckptd.shared.protocol.topology import Peer, Topology

_ANNOUNCERS = 4  # nodes that announce the session to former ones: some may be cut off


class _Known:
    """What nodes report of one topology."""

    def __init__(self) -> None:
        self.topology: Topology | None = None
        self.nodes: list[str] = []  # that were in it
        self.silent: dict[str, frozenset[str]] = {}  # by the node that reports it: nodes that do not answer there
        self.asked = ""  # the node that is to send it
        self._placement: Placement | None = None

    def is_lost(self, node: str) -> bool:
        """Whether it answers none of those that kept a link to it: its set, and the coordinator."""
        assert self.topology is not None  # noqa: S101 - the caller looked
        self._placement = self._placement or Placement(self.topology)
        linked = {self.topology.coordinator, *(peer.node for peer in self._placement.place(node).members)}
        witnesses = [other for other in self.nodes if other in linked]
        return bool(witnesses) and all(node in self.silent.get(other, ()) for other in witnesses)


class FormerNodes:
    """Of one session that waits to join."""

    def __init__(self, job: JobKey, node: str, session: str) -> None:
        self._job, self._node, self._session = job, node, session
        self._known: dict[bytes, _Known] = {}
        self.outside: dict[str, Peer | None] = {}  # nodes that the session does not use
        self.reported: set[str] = set()

    @property
    def complete(self) -> bool:
        """Whether each former node has reported its living ranks."""
        return all(one.topology is not None for one in self._known.values()) and self.outside.keys() <= self.reported

    def named(self, node: str, former: ev.Former) -> list[Action]:
        """The node was in this topology."""
        if not former.digest:
            return []
        known = self._known.setdefault(former.digest, _Known())
        known.silent.pop(node, None)
        if former.silent:
            known.silent[node] = frozenset(former.silent)
        if node not in known.nodes:
            known.nodes = [node, *known.nodes] if node == self._node else [*known.nodes, node]
        if known.topology is None and known.asked in ("", node):
            return [self._ask(known, former.digest, node)]
        return []

    def _ask(self, known: _Known, digest: bytes, node: str) -> Action:
        known.asked = node
        return ToNode(job=self._job, node=node, message=ev.TopologyAsked(job=self._job, node=self._node, digest=digest))

    def found(self, topology: Topology) -> None:
        """A node has sent it."""
        if topology.digest in self._known:
            self._known[topology.digest].topology = topology

    def peer_down(self, node: str, unreachable: set[str]) -> list[Action]:
        """Another node is asked for what this one was to send."""
        actions = []
        for digest, known in self._known.items():
            others = [other for other in known.nodes if other not in unreachable]
            if known.topology is None and known.asked == node and others:
                actions.append(self._ask(known, digest, others[0]))
        return actions

    def review(self, present: Topology, own: Peer) -> list[Action]:
        """What follows once the session's nodes are known: former nodes are met, and the session is announced there."""
        actions: list[Action] = []
        inside = frozenset(present.nodes) if self._known else frozenset[str]()
        for known in self._known.values():
            if known.topology is None:
                continue
            left = inside | {self._node} | self.outside.keys()
            new = {peer.node: peer for peer in known.topology.peers if peer.node not in left}
            new = {node: peer for node, peer in new.items() if not known.is_lost(node)}
            if new:
                self.outside |= new
                actions.append(MeetPeers(job=self._job, peers=tuple(new.values())))
                actions += self._announce(known, tuple(new), own)
        return actions

    def again(self, node: str, digest: bytes, own: Peer) -> list[Action]:
        """The node may have missed the order to announce the session."""
        known = self._known.get(digest)
        if known is None or known.topology is None or node not in self._announcers(known):
            return []
        nodes = tuple(peer.node for peer in known.topology.peers if peer.node in self.outside)
        return [self._order(node, nodes, own)] if nodes else []

    def _announcers(self, known: _Known) -> list[str]:
        return known.nodes[:_ANNOUNCERS]

    def _announce(self, known: _Known, nodes: tuple[str, ...], own: Peer) -> list[Action]:
        return [self._order(node, nodes, own) for node in self._announcers(known)]

    def _order(self, node: str, nodes: tuple[str, ...], own: Peer) -> Action:
        order = ev.AnnounceOrdered(job=self._job, node=self._node, session=self._session, coordinator=own, nodes=nodes)
        return ToNode(job=self._job, node=node, message=order)
