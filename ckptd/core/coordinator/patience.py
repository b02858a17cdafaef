"""How long a session waits to join, and what its ranks learn meanwhile. Pure."""

from collections.abc import Mapping

from ckptd.core import events as ev
from ckptd.core.actions import Action, ToNode
from ckptd.core.coordinator.processes import Processes
from ckptd.core.coordinator.wait_reasons import Reason, Waiting, late_at, speaker, still_running, unheard
from ckptd.core.policy import Policy
from ckptd.shared.base.ids import JobKey

Waits = Mapping[str, Waiting]  # by session


class Patience:
    """With the sessions of one job that wait to join."""

    def __init__(self, job: JobKey, node: str, policy: Policy, processes: Processes) -> None:
        self._job, self._node = job, node
        self._policy = policy
        self._processes = processes

    def ended(self, waits: Waits, now: float) -> dict[str, Reason]:
        """Sessions that have waited too long, and why they were not let in."""
        late = [name for name, one in waits.items() if now - one.since >= self._policy.connect_timeout_s]
        return {name: self._why(name, waits[name]) for name in late}

    def _why(self, session: str, waiting: Waiting) -> Reason:
        if others := self._processes.others(session):
            return still_running(self._job.job, others)
        return unheard(self._node, waiting.roster)

    def _unnotified(self, waits: Waits) -> dict[str, float]:
        """Sessions that have not been notified for whom they wait, and when that is due."""
        silent = [(session, waiting) for session, waiting in waits.items() if waiting.ranks and not waiting.notified]
        return {name: late_at(one.since, running=bool(self._processes.others(name))) for name, one in silent}

    def notify(self, waits: Waits, now: float) -> list[Action]:
        """Sends waiting sessions the ranks that they wait for, once, before they are refused: a user can act."""
        actions: list[Action] = []
        for waiting in waits.values():
            due = waiting.late_at(self._policy.outside_wait_s)
            waiting.late |= due is not None and now >= due
        for session in [name for name, due in self._unnotified(waits).items() if now >= due]:
            waiting = waits[session]
            waiting.notified = True
            (rank, node), (text, hint) = speaker(waiting.ranks), self._why(session, waiting)
            order = ev.SessionWaits(job=self._job, node=self._node, session=session, rank=rank, message=text, hint=hint)
            actions.append(ToNode(job=self._job, node=node, message=order))
        return actions

    def next_deadline(self, waits: Waits) -> float | None:
        """When a session has waited long enough for something."""
        times = [waiting.since + self._policy.connect_timeout_s for waiting in waits.values()]
        times += self._unnotified(waits).values()
        late = (waiting.late_at(self._policy.outside_wait_s) for waiting in waits.values())
        return min((*times, *(time for time in late if time is not None)), default=None)
