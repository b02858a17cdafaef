"""The topology of a session from what its nodes report, and the place of each node in it. Pure."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from functools import cached_property

from ckptd.core.redundancy_sets import redundancy_sets
from ckptd.shared.base.errors import ConfigError
from ckptd.shared.protocol.endpoints import check_endpoints
from ckptd.shared.protocol.node_messages import Arrival, NodeAttached
from ckptd.shared.protocol.topology import Peer, Place, Topology

Misfit = tuple[str, str, str]  # code, message, hint


class Roster:
    """Which ranks of a session which node has named. ``ranks``: rank -> node."""

    def __init__(self) -> None:
        self.world_size = 0
        self.alone = ""  # the node that all ranks are on, the ones that have not come too
        self.ranks: dict[int, str] = {}
        self.attached: dict[str, NodeAttached] = {}  # the last of each node
        self._at: dict[str, set[int]] = {}

    def misfit(self, node: str, arrivals: Sequence[Arrival], gone: AbstractSet[str]) -> Misfit | None:
        """Why these ranks cannot be at the node. gone: nodes that do not answer."""
        known = self.world_size or next((arrival.world_size for arrival in arrivals), 0)
        for rank, world_size in ((arrival.rank, arrival.world_size) for arrival in arrivals):
            if rank >= world_size:
                return ("usage", f"rank {rank} does not exist in a job of {world_size} ranks", "")
            if world_size != known:
                text = f"rank {rank} has connected as one of {world_size} ranks, others as one of {known}"
                return ("usage", text, "start all ranks with the same world size")
            other = self.ranks.get(rank, node)
            if other != node and other not in gone:
                text = f"two processes are rank {rank} of the job, on node {other} and on node {node}"
                return ("usage", text, "start each rank once; two separate jobs: another job name for each")
        return None

    def put(self, node: str, event: NodeAttached, arrivals: Sequence[Arrival]) -> None:
        """These ranks and no others are at the node."""
        for rank in [*self._at.get(node, ()), *(arrival.rank for arrival in arrivals)]:
            self.drop(rank)
        self._at[node] = {arrival.rank for arrival in arrivals}
        self.ranks |= dict.fromkeys(self._at[node], node)
        self.world_size = self.world_size or next((arrival.world_size for arrival in arrivals), 0)
        self.attached[node], self.alone = event, node if event.alone else ""

    def drop(self, rank: int) -> None:
        """The rank has left."""
        node = self.ranks.pop(rank, None)
        if node is not None:
            self._at[node].discard(rank)

    @property
    def whole(self) -> bool:
        """Whether the node of every rank is known."""
        return bool(self.alone and self.ranks) or 0 < self.world_size == len(self.ranks)

    @property
    def missing(self) -> list[int]:
        """Ranks that no node has named."""
        return [rank for rank in range(self.world_size) if rank not in self.ranks]

    @property
    def nodes(self) -> list[str]:
        """Those with ranks."""
        return [node for node, ranks in self._at.items() if ranks]

    def topology(self) -> Topology:
        """Of all ranks, once they are whole: nodes in the order of their lowest rank."""
        places: dict[str, int] = {}
        home = (self.alone or self.ranks[rank] for rank in range(self.world_size))
        homes = tuple(places.setdefault(node, len(places)) for node in home)
        first = self.attached[next(iter(places))]
        peers = tuple(self.attached[node].peer for node in places)
        return Topology(peers, homes, first.scheme, first.set_size, first.asked)

    def fault(self, topology: Topology, here: str) -> Misfit | None:
        """Why the daemons cannot be a job. here: the node whose daemon is to coordinate it."""
        if topology.coordinator != here:
            text = f"rank 0 runs on node {topology.coordinator}, and its ranks meet at the daemon of node {here}"
            return ("usage", text, "connect again")
        hosts = [next((one.host for one in self.attached[node].living), node) for node in topology.nodes]
        try:
            check_endpoints(topology.peers, hosts)
        except ConfigError as error:
            return (error.code, error.message, error.hint)
        return None


class Placement:
    """A topology, and what each node is to know of it at once."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.nodes = frozenset(topology.nodes)
        self._members: dict[str, tuple[Peer, ...]] | None = None  # of each node's set

    @cached_property
    def sets(self) -> list[tuple[str, ...]]:
        """The redundancy sets. Made once."""
        return redundancy_sets(self.topology.peers, self.topology.set_size)

    def place(self, node: str) -> Place:
        """Of one node; of a node outside, without ranks and set."""
        if self._members is None:
            peers = {peer.node: peer for peer in self.topology.peers}
            members = [tuple(peers[name] for name in names) for names in self.sets]
            self._members = {peer.node: of for of in members for peer in of}
        topology = self.topology
        return Place(
            digest=topology.digest,
            members=self._members.get(node, ()),
            ranks=topology.ranks_of(node),
            nodes=len(topology.peers),
            scheme=topology.scheme,
        )


def of_peers(peers: Sequence[Peer]) -> Topology | None:
    """Nodes alone, to be sent as a topology is; None of none."""
    return Topology(tuple(peers), tuple(range(len(peers)))) if peers else None
