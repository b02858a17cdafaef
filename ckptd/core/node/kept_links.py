"""To which nodes this one keeps a link: where its messages go. Pure.

Those are the coordinator, nodes that may come to coordinate, its redundancy set, and sources of what it fetches. The
coordinator keeps a link to all. A message to any other node makes a link for a while.
"""

from ckptd.core.actions import Action, KeepLinks
from ckptd.core.node.fetch import Fetching
from ckptd.core.node.membership import Membership
from ckptd.core.node.parity import Protection
from ckptd.shared.base.ids import JobKey


class KeptLinks:
    """Of one job on one node."""

    def __init__(
        self, job: JobKey, node: str, membership: Membership, protection: Protection, *fetching: Fetching
    ) -> None:
        self._job = job
        self._node = node
        self._membership = membership
        self._protection = protection
        self._fetching = fetching
        self._kept: frozenset[str] | None = frozenset()

    def changed(self) -> list[Action]:
        """What is due when they are others than before."""
        wanted = self._wanted()
        if wanted == self._kept:
            return []
        self._kept = wanted
        return [KeepLinks(job=self._job, nodes=None if wanted is None else tuple(sorted(wanted)))]

    def _wanted(self) -> frozenset[str] | None:
        member = self._membership
        if member.coordinates:
            return None
        sources = [node for part in self._fetching for node in part.nodes]
        return frozenset((*member.correspondents, *self._protection.members, *sources)) - {self._node}
