"""Redundancy sets: which nodes protect each other. A pure function of the topology, the same on every node."""

from collections.abc import Sequence

from ckptd.shared.format.schemes import Scheme
from ckptd.shared.protocol.topology import Peer


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


def recoverable(scheme: Scheme, members: int, columns: set[int], chunks: set[int], wanted: set[int]) -> bool:
    """Whether the wanted members' columns can be rebuilt when these members' columns and chunks are lost.

    A group can be solved when it lacks no more of its columns than the scheme's losses.
    """
    for group in range(members):
        data, holders = scheme.layout.data(members, group), scheme.layout.holders(members, group)
        lost = len(columns.intersection(data)) + len(chunks.intersection(holders))
        if lost > scheme.losses and not wanted.isdisjoint(data):
            return False
    return True
