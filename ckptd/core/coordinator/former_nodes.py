"""Nodes that a job ran on before and that a new session does not use: found, notified, waited for. Pure.

Each node names the topology that it was in by its digest; one node is asked for each. A former node accepts a new
coordinator when a node of its own topology announces it.
"""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from ckptd.core import events as ev
from ckptd.core.actions import Action, MeetPeers, ToNode
from ckptd.core.placement import Placement
from ckptd.shared.base.ids import JobKey
from ckptd.shared.protocol.node_messages import MAX_FORMER
from ckptd.shared.protocol.topology import Peer, Topology

_ANNOUNCERS = 4  # nodes that announce the session to former ones: some may be cut off


class _Known:
    """What nodes report of one topology."""

    def __init__(self) -> None:
        self.topology: Topology | None = None
        self.nodes: dict[str, None] = {}  # that were in it, in the order of their reports
        self.silent: dict[str, frozenset[str]] = {}  # by the node that reports it: nodes that do not answer there
        self.asked = ""  # the node that is to send it
        self.changed = True  # since it was reviewed
        self._placement: Placement | None = None

    def is_lost(self, node: str) -> bool:
        """Whether it answers none of those that kept a link to it: its set, and the coordinator."""
        assert self.topology is not None  # noqa: S101 - the caller looked
        self._placement = self._placement or Placement(self.topology)
        linked = {self.topology.coordinator, *(peer.node for peer in self._placement.place(node).members)}
        witnesses = [other for other in linked if other in self.nodes]
        return bool(witnesses) and all(node in self.silent.get(other, ()) for other in witnesses)


class Earlier(NamedTuple):
    """Topologies of sessions before, and their nodes: no node needs to name these, of which each has all names."""

    digests: tuple[bytes, ...] = ()
    nodes: frozenset[str] = frozenset()


class FormerNodes:
    """Of one session that waits to join."""

    def __init__(self, job: JobKey, node: str, session: str) -> None:
        self._job, self._node, self._session = job, node, session
        self._known: dict[bytes, _Known] = {}
        self.outside: dict[str, Peer] = {}  # nodes that the session does not use, as far as their topologies are known
        self.reported: set[str] = set()
        self._awaited: set[str] = set()  # nodes outside that have not reported
        self._present = b""  # the session's topology at the last review

    @property
    def complete(self) -> bool:
        """Whether each former node has reported its living ranks."""
        return not self._awaited and all(one.topology is not None for one in self._known.values())

    @property
    def earlier(self) -> Earlier:
        """The topologies that have come."""
        known = {digest: one.topology for digest, one in self._known.items() if one.topology is not None}
        some = dict(itertools.islice(known.items(), MAX_FORMER))
        return Earlier(tuple(some), frozenset(node for topology in some.values() for node in topology.nodes))

    def has_reported(self, node: str) -> None:
        """The node has reported the ranks that live there; its topology may be known later."""
        self.reported.add(node)
        self._awaited.discard(node)

    def named(self, node: str, former: ev.Former) -> list[Action]:
        """The node was in this topology."""
        if not former.digest:
            return []
        known, silent = self._known.setdefault(former.digest, _Known()), frozenset(former.silent)
        known.changed |= node not in known.nodes or known.silent.get(node, frozenset()) != silent
        known.nodes[node], known.silent[node] = None, silent
        if known.topology is None and known.asked in ("", node):
            return [self._ask(known, former.digest, node)]
        return []

    def _ask(self, known: _Known, digest: bytes, node: str) -> Action:
        known.asked = node
        return ToNode(job=self._job, node=node, message=ev.TopologyAsked(job=self._job, node=self._node, digest=digest))

    def lacks(self, digest: bytes) -> bool:
        """Whether this topology was asked for, and has not come."""
        known = self._known.get(digest)
        return known is not None and known.topology is None

    def found(self, topology: Topology) -> None:
        """A node has sent it."""
        if self.lacks(topology.digest):
            known = self._known[topology.digest]
            known.topology, known.changed = topology, True

    def peer_down(self, node: str, unreachable: set[str]) -> list[Action]:
        """Another node is asked for what this one was to send."""
        actions = []
        for digest, known in self._known.items():
            if known.topology is None and known.asked == node:
                others = (other for other in self._in_order(known) if other not in unreachable)
                actions += [self._ask(known, digest, other) for other in itertools.islice(others, 1)]
        return actions

    def review(self, present: Topology, own: Peer) -> list[Action]:
        """What follows once the session's nodes are known: former nodes are met, and the session is announced there."""
        actions: list[Action] = []
        moved, self._present = present.digest != self._present, present.digest
        changed = [one for one in self._known.values() if one.topology is not None and (one.changed or moved)]
        inside = frozenset((*present.nodes, self._node)) if changed else frozenset[str]()
        for known in changed:
            known.changed = False
            peers = known.topology.peers if known.topology is not None else ()
            new = {peer.node: peer for peer in peers if peer.node not in inside and peer.node not in self.outside}
            new = {node: peer for node, peer in new.items() if not known.is_lost(node)}
            if new:
                self.outside |= new
                actions.append(MeetPeers(job=self._job, peers=tuple(new.values())))
            if unaware := [node for node in new if node not in self.reported]:
                self._awaited.update(unaware)
                actions += self._announce(known, tuple(unaware), own)
        return actions

    def again(self, node: str, digest: bytes, own: Peer) -> list[Action]:
        """The node may have missed the order to announce the session."""
        known = self._known.get(digest)
        if known is None or known.topology is None or node not in self._announcers(known):
            return []
        nodes = tuple(peer.node for peer in known.topology.peers if peer.node in self.outside)
        return [self._order(node, nodes, own)] if nodes else []

    def _in_order(self, known: _Known) -> Iterator[str]:
        """Nodes that were in the topology: this one first, it is cut off from none."""
        own = (self._node,) if self._node in known.nodes else ()
        return itertools.chain(own, (node for node in known.nodes if node != self._node))

    def _announcers(self, known: _Known) -> list[str]:
        return list(itertools.islice(self._in_order(known), _ANNOUNCERS))

    def _announce(self, known: _Known, nodes: tuple[str, ...], own: Peer) -> list[Action]:
        return [self._order(node, nodes, own) for node in self._announcers(known)]

    def _order(self, node: str, nodes: tuple[str, ...], own: Peer) -> Action:
        order = ev.AnnounceOrdered(job=self._job, node=self._node, session=self._session, coordinator=own, nodes=nodes)
        return ToNode(job=self._job, node=node, message=order)
