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
    """Peers by job and node."""

    def __init__(self) -> None:
        self._peers: dict[JobKey, dict[str, Peer]] = {}
        self._kept: dict[JobKey, frozenset[str] | None] = {}
        self._present: dict[JobKey, frozenset[str]] = {}  # nodes of the topology now
        self._named: dict[JobKey, frozenset[str]] = {}  # these, and nodes outside that hold something
        self._left: dict[JobKey, frozenset[str]] = {}  # nodes that were named before
        self._keys: Counter[str] = Counter()  # sites may give one to many
        self._jobs: dict[NodeKey, dict[JobKey, None]] = {}
        self._moved: dict[NodeKey, str] = {}  # where a daemon says that it is: more than what others say
        self._rested: dict[NodeKey, float] = {}  # when the last link to it was over

    def add(self, job: JobKey, peer: Peer) -> Peer | None:
        """Takes it into the job. Returns the peer that the node had there before, if any."""
        peers = self._peers.setdefault(job, {})
        before = peers.get(peer.node)
        if before == peer:
            return before
        peers[peer.node] = peer
        if before is not None and before.key == peer.key:
            self._moved.pop((peer.node, peer.key), None)
            return before
        self._keys[peer.key] += 1
        self._jobs.setdefault((peer.node, peer.key), {})[job] = None
        if before is not None:
            self._drop(job, before)
        return before

    def remove(self, job: JobKey, node: str) -> Peer | None:
        """The job has it no more."""
        peer = self._peers.get(job, {}).pop(node, None)
        if peer is not None:
            self._drop(job, peer)
        return peer

    def forget(self, job: JobKey) -> list[Peer]:
        """The job is over here. Returns the peers that it had."""
        peers = list(self._peers.pop(job, {}).values())
        for peer in peers:
            self._drop(job, peer)
        for table in (self._present, self._named, self._left, self._kept):
            table.pop(job, None)
        return peers

    def _drop(self, job: JobKey, peer: Peer) -> None:
        node_key = (peer.node, peer.key)
        self._keys[peer.key] -= 1
        if not self._keys[peer.key]:
            del self._keys[peer.key]
        del self._jobs[node_key][job]
        if not self._jobs[node_key]:
            for table in (self._jobs, self._moved, self._rested):
                table.pop(node_key, None)

    def knows(self, key: str) -> bool:
        """Whether a daemon of that key may connect."""
        return key in self._keys

    def jobs(self, node_key: NodeKey) -> list[JobKey]:
        """Of this daemon, that one is in them, too. Empty: it is a stranger."""
        return list(self._jobs.get(node_key, ()))

    def count(self, job: JobKey) -> int:
        """How many it has."""
        return len(self._peers.get(job, ()))

    def peer(self, job: JobKey, node: str) -> Peer | None:
        """The job's peer of that node. From any thread."""
        return self._peers.get(job, {}).get(node)

    def at(self, node_key: NodeKey) -> Peer | None:
        """The peer of that node and key, where it is reached now."""
        for job in self._jobs.get(node_key, ()):
            peer = self._peers[job][node_key[0]]
            endpoint = self._moved.get(node_key)
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
        kept, peers = self._kept.get(job, frozenset()), self._peers.get(job, {})
        return list(peers.values()) if kept is None else [peers[node] for node in kept if node in peers]

    def rested(self, node_key: NodeKey, now: float) -> None:
        """The link to it is over: neither end had use for it."""
        self._rested[node_key] = now

    def rests(self, node_key: NodeKey, now: float) -> bool:
        """Whether that was a moment ago, so that its last packets may come. Later ones are of an end that missed it."""
        return now < self._rested.get(node_key, -math.inf) + _LAST_S

    # --- topologies

    def present(self, job: JobKey, topology: Topology, outside: Iterable[Peer]) -> list[Peer]:
        """The job runs on these nodes now. Returns peers that it ran on before, but for those outside that it needs."""
        named = frozenset((*topology.nodes, *(peer.node for peer in outside)))
        left = (self._left.get(job, frozenset()) | self._named.get(job, frozenset())) - named
        peers = self._peers.get(job, {})
        self._present[job], self._named[job] = frozenset(topology.nodes), named
        self._left[job] = left & peers.keys()
        return [peers[node] for node in self._left[job]]

    def former(self, node_key: NodeKey) -> list[JobKey]:
        """Jobs that have moved on to other nodes, and keep this one for what it still holds."""
        return sorted(job for job in self.jobs(node_key) if node_key[0] not in self._present.get(job, (node_key[0],)))
