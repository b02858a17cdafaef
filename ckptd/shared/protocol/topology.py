"""Which nodes a job runs on, as its ranks gather it at connect: no other process needs to know."""

from typing import Annotated

import msgspec

from ckptd.shared.base.ids import MAX_RANKS, NodeName, Session
from ckptd.shared.format.schemes import Scheme
from ckptd.shared.format.schemes.layout import MAX_SET_SIZE

MAX_NODES = 1 << 16
MIN_SET_SIZE = 2

Endpoint = Annotated[str, msgspec.Meta(pattern=r"^(tcp://[A-Za-z0-9.\[\]:_-]{1,255}:[0-9]{1,5})?\Z")]
PublicKey = Annotated[str, msgspec.Meta(pattern=r"^[0-9A-Za-z.:+=^!/*?&<>()\[\]{}@%$#-]{40}\Z")]  # Z85, as CURVE has it
Domain = Annotated[str, msgspec.Meta(max_length=255)]


class Peer(msgspec.Struct, frozen=True, order=True, array_like=True):
    """A daemon as the others reach it."""

    node: NodeName
    arena: Session  # made with the arena: a node that lost its memory comes back as another one
    endpoint: Endpoint  # of the control plane; empty: it cannot be reached from other nodes
    key: PublicKey  # of the control plane
    domain: Domain = ""  # what fails together: a rack, a switch, a power supply; empty: the node itself


class Topology(msgspec.Struct, frozen=True, array_like=True):
    """The nodes of one session of a job, in the order of their lowest rank. The first one's daemon coordinates."""

    peers: Annotated[tuple[Peer, ...], msgspec.Meta(min_length=1, max_length=MAX_NODES)]
    homes: Annotated[tuple[int, ...], msgspec.Meta(min_length=1, max_length=MAX_RANKS)]  # of each rank: index of peer
    scheme: Scheme = Scheme.NONE
    set_size: Annotated[int, msgspec.Meta(ge=MIN_SET_SIZE, le=MAX_SET_SIZE)] = 8
    asked: bool = False  # somebody chose the scheme: xor is also what nobody has chosen

    def __post_init__(self) -> None:
        """Raises ValueError when a home is no peer, or two peers have one name."""
        if not 0 <= min(self.homes, default=0) <= max(self.homes, default=0) < max(1, len(self.peers)):
            raise ValueError("a rank's home is no node of the topology")
        if len({peer.node for peer in self.peers}) != len(self.peers):
            raise ValueError("two nodes of the topology have one name")

    @property
    def coordinator(self) -> str:
        """The node of rank 0."""
        return self.peers[self.homes[0]].node

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names, in order."""
        return tuple(peer.node for peer in self.peers)

    def home(self, rank: int) -> str:
        """The node where the rank runs."""
        return self.peers[self.homes[rank]].node

    def host_of(self, rank: int) -> str:
        """The host at which other nodes reach the rank's node."""
        return self.peers[self.homes[rank]].endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")

    def by_node(self) -> dict[str, tuple[int, ...]]:
        """Ranks of every node."""
        ranks: list[list[int]] = [[] for _ in self.peers]
        for rank, index in enumerate(self.homes):
            ranks[index].append(rank)
        return {peer.node: tuple(ranks[index]) for index, peer in enumerate(self.peers)}

    def ranks_of(self, node: str) -> tuple[int, ...]:
        """Ranks that run on the node."""
        return tuple(r for r, index in enumerate(self.homes) if self.peers[index].node == node)
