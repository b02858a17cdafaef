"""When the memory of a job that nobody runs any more is given back. Pure."""

from ckptd.core import events as ev
from ckptd.core.actions import Action, ToNode
from ckptd.core.coordinator.inventory_barrier import InventoryBarrier
from ckptd.core.coordinator.parity_scheduler import ParityScheduler
from ckptd.core.coordinator.save_states import State
from ckptd.core.coordinator.saves import Saves
from ckptd.core.coordinator.sessions import Sessions
from ckptd.core.policy import Policy
from ckptd.shared.base.ids import JobKey


class Leave:
    """A job that every rank closed: once its newest checkpoint is durable. One that crashed: after orphan_ttl_s."""

    def __init__(  # noqa: PLR0913, PLR0917 - the tables that decide it
        self,
        job: JobKey,
        node: str,
        policy: Policy,
        sessions: Sessions,
        saves: Saves,
        parity: ParityScheduler,
        inventory: InventoryBarrier,
    ) -> None:
        self._job = job
        self._node = node
        self._policy = policy
        self._sessions = sessions
        self._saves = saves
        self._parity = parity
        self._inventory = inventory
        self.orphaned_at: float | None = None  # when the last rank ended without closing
        self.crashed = False  # some rank of the session ended without closing
        self.closing = False  # every rank closed: free the memory once durable

    def stay(self) -> None:
        """Ranks belong to the job."""
        self.closing, self.orphaned_at = False, None

    def stranger_left(self, now: float) -> None:
        """A rank that was not in ended; perhaps it was the last that might have had a use for what lies here."""
        if not self._sessions.attended and not self.closing and self.orphaned_at is None:
            self.orphaned_at = now

    def all_left(self, now: float) -> None:
        """Nobody is in any more, as far as nodes answer."""
        self.orphaned_at = now
        self.closing = not self.crashed and not self._sessions.members

    def when_safe(self, now: float) -> list[Action]:
        """A closed job's memory is free once its newest checkpoint is durable; a crashed one's after orphan_ttl_s."""
        expired = self.until is not None and now >= self.until
        if self._sessions.peopled or not (self.closing or expired):
            return []
        went_on = any(save.incarnation == self._sessions.incarnation for save in self._saves.on_store)
        newer = self._inventory.doubts_of(self._sessions.nodes) if went_on else self._inventory.doubts
        if newer and not expired:
            return []  # a node that has not said yet what it has may have what is newer than all that is known
        newest = self._saves.newest_staged
        if newest is not None and newest.state is State.FAILED and not expired:
            return self._saves.drain_newest(now)  # the only copy: it is tried until the memory must go
        waits = newest is not None and newest.state is not State.DURABLE
        if self._saves.active is not None or (waits and not expired):
            return []
        self.closing, self.orphaned_at = False, None
        self._parity.released()
        self._saves.known_nodes(())
        return [ToNode(job=self._job, message=ev.JobReleased(job=self._job, node=self._node))]

    @property
    def until(self) -> float | None:
        """When the memory of a crashed job is given up; None while anybody may want it, or a drain reads it."""
        if self.orphaned_at is None or self._sessions.wanted or self._saves.active is not None:
            return None
        held = self._saves.anything_held  # else it is only room, kept for a launcher that tries again at once
        return self.orphaned_at + (self._policy.orphan_ttl_s if held else self._policy.empty_ttl_s)
