"""The one drain that may run in a job: its save, which node writes what, its commit, its repetition. Pure."""

from ckptd.core import events as ev
from ckptd.core.actions import Action, Commit, Note, RemovePartial, ToNode
from ckptd.core.coordinator.fence import Fence
from ckptd.core.coordinator.job_state import JobState, LastDrain
from ckptd.core.coordinator.retention import Retention
from ckptd.core.coordinator.save_record import Record
from ckptd.core.coordinator.save_states import OPEN, SAVE, On, State
from ckptd.history.intervals import AUTO_MOST_S, drain_every_s
from ckptd.shared.base.ids import SaveId
from ckptd.shared.protocol.messages import Cadence

NOT_DUE = "drain_every did not choose it for the store"
_AUTO = Cadence(0, 0.0)
_COMMIT_TRIES = 2  # before the drain itself is done again


class DrainCadence:
    """By the cadence that the job's ranks asked for; when the job is about to be ended, all from a step on."""

    def __init__(self, facts: JobState) -> None:
        self._facts = facts
        self._last: tuple[int, float] | None = None  # (step, time) of the last save that was due

    def begin(self) -> None:
        """Another incarnation: its first save is due."""
        self._last = None

    def is_due(self, save: SaveId, now: float) -> bool:
        """The first is, and the first at or after each multiple of the steps: so ``keep_every`` finds its own."""
        last, session = self._last, self._facts.session
        cadence, from_step = session.cadence, self._facts.preemption.due_from(session.session)
        due = (
            last is None
            or (from_step is not None and save.step >= from_step)
            or save.step < last[0]
            or (cadence.steps > 0 and save.step // cadence.steps != last[0] // cadence.steps)
            or (cadence.seconds > 0 and now - last[1] >= cadence.seconds)
            or (cadence == _AUTO and self._keeps_up(last[1], now))
        )
        if due:
            self._last = (save.step, now)
        return due

    def _keeps_up(self, due_at: float, now: float) -> bool:
        """Whether the store can take another save. due_at: when the last one was due.

        A drain that failed waits in the queue, and takes the newest save when it is tried again: while it waits none is
        due. It may have been tried again long after its save was due: what counts is when the last drain began.
        """
        if now - due_at >= AUTO_MOST_S:
            return True
        last = self._facts.last_drain
        since_s = now - max(due_at, last.began) if last is not None else now - due_at
        free = self._facts.active is None and not self._facts.of(State.QUEUED)
        return free and since_s >= drain_every_s(last.seconds if last is not None else 0.0, 0.0)


class Drains:
    """Saves that are due go to the store, the newest first."""

    def __init__(self, facts: JobState) -> None:
        self._facts = facts
        self._job, self._node, self._policy = facts.job, facts.node, facts.policy
        self.retention = Retention(facts)
        self.fence = Fence(facts)
        self._failures = 0  # of drains and commits since one ended well, whatever saves they were of
        self._asked: Commit | None = None  # the last commit; it may be answered after the job's session changed

    def _order(self, order: ev.Message, node: str | None = None) -> Action:
        return ToNode(job=self._job, node=node, message=order)

    def drain_newest(self, now: float) -> list[Action]:
        """Somebody wants the newest checkpoint durable, whatever the cadence says."""
        if self.fence.taken_over:
            return []
        whole = self._facts.of(State.KEPT, State.FAILED, State.QUEUED, State.DRAINING, State.COMMITTING)
        alive = [r for r in whole if r.staged and r.in_memory] + self._facts.of(State.STAGING)
        alive = [r for r in alive if r.save.incarnation != self._facts.disputed]
        newest = max(alive, key=lambda r: r.save, default=None)
        staged = self._facts.newest_staged
        if staged is not None and staged.save.incarnation == self._facts.disputed:
            return []
        for record in {id(r): r for r in (newest, staged) if r is not None}.values():
            if record.state is not State.DURABLE:
                self._queue(record, On.ASKED)
        if self._facts.active is None and not self._lacks_a_node():
            self._facts.retry_at = None
        return self.start_drain(now)

    def wanted(self, save: SaveId, now: float) -> list[Action]:
        """A node wants the save durable, or a newer one. It may have said so before, here or to another coordinator."""
        on_their_way = self._facts.of(State.QUEUED, State.DRAINING, State.COMMITTING, State.DURABLE)
        met = any(save <= other for other in (*self._facts.on_store, *(r.save for r in on_their_way)))
        return [] if met else self.drain_newest(now)

    def _lacks_a_node(self) -> bool:
        """Whether the next drain would fail again at once: what comes meanwhile is no reason to try it."""
        chosen = self._next()
        return chosen is not None and self._absent(chosen) is not None

    def _absent(self, record: Record) -> tuple[int, str] | None:
        """A rank whose segment lies at no node that answers, and a node that has it."""
        up = self._facts.links.up
        return next(((rank, min(nodes)) for rank, nodes in record.held.items() if up.isdisjoint(nodes)), None)

    def _queue(self, record: Record, on: On) -> None:
        """It is to be drained, from the beginning."""
        record.due, record.lent, record.reason, record.first_failure = True, False, "", None
        if SAVE.takes(record.state, on):
            self._facts.move(record, on)

    def _next(self) -> Record | None:
        """The save that is drained next: the newest staged.

        A forced save comes before: it was asked for by name, and there is at most one that waits.
        """
        forced = [r for r in self._facts.of(State.QUEUED) if r.forced and r.in_memory]
        return max(forced, key=lambda r: r.save) if forced else self._facts.newest_staged

    def start_drain(self, now: float) -> list[Action]:
        """Drains the next save if any waits and the store is free; older ones that waited are superseded."""
        if (
            not self._facts.ready
            or self.fence.holds_drains
            or self._facts.active is not None
            or (self._facts.retry_at is not None and now < self._facts.retry_at)
        ):
            return []
        waiting = [r for r in self._facts.of(State.QUEUED) if r.in_memory or not self._facts.inventory.doubts]
        newest, chosen = self._facts.newest_staged, self._next()
        if newest is None or chosen is None:
            reason = "its memory was given up before it was drained"
            return [a for record in waiting for a in self._end(record, On.NO_CHANCE, reason)]
        if not waiting or newest.save.incarnation == self._facts.disputed:
            return []
        actions: list[Action] = []
        for record in waiting:
            if record.save < chosen.save or not record.in_memory:
                actions += self._superseded(record)
        if chosen.state not in OPEN:
            return actions
        self._facts.retry_at = None
        if chosen.state is not State.QUEUED:
            chosen.due = chosen.lent = True
            if not self._facts.move(chosen, On.ITS_TURN):
                return actions
        return [*actions, *self._begin_drain(chosen, now)]

    def _begin_drain(self, record: Record, now: float) -> list[Action]:
        if not self._facts.move(record, On.STORE_FREE):
            return []
        self._facts.active = record.save
        record.drain_since = now
        record.voters, record.commit_failures, record.drainers = set(), 0, {}
        if absent := self._absent(record):
            rank, node = absent
            return self._lacks(record, f"node {node} does not answer: it has rank {rank}'s segment", now)
        for rank, nodes in sorted(record.held.items()):
            able = nodes & self._facts.links.up
            drainer = self._node if self._node in able else min(able)
            record.drainers[drainer] = (*record.drainers.get(drainer, ()), rank)
        sizes = record.delivered
        record.writes = {node: sum(sizes.get(rank, 0) for rank in ranks) for node, ranks in record.drainers.items()}
        return [self._order_drain(record, node) for node in record.drainers]

    def _order_drain(self, record: Record, node: str) -> Action:
        order = ev.DrainOrdered(
            job=self._job,
            node=self._node,
            store_id=self.fence.store_id,
            save=record.save,
            ranks=record.drainers[node],
            void=self.fence.void,
        )
        return self._order(order, node)

    def peer_up(self, node: str, now: float) -> list[Action]:
        """A node that drains may not have received it, and the last one that drains failed for is back."""
        if record := self._waits_for(node):
            return [self._order_drain(record, node)]
        waits = self._facts.lacked_a_node and self._facts.active is None and self._facts.retry_at is not None
        if waits and not self._lacks_a_node():
            self._facts.retry_at = now
        return []

    def _waits_for(self, node: str) -> Record | None:
        """The drain that runs, while the node has not written its part."""
        record = self._facts.records.get(self._facts.active) if self._facts.active is not None else None
        waits = (
            record is not None
            and record.state is State.DRAINING
            and node in record.drainers
            and node not in record.voters
        )
        return record if waits else None

    def _heard_of_drainer(self, node: str, now: float) -> list[Action]:
        """A node that is to drain has said what it has: it drains, or what it was to drain is gone."""
        record = self._waits_for(node)
        if record is None:
            return []
        lost = [rank for rank in record.drainers[node] if node not in record.held.get(rank, set())]
        if lost:
            return self._drain_failed(record, f"node {node} has lost rank {lost[0]}'s segment", now)
        return [self._order_drain(record, node)] if node != self._node else []

    def peer_down(self, node: str, now: float) -> list[Action]:
        """A drain that needs the node is tried again later."""
        record = self._waits_for(node)
        return self._lacks(record, f"node {node} does not answer", now) if record is not None else []

    def _lacks(self, record: Record, problem: str, now: float) -> list[Action]:
        """The drain failed for a node: it is tried again when that is back."""
        actions = self._drain_failed(record, problem, now)
        self._facts.lacked_a_node = bool(actions)
        return actions

    def voted(self, node: str, save: SaveId, problem: str, now: float) -> list[Action]:
        """A node's files and vote are synced, or why not."""
        record = self._facts.records.get(save)
        if record is None or save != self._facts.active or record.state is not State.DRAINING:
            return []
        if problem:
            return self._drain_failed(record, problem, now)
        if node in record.drainers:
            record.voters.add(node)
        return self._commit(record, On.VOTED) if len(record.voters) == len(record.drainers) else []

    def found_committed(self, save: SaveId) -> list[Action]:
        """The drain found its save committed already: the commit, repeated, confirms it."""
        record = self._facts.records.get(save)
        if record is None or save != self._facts.active or record.state is not State.DRAINING:
            return []
        return self._commit(record, On.VOTES_FOUND)

    def _commit(self, record: Record, on: On) -> list[Action]:
        if not self._facts.move(record, on):
            return []
        self._facts.active = record.save
        self._asked = self.fence.commit(record.save)
        return [self._asked]

    def committed(self, event: ev.CommitEnded, now: float) -> list[Action]:
        """The checkpoint is durable, or why not."""
        record = self._facts.records.get(event.save)
        if record is None or event.save != self._facts.active or record.state is not State.COMMITTING:
            return []
        if event.problem:
            record.commit_failures += 1
            return self._drain_failed(record, event.problem, now)
        if event.taken_over and self._asked != self.fence.commit(record.save):
            return self._commit(record, On.AGAIN)  # it was made for the session that this one replaced
        if event.taken_over:
            return [*self._drop_drain(record), *self.superseded_by(event.taken_over)]
        self._failures, began = 0, record.drain_since
        if began is not None:
            self._facts.last_drain = LastDrain(record.save, began, now - began, record.nbytes)
        return self._made_durable(record, event.nbytes)

    def superseded_by(self, incarnation: int) -> list[Action]:
        """Another session took the job over: nothing of this one becomes durable any more, whatever lies there."""
        self.fence.taken_over = incarnation
        reason = f"incarnation {incarnation} took the job over"
        lost = self._facts.of(State.QUEUED, State.DRAINING, *([State.COMMITTING] if self._facts.active is None else []))
        actions: list[Action] = [Note(job=self._job, text=f"{reason}: what this run saves is not durable any more")]
        for record in lost:  # a commit that is under way has its own answer
            if ended := self._end(record, On.TAKEN_OVER, reason):
                actions += [*(self._drop_drain(record) if record.save == self._facts.active else ()), *ended]
        return actions

    def _made_durable(self, record: Record, nbytes: int) -> list[Action]:
        save = record.save
        if not (ended := self._end(record, On.RENAMED, self.fence.hides(save))):
            return []
        self._facts.on_store[save] = ev.OnStore(
            save, record.world_size, nbytes or record.nbytes, save.dirname, record.compared
        )
        record.error = ""
        actions = [*ended, *self._drop_drain(record)]
        self._facts.partials.discard(save)  # it has its final name now
        for partial in sorted(p for p in self._facts.partials if p < save):
            self._facts.partials.discard(partial)
            actions.append(RemovePartial(job=self._job, save=partial))
        return [*actions, *self.retention.retire()]

    def _drop_drain(self, record: Record) -> list[Action]:
        if self._facts.active == record.save:
            self._facts.active = None
        return [self._order(ev.DrainDropped(job=self._job, node=self._node, save=record.save))]

    def _drain_failed(self, record: Record, problem: str, now: float) -> list[Action]:
        """It is tried again after a pause, or never; a commit that failed may be made again alone, and stays active."""
        since = now if record.first_failure is None else record.first_failure
        hopeless = self.fence.taken_over or not (record.in_memory or self._facts.inventory.doubts)
        on = On.HOPELESS if hopeless or now - since >= self._policy.drain_give_up_s else On.BROKEN
        alone = record.state is State.COMMITTING and record.commit_failures < _COMMIT_TRIES
        if not alone and not self._facts.move(record, on):
            return []
        record.error, record.first_failure = problem, since
        record.failures += 1
        self._failures += 1  # a newer save is no reason to try the store sooner
        pause = min(self._policy.drain_retry_s * 2 ** min(self._failures - 1, 30), self._policy.drain_retry_max_s)
        self._facts.retry_at = now + pause
        self._facts.lacked_a_node = False
        if record.save not in self._facts.on_store:
            self._facts.partials.add(record.save)  # what it left goes with the next commit, if that is of a newer save
        note = Note(job=self._job, text=f"drain of {record.save} failed, again in {pause:g} s: {problem}")
        if alone:
            return [note]
        if record.end is not None:
            record.due, record.reason = False, problem
        begun = bool(record.drainers)  # else it failed before any node had the order
        dropped = self._drop_drain(record)
        return [note, *self._tell_end(record), *(dropped if begun else [])]

    def _superseded(self, record: Record) -> list[Action]:
        """The save's turn is over before it came; the newest takes it. If it was lent, the save is kept, as before."""
        newest = self._facts.newest_staged
        if newest is not None and newest.state is State.KEPT:
            self._queue(newest, On.ITS_TURN)
            newest.lent = True
        if record.lent and not record.error and self._facts.move(record, On.PASSED_ON):
            record.due, record.reason = False, NOT_DUE
            return []  # its ranks know it as kept
        reason = f"{newest.save if newest else 'a newer save'} was staged before its drain began"
        return self._end(record, On.OUTRUN, reason + (f"; last error: {record.error}" if record.error else ""))

    def removed(self, event: ev.CheckpointRemoved) -> list[Action]:
        """A removal ended."""
        if not event.problem and not event.pinned:
            self._facts.on_store.pop(event.save, None)
        return self.retention.removed(event)

    # --- ends

    def _end(self, record: Record, on: On, reason: str) -> list[Action]:
        if not self._facts.move(record, on):
            return []
        record.reason = reason
        return self._tell_end(record)

    def _tell_end(self, record: Record, node: str | None = None) -> list[Action]:
        if record.end is None:
            return []
        end = ev.SaveEnded(
            job=self._job, node=self._node, save=record.save, end=record.end, reason=record.reason,
            mismatched=record.mismatched, where=record.where,
        )  # fmt: skip
        return [self._order(end, node)]
