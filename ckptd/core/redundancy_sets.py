"""Redundancy sets: which nodes protect each other. A pure function of the topology, the same on every node."""

from collections.abc import Sequence

from ckptd.shared.protocol.topology import Peer, Scheme


def redundancy_sets(peers: Sequence[Peer], set_size: int) -> list[tuple[str, ...]]:
    """Partitions the nodes into sets of about set_size whose members lie in different failure domains if they can.

    Nodes are dealt out like cards, one domain after the other, to as many sets as there must be: so sizes differ by at
    most one, and two nodes of a domain meet in a set only if the domain has more nodes than there are sets. No set has
    a single member unless the job has a single node.
    """
    count = max(1, min(-(-len(peers) // set_size), len(peers) // 2))
    by_domain = sorted(enumerate(peers), key=lambda item: (item[1].domain or f"\0{item[1].node}", item[0]))
    dealt: list[list[tuple[int, str]]] = [[] for _ in range(count)]
    for place, (index, peer) in enumerate(by_domain):
        dealt[place % count].append((index, peer.node))
    return [tuple(node for _, node in sorted(members)) for members in dealt]


def set_of(peers: Sequence[Peer], set_size: int, node: str) -> tuple[str, ...]:
    """The set that the node belongs to; itself alone when it is no node of the job."""
    return next((members for members in redundancy_sets(peers, set_size) if node in members), (node,))


def effective(scheme: Scheme, members: int) -> Scheme:
    """The scheme that so many members can carry: double takes three, xor two."""
    if scheme is Scheme.DOUBLE and members >= 3:  # noqa: PLR2004
        return Scheme.DOUBLE
    return Scheme.XOR if scheme is not Scheme.NONE and members >= 2 else Scheme.NONE  # noqa: PLR2004


def recoverable(scheme: Scheme, members: int, columns: set[int], pieces: set[int], wanted: set[int]) -> bool:
    """Whether the wanted members' columns can be rebuilt when these members' columns and pieces are lost.

    Group g keeps its row parity with member g, and under double its diagonal parity with member g + 1; the others'
    chunks are its data. It can be solved when it lacks no more than the scheme's losses.
    """
    for group in range(members):
        holders = {group} if scheme is Scheme.XOR else {group, (group + 1) % members}
        if wanted <= holders:
            continue
        if len(columns - holders) + len(pieces & holders) > scheme.losses:
            return False
    return True
