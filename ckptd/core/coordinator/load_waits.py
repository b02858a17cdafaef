"""A load that some ranks of a job call and others do not: which ranks are notified, and when. Pure.

Ranks of a normal job differ by seconds, so nothing is said for 5 s; then once, to the lowest rank that waits.
"""

from collections.abc import Callable, Sequence

from ckptd.core import events as ev
from ckptd.core.actions import Action, ToNode
from ckptd.core.coordinator.restores import Restores
from ckptd.core.coordinator.sessions import Sessions
from ckptd.shared.base.ids import JobKey
from ckptd.shared.base.wording import named_ranks

SILENT_S = 5.0


class LoadWaits:
    """``cause`` says why these ranks are missing, which ranks call what, and where the missing ones run."""

    def __init__(
        self, job: JobKey, node: str, sessions: Sessions, restores: Restores, cause: Callable[[Sequence[int], str], str]
    ) -> None:
        self._job, self._node = job, node
        self._sessions, self._restores, self._cause = sessions, restores, cause
        self._said = -1.0  # since when the load waits that was spoken of last

    def next_deadline(self) -> float | None:
        """When tick has something to do."""
        since, _ = self._restores.callers
        return None if since is None or since == self._said else since + SILENT_S

    def tick(self, now: float) -> list[Action]:
        """Notifies the lowest rank that waits of those that have not called."""
        due, (since, callers) = self.next_deadline(), self._restores.callers
        if due is None or since is None or now < due:
            return []
        self._said = since
        missing = sorted(set(range(self._sessions.world_size)) - callers)
        here = sorted(rank for rank in callers if rank in self._sessions.members)
        if not missing or not here:
            return []
        order = ev.SessionWaits(
            job=self._job,
            node=self._node,
            session=self._sessions.session,
            rank=here[0],
            message=f"waits for {named_ranks(missing)}",
            hint=self._cause(missing, "load"),
        )
        return [ToNode(job=self._job, node=self._sessions.members[here[0]], message=order)]
