"""The commit of a coordinator that does not answer, made by the first node that does. Pure."""

from ckptd.core import events as ev
from ckptd.core.actions import Action, ToNode
from ckptd.core.node.drain import DrainShare
from ckptd.core.node.membership import Membership
from ckptd.core.node.ranks import LocalRanks
from ckptd.shared.base.ids import JobKey
from ckptd.shared.protocol.messages import End, Milestone, Progress


class Succession:
    """One node's part in it."""

    def __init__(self, job: JobKey, node: str, membership: Membership, drain: DrainShare, ranks: LocalRanks) -> None:
        self._job = job
        self._node = node
        self._membership = membership
        self._drain = drain
        self._ranks = ranks

    def lost(self, node: str, incarnation: int) -> list[Action]:
        """A node does not answer. incarnation: the job's present one, in whose name the commit is made."""
        if node != self._membership.coordinator or not self._membership.succeeds:
            return []
        return self._drain.finish(incarnation, self._membership.session)

    def finished(self, event: ev.CommitEnded) -> list[Action]:
        """This node has tried to finish the commit of a coordinator that it lost."""
        coordinator = self._membership.coordinator
        if event.problem or event.taken_over or event.save != self._drain.voted or coordinator == self._node:
            return []
        finished = ev.CommitFinished(job=self._job, node=self._node, save=event.save)
        others = [node for node in self._membership.nodes if node not in (self._node, coordinator)]
        told = [ToNode(job=self._job, node=node, message=finished) for node in others]
        return [*self.durable(event), *told]

    def durable(self, event: ev.CommitEnded | ev.CommitFinished) -> list[Action]:
        """Its commit was made, though not by the coordinator."""
        if event.save != self._drain.voted:
            return []
        self._drain.ended(event)
        return self._ranks.tell_all(Progress(save=event.save, milestone=Milestone.DURABLE, end=End.DURABLE))
