"""The commit of a coordinator that does not answer, made by the first node that does: one node's part in it. Pure.

Nodes know which ones answer in their own set. So the first of the coordinator's set makes the commit, and the first of
each other set makes it later: it then finds it made, and its set learns that without a link to the others. A commit
that fails, since the vote of another node is missing or the store is ill, is made again after a pause.
"""

import math
from dataclasses import dataclass

from ckptd.core import events as ev
from ckptd.core.actions import Action, ToNode
from ckptd.core.node.drain import DrainShare
from ckptd.core.node.membership import Membership
from ckptd.core.node.parity import Protection
from ckptd.core.node.ranks import LocalRanks
from ckptd.core.node.slot_retention import SlotRetention
from ckptd.core.node.standing import Standing
from ckptd.core.policy import Policy
from ckptd.shared.base.ids import SaveId
from ckptd.shared.protocol.messages import End, Milestone, Progress

_OTHERS_S = 2.0  # so much later, nodes that are in no set with the coordinator look whether the commit was made
_SET_S = 0.05  # and each set so much later than the one before
_DOUBT_S = 10.0  # after which ranks learn that the commit was not made


@dataclass(slots=True)
class _Vacancy:
    """The coordinator does not answer, and this node has voted for a save of which it knows no commit."""

    coordinator: str
    session: str
    save: SaveId
    wait_s: float  # before the next commit here
    due: float = -math.inf  # that commit; in the past while the clock was not read, inf while one is under way
    doubted: float = -math.inf  # when ranks learn of it; inf: they have
    pause_s: float = 0.0  # after the next failure; 0: there was none

    @property
    def of(self) -> tuple[str, str, SaveId]:
        """What it is the same for."""
        return self.coordinator, self.session, self.save


class Succession:
    """One node's part in it; see the module."""

    def __init__(  # noqa: PLR0913, PLR0917 - the node's parts that it asks
        self,
        node: str,
        policy: Policy,
        standing: Standing,
        membership: Membership,
        drain: DrainShare,
        ranks: LocalRanks,
        slot_retention: SlotRetention,
        protection: Protection,
    ) -> None:
        self._job = drain.job
        self._node = node
        self._policy = policy
        self._standing = standing
        self._membership = membership
        self._drain = drain
        self._ranks = ranks
        self._slot_retention = slot_retention
        self._protection = protection
        self._vacancy: _Vacancy | None = None

    @property
    def _is_lost(self) -> bool:
        """Whether the coordinator is: one that answers again, or its successor, makes its commits itself."""
        return self._membership.coordinator in self._membership.down

    def follow(self) -> None:
        """Something has happened: a link, the session or this node's vote may be others than before."""
        voted = self._drain.voted if self._is_lost else None
        if voted is None:
            self._vacancy = None
            return
        coordinator = self._membership.coordinator
        found = _Vacancy(coordinator, self._membership.session, voted, self._patience_s(coordinator))
        if self._vacancy is None or self._vacancy.of != found.of:
            self._vacancy = found

    def peer_down(self, event: ev.PeerDown) -> list[Action]:
        """A node does not answer. Where it is the coordinator, ranks learn what it leaves undecided."""
        if event.node != self._membership.coordinator:
            return []
        return self._ranks.coordinator_lost(event.node, self._slot_retention, self._drain.save, self._drain.voted)

    def written(self, event: ev.Drained | ev.VoteWritten) -> list[Action]:
        """This node's part of a drain lies on the store, or why not: then no node can commit it."""
        if not event.problem or not self._is_lost or event.save not in self._slot_retention.unended:
            return []
        return self._ranks.not_durable(self._membership.coordinator, event.save, event.problem)

    @property
    def _is_first(self) -> bool:
        """Whether the commit is up to this node."""
        return self._membership.is_first(self._protection.members)

    def next_deadline(self) -> float | None:
        """When to call tick; in the past: at once."""
        if (vacancy := self._vacancy) is None:
            return None
        times = (vacancy.doubted, vacancy.due if self._is_first else math.inf)
        return min((time for time in times if time < math.inf), default=None)

    def tick(self, now: float) -> list[Action]:
        """The turn of this set may have come."""
        if (vacancy := self._vacancy) is None:
            return []
        if vacancy.due == -math.inf:
            vacancy.due = now + vacancy.wait_s
        if vacancy.doubted == -math.inf:
            vacancy.doubted = now + _DOUBT_S
        actions: list[Action] = []
        if now >= vacancy.doubted:
            actions += self._doubt(vacancy, "the commit is made once all nodes have voted")
        if now >= vacancy.due and self._is_first:
            vacancy.due = math.inf
            actions += self._drain.finish(self._standing.incarnation, vacancy.session)
        return actions

    def _patience_s(self, coordinator: str) -> float:
        nodes, members = self._membership.nodes, self._protection.members
        if coordinator in members:
            return 0.0
        return _OTHERS_S + _SET_S * (nodes.index(members[0]) if members and members[0] in nodes else len(nodes))

    def _doubt(self, vacancy: _Vacancy, why: str) -> list[Action]:
        """Ranks learn it once."""
        if vacancy.doubted == math.inf:
            return []
        vacancy.doubted = math.inf
        return self._ranks.not_durable(vacancy.coordinator, vacancy.save, why)

    def _failed(self, vacancy: _Vacancy, problem: str) -> list[Action]:
        """Each pause is twice the one before. Ranks learn of the first failure."""
        vacancy.wait_s = min(vacancy.pause_s or self._policy.drain_retry_s, self._policy.drain_retry_max_s)
        vacancy.due, vacancy.pause_s = -math.inf, 2 * vacancy.wait_s
        return self._doubt(vacancy, f"the commit in its place failed, and is made again: {problem}")

    def finished(self, event: ev.CommitEnded) -> list[Action]:
        """This node has tried to finish the commit of a coordinator that it lost."""
        member, vacancy = self._membership, self._vacancy
        if event.save != self._drain.voted or member.coordinator == self._node:
            return []
        if event.problem or event.taken_over:
            if vacancy is None or vacancy.save != event.save:
                return []
            taken_over = f"incarnation {event.taken_over} took the job over"
            return self._failed(vacancy, event.problem) if event.problem else self._doubt(vacancy, taken_over)
        finished = ev.CommitFinished(job=self._job, node=self._node, save=event.save)
        others = [node for node in self._protection.members if node not in (self._node, member.coordinator)]
        told = [ToNode(job=self._job, node=node, message=finished) for node in others]
        return [*self.durable(event), *told]

    def durable(self, event: ev.CommitEnded | ev.CommitFinished) -> list[Action]:
        """Its commit was made, though not by the coordinator."""
        if event.save != self._drain.voted:
            return []
        self._drain.ended(event)
        return self._ranks.tell_all(Progress(save=event.save, milestone=Milestone.DURABLE, end=End.DURABLE))
