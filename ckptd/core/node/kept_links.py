"""To which nodes this one keeps a link: where its messages go. Pure.

Those are the coordinator, nodes that may come to coordinate, its redundancy set, the leader of its group, and sources
of what it fetches. The coordinator keeps a link to all. A message to any other node makes a link for a while.
"""

from ckptd.core.actions import Action, KeepLinks
from ckptd.core.groups import leaders
from ckptd.core.node.fetch import Fetching
from ckptd.core.node.membership import Membership
from ckptd.core.node.parity import Protection
from ckptd.core.policy import Policy
from ckptd.shared.base.ids import JobKey
from ckptd.shared.protocol.topology import Topology


class KeptLinks:
    """Of one job on one node."""

    def __init__(
        self,
        job: JobKey,
        node: str,
        policy: Policy,
        membership: Membership,
        protection: Protection,
        *fetching: Fetching,
    ) -> None:
        self._job = job
        self._node = node
        self._relayed_from = policy.relayed_from
        self._membership = membership
        self._protection = protection
        self._fetching = fetching
        self._kept: frozenset[str] | None = frozenset()
        self._relays: dict[str, str] = {}
        self._grouped: tuple[Topology | None, dict[str, str]] = (None, {})  # the leaders that count here, of which

    def changed(self) -> list[Action]:
        """What is due when they are others than before."""
        relays = self._wanted_relays()
        wanted = self._wanted(relays)
        if (wanted, relays) == (self._kept, self._relays):
            return []
        self._kept, self._relays = wanted, relays
        nodes = None if wanted is None else tuple(sorted(wanted))
        return [KeepLinks(job=self._job, nodes=nodes, relays=tuple(relays.items()))]

    def _wanted(self, relays: dict[str, str]) -> frozenset[str] | None:
        member = self._membership
        if member.coordinates:
            return None
        sources = [node for part in self._fetching for node in part.nodes]
        wanted = (*member.correspondents, *self._protection.members, *relays.values(), *sources)
        return frozenset(wanted) - {self._node}

    def _wanted_relays(self) -> dict[str, str]:
        """Leaders by which packets may go: of all nodes at the coordinator, of its own at another node."""
        topology, coordinator = self._membership.topology, self._membership.coordinator
        if topology is None and self._membership.place is not None and coordinator in self._relays:
            return self._relays  # it is on its way: until then the leader is the one that it was
        if topology is None or coordinator != topology.coordinator:
            return {}
        if topology is not self._grouped[0]:
            groups = leaders(topology, self._relayed_from)
            own = {coordinator: groups[self._node]} if self._node in groups else {}
            self._grouped = topology, groups if coordinator == self._node else own
        return self._grouped[1]
