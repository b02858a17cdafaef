"""Which daemons may speak here for which job, and to which of them this one keeps a link. Pure.

Most daemons of a large job never speak to each other: a peer that is only known costs an entry here, and no link.
"""

import math
from collections import Counter
from collections.abc import Iterable

import msgspec

from ckptd.shared.base.ids import JobKey
from ckptd.shared.protocol.topology import Peer, Topology

NodeKey = tuple[str, str]  # node and key
_LAST_S = 1.0  # packets of a link that rests are under way


class AddressBook:
    """Peers by job and node, without this node. Those of a topology are the topology's own table, and no copy of it."""

    def __init__(self, node: str = "") -> None:
        self._node = node
        self._peers: dict[JobKey, dict[str, Peer]] = {}  # of a job in ``_same``: the topology's, with this node
        self._same: dict[JobKey, Topology] = {}  # jobs that have the peers of this topology, and no others
        self._kept: dict[JobKey, frozenset[str] | None] = {}
        self._present: dict[JobKey, tuple[Topology, frozenset[str]]] = {}  # and nodes outside that hold something
        self._left: dict[JobKey, frozenset[str]] = {}  # nodes that were named before
        self._keys: Counter[str] = Counter()  # of peers in no topology's table; sites may give one to many
        self._moved: dict[NodeKey, str] = {}  # where a daemon says that it is: more than what others say
        self._rested: dict[NodeKey, float] = {}  # when the last link to it was over

    def add(self, job: JobKey, peer: Peer) -> Peer | None:
        """Takes it into the job. Returns the peer that the node had there before, if any."""
        before = self.peer(job, peer.node)
        if before == peer:
            return before
        peers = self._own(job)
        peers[peer.node] = peer
        self._keys[peer.key] += 1
        if before is not None:
            self._drop(before)
            if before.key == peer.key:
                self._moved.pop((peer.node, peer.key), None)
        return before

    def _own(self, job: JobKey) -> dict[str, Peer]:
        """A table of the job's own, which may differ from the topology's."""
        if self._same.pop(job, None) is not None:
            self._peers[job] = {node: peer for node, peer in self._peers[job].items() if node != self._node}
            self._keys.update(peer.key for peer in self._peers[job].values())
        return self._peers.setdefault(job, {})

    def remove(self, job: JobKey, node: str) -> Peer | None:
        """The job has it no more."""
        peer = self.peer(job, node)
        if peer is not None:
            del self._own(job)[node]
            self._drop(peer)
        return peer

    def forget(self, job: JobKey) -> list[Peer]:
        """The job is over here. Returns the peers that it had."""
        peers, same = self._all(job), self._same.pop(job, None)
        self._peers.pop(job, None)
        self._present.pop(job, None)
        self._left.pop(job, None)
        self._kept.pop(job, None)
        if same is None:
            for peer in peers:
                self._uncount(peer.key)
        self._tidy(*self._moved, *self._rested)
        return peers

    def _drop(self, peer: Peer) -> None:
        self._uncount(peer.key)
        self._tidy((peer.node, peer.key))

    def _uncount(self, key: str) -> None:
        self._keys[key] -= 1
        if not self._keys[key]:
            del self._keys[key]

    def _tidy(self, *node_keys: NodeKey) -> None:
        for node_key in node_keys:
            if not self.jobs(node_key):
                self._moved.pop(node_key, None)
                self._rested.pop(node_key, None)

    def knows(self, key: str) -> bool:
        """Whether a daemon of that key may connect."""
        return key in self._keys or any(key in topology.keys for topology in self._same.values())

    def jobs(self, node_key: NodeKey) -> list[JobKey]:
        """Of this daemon, that one is in them, too. Empty: it is a stranger."""
        node, key = node_key
        return [job for job in self._peers if (peer := self.peer(job, node)) is not None and peer.key == key]

    def count(self, job: JobKey) -> int:
        """How many it has."""
        peers = self._peers.get(job, {})
        return len(peers) - (self._node in peers)

    def peer(self, job: JobKey, node: str) -> Peer | None:
        """The job's peer of that node. From any thread."""
        return self._peers.get(job, {}).get(node) if node != self._node else None

    def _all(self, job: JobKey) -> list[Peer]:
        return [peer for node, peer in self._peers.get(job, {}).items() if node != self._node]

    def at(self, node_key: NodeKey) -> Peer | None:
        """The peer of that node and key, where it is reached now."""
        for job in self.jobs(node_key):
            peer, endpoint = self._peers[job][node_key[0]], self._moved.get(node_key)
            return peer if endpoint is None else msgspec.structs.replace(peer, endpoint=endpoint)
        return None

    def moved(self, node_key: NodeKey, endpoint: str) -> None:
        """It is reached elsewhere now: it says so itself."""
        self._moved[node_key] = endpoint

    # --- links

    def keep(self, job: JobKey, nodes: Iterable[str] | None) -> None:
        """A link is kept to these nodes; None: to all. At first there are none."""
        self._kept[job] = None if nodes is None else frozenset(nodes)

    def is_kept(self, job: JobKey, node: str) -> bool:
        """Whether a link to the node is kept."""
        kept = self._kept.get(job, frozenset())
        return kept is None or node in kept

    def keeps_all(self, job: JobKey) -> bool:
        """Whether a link is kept to all nodes."""
        return job in self._kept and self._kept[job] is None

    def kept(self, job: JobKey) -> list[Peer]:
        """Peers to which a link is kept."""
        kept = self._kept.get(job, frozenset())
        if kept is None:
            return self._all(job)
        return [peer for node in kept if (peer := self.peer(job, node)) is not None]

    def rested(self, node_key: NodeKey, now: float) -> None:
        """The link to it is over: neither end had use for it."""
        self._rested[node_key] = now

    def rests(self, node_key: NodeKey, now: float) -> bool:
        """Whether that was a moment ago, so that its last packets may come. Later ones are of an end that missed it."""
        return now < self._rested.get(node_key, -math.inf) + _LAST_S

    # --- topologies

    def present(self, job: JobKey, topology: Topology, outside: Iterable[Peer]) -> list[Peer]:
        """The job runs on these nodes now. Returns peers that it ran on before, but for those outside that it needs."""
        before, beside = self._present.get(job, (None, frozenset[str]()))
        beyond = frozenset(peer.node for peer in outside) - topology.by_name.keys()
        named = before.by_name.keys() | beside if before is not None else frozenset[str]()
        left = {node for node in self._left.get(job, frozenset()) | named if node not in topology.by_name} - beyond
        self._present[job] = topology, beyond
        self._left[job] = frozenset(node for node in left if self.peer(job, node) is not None)
        return [self._peers[job][node] for node in self._left[job]]

    def settle(self, job: JobKey) -> None:
        """Has the topology's table in place of an own one that says the same."""
        topology, peers = self._present[job][0], self._peers.get(job, {})
        others = [peer for node, peer in topology.by_name.items() if node != self._node]
        if job in self._same or len(peers) != len(others) or any(peers.get(peer.node) != peer for peer in others):
            return
        self._peers[job], self._same[job] = topology.by_name, topology
        for peer in others:
            self._uncount(peer.key)

    def former(self, node_key: NodeKey) -> list[JobKey]:
        """Jobs that have moved on to other nodes, and keep this one for what it still holds."""
        jobs = ((job, self._present.get(job)) for job in self.jobs(node_key))
        return sorted(job for job, present in jobs if present is not None and node_key[0] not in present[0].by_name)
