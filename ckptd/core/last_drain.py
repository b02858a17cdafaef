"""What a daemon that ends, and that nobody will start again, still owes: the newest checkpoint, on the store. Pure."""

from dataclasses import dataclass

from ckptd.core.coordinator.coordinator import Coordinator
from ckptd.core.coordinator.save_states import State
from ckptd.core.node.node import JobNode
from ckptd.shared.base.ids import SaveId


@dataclass(frozen=True, slots=True)
class Left:
    """The newest checkpoint of a job that is in memory and not on the store; the newest that is."""

    step: int
    durable: str
    why: str


class LastDrain:
    """One job's, from the moment at which its daemon was asked to end. What is saved after that holds nobody up."""

    def __init__(self, coordinator: Coordinator, node: JobNode, *, preempts: bool = False) -> None:
        """preempts: its ranks were asked to save at one step."""
        self._preempts = preempts
        self._coordinator = coordinator
        self._node = node
        self._newest = self._staged()

    @property
    def _coordinates(self) -> bool:
        return self._node.coordinator == self._node.node

    def _staged(self) -> SaveId | None:
        if not self._coordinates:
            return self._node.slot_retention.newest_staged
        newest = self._coordinator.facts.newest_staged
        return newest.save if newest is not None else None

    @property
    def _durable(self) -> SaveId | None:
        if not self._coordinates:
            return self._node.slot_retention.durable
        return max(self._coordinator.facts.on_store, default=None)

    @property
    def _safe(self) -> bool:
        durable = self._durable
        return self._newest is None or (durable is not None and self._newest <= durable)

    @property
    def waits(self) -> bool:
        """Whether the newest checkpoint, or the one of a preemption, may still become durable, or a drain runs."""
        return self._drains or self._awaits_ranks

    @property
    def _awaits_ranks(self) -> bool:
        """Whether ranks that live are about to save at the step of a preemption, or are being asked."""
        if self._coordinates:
            preemption, sessions = self._coordinator.preemption, self._coordinator.sessions
            here = bool(sessions.attended or (sessions.living and not sessions.members))
            listened, step, agreed = preemption.listened, preemption.step, not preemption.agreeing
        else:
            notice, member = self._node.notice, self._node.membership
            here = bool(self._node.ranks.admitted) and member.coordinator not in member.down
            listened, step, agreed = notice.listened, notice.step, notice.read or not self._preempts
        if not here:
            return False
        return not agreed or (listened and (step is None or not self._is_over(step)))

    def _is_over(self, step: int) -> bool:
        """Whether a save of this incarnation, at this step or after, has ended, well or not."""
        if not self._coordinates:
            durable = self._node.slot_retention.durable
            return durable is not None and durable.incarnation == self._node.incarnation and durable.step >= step
        now = self._coordinator.sessions.incarnation
        saves = [r for r in self._coordinator.facts.records.values() if r.save.incarnation == now]
        return any(r.end is not None for r in saves if r.save.step >= step)

    @property
    def _drains(self) -> bool:
        if self._coordinates:
            saves = self._coordinator.facts
            if self._newest is None:
                return saves.active is not None
            return not self._safe and (saves.active is not None or bool(saves.of(State.QUEUED)))
        reachable = self._node.coordinator not in self._node.membership.down
        return not self._safe and (reachable or self._node.drain.at_work)

    @property
    def left(self) -> Left | None:
        """What is not durable, for the log; None: all is as it should be."""
        newest, durable = self._staged(), self._durable
        if newest is None or (durable is not None and newest <= durable):
            return None
        if self._safe:
            why = "it was staged after this daemon was asked to end"
        elif self._coordinates:
            record = self._coordinator.facts.records.get(newest)
            why = record.error if record is not None else ""
        else:
            why = "" if self.waits else f"node {self._node.coordinator} does not answer: it coordinates the job"
        knows = self._coordinates and self._coordinator.facts.ready
        why = why or ("" if knows or not self._coordinates else "the store has not answered")
        known = str(durable.step) if durable is not None else "none" if knows else "not known here"
        return Left(newest.step, known, why)
