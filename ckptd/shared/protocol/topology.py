"""Which nodes a job runs on: its coordinator makes that from their reports, and sends each node its place in it."""

from functools import cached_property
from typing import Annotated, Final, Self

import msgspec

from ckptd.shared.base.ids import MAX_RANKS, NodeName, Rank, Session
from ckptd.shared.format.schemes import Scheme
from ckptd.shared.format.schemes.layout import MAX_SET_SIZE
from ckptd.shared.protocol import columns

MAX_NODES = columns.MAX_NODES
MIN_SET_SIZE = 2
TICKET_NBYTES: Final = 32

Endpoint = Annotated[str, msgspec.Meta(pattern=r"^(tcp://[A-Za-z0-9.\[\]:_-]{1,255}:[0-9]{1,5})?\Z")]
PublicKey = Annotated[str, msgspec.Meta(pattern=r"^[0-9A-Za-z.:+=^!/*?&<>()\[\]{}@%$#-]{40}\Z")]  # Z85, as CURVE has it
Domain = Annotated[str, msgspec.Meta(max_length=255)]
SetSize = Annotated[int, msgspec.Meta(ge=MIN_SET_SIZE, le=MAX_SET_SIZE)]
TopologyDigest = Annotated[bytes, msgspec.Meta(max_length=columns.DIGEST_NBYTES)]  # empty: of none
Ticket = Annotated[bytes, msgspec.Meta(max_length=TICKET_NBYTES)]


class Peer(msgspec.Struct, frozen=True, order=True, array_like=True, gc=False):
    """A daemon as the others reach it."""

    node: NodeName
    arena: Session  # made with the arena: a node that lost its memory comes back as another one
    endpoint: Endpoint  # of the control plane; empty: it cannot be reached from other nodes
    key: PublicKey  # of the control plane
    domain: Domain = ""  # what fails together: a rack, a switch, a power supply; empty: the node itself


class Rendezvous(msgspec.Struct, frozen=True, array_like=True):
    """Where the daemons of a session's nodes meet: rank 0 draws the ticket and sends this to all ranks.

    ``ticket``: 32 random bytes. A daemon that has it is accepted by that of rank 0, for this session. Empty: all ranks
    are on rank 0's node, and no other daemon comes.
    """

    peer: Peer  # the daemon of rank 0's node
    ticket: Ticket
    scheme: Scheme = Scheme.NONE
    set_size: SetSize = 8
    asked: bool = False  # a user chose the scheme: xor is also the default

    def __post_init__(self) -> None:
        """Raises ValueError for a ticket that could be guessed."""
        if len(self.ticket) not in (0, TICKET_NBYTES):
            raise ValueError(f"a ticket has {TICKET_NBYTES} bytes")

    def __repr__(self) -> str:
        return f"Rendezvous({self.peer.node} at {self.peer.endpoint})"  # the ticket must not reach a log


class Place(msgspec.Struct, frozen=True, array_like=True):
    """What a node must know of a topology at once, of a size that does not depend on that of the job."""

    digest: TopologyDigest
    members: Annotated[tuple[Peer, ...], msgspec.Meta(max_length=MAX_SET_SIZE)]  # of its redundancy set, in order
    ranks: Annotated[tuple[Rank, ...], msgspec.Meta(max_length=MAX_RANKS)]  # of the node
    nodes: Annotated[int, msgspec.Meta(ge=1, le=MAX_NODES)]  # of the job
    scheme: Scheme = Scheme.NONE


class Topology(msgspec.Struct, frozen=True, array_like=True, dict=True):
    """The nodes of one session of a job, in the order of their lowest rank. The first one's daemon coordinates."""

    peers: Annotated[tuple[Peer, ...], msgspec.Meta(min_length=1, max_length=MAX_NODES)]
    homes: Annotated[tuple[int, ...], msgspec.Meta(min_length=1, max_length=MAX_RANKS)]  # of each rank: index of peer
    scheme: Scheme = Scheme.NONE
    set_size: SetSize = 8
    asked: bool = False  # a user chose the scheme: xor is also the default

    def __post_init__(self) -> None:
        """Raises ValueError when a home is no peer, or two peers have one name."""
        if not 0 <= min(self.homes, default=0) <= max(self.homes, default=0) < max(1, len(self.peers)):
            raise ValueError("a rank's home is no node of the topology")
        if len({peer.node for peer in self.peers}) != len(self.peers):
            raise ValueError("two nodes of the topology have one name")

    @cached_property
    def packed(self) -> columns.Packed:
        """As bytes, about 60 of them a node, with the digest of what they say. Made once."""
        rows = [(peer.node, peer.arena, peer.endpoint, peer.domain) for peer in self.peers]
        keys = [peer.key for peer in self.peers]
        return columns.pack(rows, keys, self.homes, (str(self.scheme), self.set_size, self.asked))

    @classmethod
    def unpacked(cls, packed: columns.Packed) -> Self:
        """The topology in bytes of another process. Raises ProtocolError for others than those of the digest."""
        rows, homes, settings = columns.unpack(packed)
        found = columns.checked(lambda: msgspec.convert([rows, homes, *settings], cls, strict=True))
        found.__dict__["packed"] = packed
        return found

    @property
    def digest(self) -> bytes:
        """Of all that it says: equal topologies have equal ones on all nodes."""
        return self.packed.digest

    @property
    def coordinator(self) -> str:
        """The node of rank 0."""
        return self.peers[self.homes[0]].node

    @cached_property
    def nodes(self) -> tuple[str, ...]:
        """Names, in order."""
        return tuple(peer.node for peer in self.peers)

    @cached_property
    def by_name(self) -> dict[str, Peer]:
        """The daemon of every node. Made once; not to be changed."""
        return {peer.node: peer for peer in self.peers}

    @cached_property
    def keys(self) -> frozenset[str]:
        """Of all daemons. Made once."""
        return frozenset(peer.key for peer in self.peers)

    def home(self, rank: int) -> str:
        """The node where the rank runs."""
        return self.peers[self.homes[rank]].node

    @cached_property
    def by_node(self) -> dict[str, tuple[int, ...]]:
        """Ranks of every node. Made once; not to be changed."""
        ranks: list[list[int]] = [[] for _ in self.peers]
        for rank, index in enumerate(self.homes):
            ranks[index].append(rank)
        return {peer.node: tuple(ranks[index]) for index, peer in enumerate(self.peers)}

    def ranks_of(self, node: str) -> tuple[int, ...]:
        """Ranks that run on the node."""
        return self.by_node.get(node, ())
