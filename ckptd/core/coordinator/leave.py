"""When the memory of a job that no process runs any more is given back. Pure."""

import enum

from ckptd.core.coordinator.departures import How
from ckptd.core.coordinator.job_state import JobState
from ckptd.core.coordinator.last_rebuild import LastRebuild
from ckptd.core.coordinator.save_states import State
from ckptd.core.coordinator.session_states import SESSION, Presence, SessionOn

_NOT_ON_ITS_WAY = {State.KEPT, State.FAILED, State.SUPERSEDED}  # to the store


class Verdict(enum.Enum):
    """What becomes of the memory now."""

    STAYS = enum.auto()
    REBUILT = enum.auto()  # some of the newest is lost, and parity has it
    DRAINED = enum.auto()  # the only copy of the newest: its drain is tried again
    RELEASED = enum.auto()


class Leave:
    """A job that every rank closed: once its newest checkpoint is durable. One that crashed: after orphan_ttl_s."""

    def __init__(self, facts: JobState) -> None:
        self._facts = facts
        self.rebuild = LastRebuild(facts)
        self._session = facts.session
        self._state: Presence | None = None
        self._since = 0.0  # of the state
        self._crashed = False  # some rank of the session ended without closing

    def new_session(self) -> None:
        """None of its ranks has ended."""
        self._crashed = False

    def _move(self, on: SessionOn, now: float) -> bool:
        step = SESSION.step(self._state, on)
        if step is not None:
            self._state, self._since = step.after, now
        return step is not None

    def adopted(self, now: float) -> None:
        """Memory of the job was found at start, perhaps that of a rank that ended while no daemon ran."""
        self._move(SessionOn.FOUND, now)

    @property
    def closing(self) -> bool:
        """Whether every rank closed."""
        return self._state is Presence.CLOSING

    @property
    def orphaned(self) -> bool:
        """Whether no rank is in any more."""
        return self._state in {Presence.CLOSING, Presence.ORPHANED}

    def left(self, how: How) -> None:
        """A rank of the session ended."""
        self._crashed |= how is How.ENDED

    def stranger_left(self, now: float) -> None:
        """A rank that was not in ended; perhaps it was the last that might have had a use for what lies here."""
        if not self._session.attended and not self.orphaned:
            self._move(SessionOn.LEFT, now)

    def all_left(self, now: float) -> None:
        """No rank is in any more, as far as nodes answer."""
        closed = not self._crashed and not self._session.members
        self._move(SessionOn.CLOSED if closed else SessionOn.LEFT, now)

    def react(self, now: float) -> Verdict:
        """A closed job's memory is free once its newest checkpoint is durable; a crashed one's after orphan_ttl_s."""
        verdict = self._weigh(now)
        if verdict is Verdict.RELEASED:
            self.rebuild.give_up()
        if verdict is not Verdict.REBUILT:
            self.rebuild.forget()
        return verdict

    def _weigh(self, now: float) -> Verdict:
        if self._session.attended and self._state is not Presence.OPEN:
            self._move(SessionOn.ENTERED, now)
        facts = self._facts
        expired = self.until is not None and now >= self.until
        if not (self.closing or expired) or self._session.peopled:
            return Verdict.STAYS
        went_on = any(save.incarnation == self._session.incarnation for save in facts.on_store)
        newer = facts.inventory.doubts_of(self._session.nodes) if went_on else facts.inventory.doubts
        if newer and not expired:
            return Verdict.STAYS  # a node that has not said yet what it has may have what is newer
        if facts.active is None and not expired and self.rebuild.owed is not None:
            return Verdict.REBUILT
        newest = facts.newest_staged
        if newest is not None and newest.state in _NOT_ON_ITS_WAY and not expired:
            return Verdict.DRAINED
        waits = newest is not None and newest.state is not State.DURABLE
        if facts.active is not None or (waits and not expired):
            return Verdict.STAYS
        return Verdict.RELEASED if self._move(SessionOn.RELEASED, now) else Verdict.STAYS

    @property
    def until(self) -> float | None:
        """When the memory of a crashed job is given up; None while anybody may want it, or a drain reads it."""
        if not self.orphaned or self._session.wanted or self._facts.active is not None:
            return None
        held, policy = self._facts.anything_held, self._facts.policy
        return self._since + (policy.orphan_ttl_s if held else policy.empty_ttl_s)  # mere room: a launcher's
