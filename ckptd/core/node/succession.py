"""The commit of a coordinator that does not answer, made by the first node that does: one node's part in it. Pure.

Nodes know which ones answer in their own set. So the first of the coordinator's set makes the commit, and the first of
each other set makes it later: it then finds it made, and its set learns that without a link to the others.
"""

from dataclasses import dataclass

from ckptd.core import events as ev
from ckptd.core.actions import Action, ToNode
from ckptd.core.node.drain import DrainShare
from ckptd.core.node.membership import Membership
from ckptd.core.node.parity import Protection
from ckptd.core.node.ranks import LocalRanks
from ckptd.shared.protocol.messages import End, Milestone, Progress

_OTHERS_S = 2.0  # so much later, nodes that are in no set with the coordinator look whether the commit was made
_SET_S = 0.05  # and each set so much later than the one before


@dataclass(slots=True)
class _Turn:
    """Of this node's set, to commit for a coordinator that was lost."""

    coordinator: str
    session: str
    incarnation: int
    due: float | None = None  # None: not known before the next tick


class Succession:
    """One node's part in it; see the module."""

    def __init__(
        self, node: str, membership: Membership, drain: DrainShare, ranks: LocalRanks, protection: Protection
    ) -> None:
        self._job = drain.job
        self._node = node
        self._membership = membership
        self._drain = drain
        self._ranks = ranks
        self._protection = protection
        self._last: _Turn | None = None

    @property
    def _turn(self) -> _Turn | None:
        """None when the coordinator answers again, or has a successor: that one makes its commits itself."""
        turn, member = self._last, self._membership
        if turn is None or (turn.coordinator, turn.session) != (member.coordinator, member.session):
            return None
        return turn if turn.coordinator in member.down else None

    def lost(self, incarnation: int) -> list[Action]:
        """A node does not answer. incarnation: the job's present one, in whose name the commit is made."""
        member, members = self._membership, self._protection.members
        if member.coordinator not in member.down or not member.is_first(members):
            return []
        if member.coordinator in members:
            return self._drain.finish(incarnation, member.session)
        self._last = _Turn(member.coordinator, member.session, incarnation) if self._drain.voted is not None else None
        return []

    def next_deadline(self) -> float | None:
        """When to call tick; in the past: at once."""
        if (turn := self._turn) is None:
            return None
        return float("-inf") if turn.due is None else turn.due

    def tick(self, now: float) -> list[Action]:
        """The turn of this set has come."""
        if (turn := self._turn) is None:
            return []
        if turn.due is None:
            nodes, first = self._membership.nodes, self._protection.members[0]
            place = nodes.index(first) if first in nodes else len(nodes)
            turn.due = now + _OTHERS_S + _SET_S * place
        if now < turn.due:
            return []
        self._last = None
        return self._drain.finish(turn.incarnation, turn.session)

    def finished(self, event: ev.CommitEnded) -> list[Action]:
        """This node has tried to finish the commit of a coordinator that it lost."""
        member = self._membership
        if event.problem or event.taken_over or event.save != self._drain.voted or member.coordinator == self._node:
            return []
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
