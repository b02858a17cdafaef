"""Groups of the nodes of a large job, and the leader of each, which passes packets to and from the coordinator on.

A pure function of the topology, the same on every node. A group is about the square root of the nodes, made of whole
redundancy sets. The coordinator's own set has links to it in any case, and no leader.
"""

import math

from ckptd.core.redundancy_sets import redundancy_sets
from ckptd.shared.protocol.topology import Topology

RELAYED_FROM = 64  # nodes of a job: a coordinator of fewer has no use for leaders


def leaders(topology: Topology, relayed_from: int = RELAYED_FROM) -> dict[str, str]:
    """Node -> leader of its group; leaders, and others that only speak to the coordinator directly, are not in it."""
    count = len(topology.peers)
    if count < relayed_from:
        return {}
    sets = [one for one in redundancy_sets(topology.peers, topology.set_size) if topology.coordinator not in one]
    each = max(1, round(math.isqrt(count) / topology.set_size))  # sets of a group
    found: dict[str, str] = {}
    for first in range(0, len(sets), each):
        *members, leader = [node for one in sets[first : first + each] for node in one]
        found.update(dict.fromkeys(members, leader))
    return found
