"""The life of each save of a job at its coordinator: staging, what is found on the store, its end. Pure.

Its states: save_states.py. Drains and commits: drains.py.
"""

from collections.abc import Container

from ckptd.core import events as ev
from ckptd.core.actions import Action, Note, RemovePartial
from ckptd.core.coordinator.drains import NOT_DUE, DrainCadence, Drains
from ckptd.core.coordinator.fence import was_taken_over
from ckptd.core.coordinator.job_state import JobState
from ckptd.core.coordinator.retention import removed_by_others
from ckptd.core.coordinator.save_record import Record, disagreement, newest_whole
from ckptd.core.coordinator.save_states import SAVE, On, State
from ckptd.shared.base.ids import SaveId
from ckptd.shared.base.wording import named_ranks
from ckptd.shared.format.replica_attestations import difference_of


class Saves(Drains):
    """What becomes of each save."""

    def __init__(self, facts: JobState) -> None:
        super().__init__(facts)
        self.due = DrainCadence(facts)

    def react(self, now: float) -> list[Action]:
        """What follows from the facts, as they are now."""
        if self._facts.due_since is None and self._facts.waits_for_store:
            self._facts.due_since = now
        return [*self.end_incomplete(), *self.retention.after_loads(), *self.start_drain(now)]

    # --- staging

    def _misfits(self, node: str, record: Record, world_size: int) -> list[Action]:
        """Segments of the node are of another number of ranks, so nothing of them counts."""
        reason = f"{record.save} is a save of {record.world_size} ranks, and node {node} has it as one of {world_size}"
        actions: list[Action] = [Note(job=self._job, text=reason)]
        return [*actions, *self._end(record, On.CLASHED, reason)] if record.state is State.STAGING else actions

    def _force(self, record: Record) -> None:
        """A rank wants it durable for sure, whatever was decided before that was known."""
        record.due = record.forced = True
        if record.state is State.KEPT:
            self._queue(record, On.ASKED)

    def staged(self, node: str, event: ev.SegmentsStaged, now: float) -> list[Action]:
        """Ranks delivered their segments."""
        record = self._facts.record_of(event.save, event.world_size, now)
        if record.world_size != event.world_size:
            return self._misfits(node, record, event.world_size)
        record.adopted |= not event.session
        if event.drain:
            self._force(record)
        record.stall_s = max(record.stall_s, event.stall_s)
        record.stalls_s, record.late_nbytes = record.stalls_s + event.stalls_s, record.late_nbytes + event.late_nbytes
        record.left = min(record.left, now - event.late_s)
        for segment in event.segments:
            record.attestations[segment.rank] = segment.attestations
        return self._delivered(node, record, {segment.rank: segment.nbytes for segment in event.segments}, now)

    def found(self, node: str, segments: tuple[ev.HeldSegment, ...], now: float) -> list[Action]:
        """The node has exactly these segments. Sends it the outcome of their saves."""
        self._facts.clear(node)
        actions, staged = list[Action](), dict[SaveId, None]()  # staged before
        for segment in sorted(segments, key=lambda s: (s.save, s.rank)):
            record = self._facts.record_of(segment.save, segment.world_size, now)
            if record.world_size != segment.world_size:
                actions += self._misfits(node, record, segment.world_size)
                continue
            record.adopted |= not record.delivered
            if segment.forced:
                self._force(record)
            if record.staged:
                staged.setdefault(record.save)
            record.attestations[segment.rank] = segment.attestations
            actions += self._delivered(node, record, {segment.rank: segment.nbytes}, now, again=True)
        if node != self._node:  # its half beside this one has received it
            actions += [self._order(ev.SaveStaged(job=self._job, node=self._node, save=s), node) for s in staged]
        actions += self._heard_of_drainer(node, now)
        told = {s.save for s in segments} if node != self._node else set()
        ended = [r for r in self._facts.records.values() if r.end is not None and r.save in told]
        return [*actions, *(action for record in ended for action in self._tell_end(record, node))]

    def fetched(self, node: str, event: ev.SegmentFetched, now: float) -> list[Action]:
        """The segment of the rank lies at this node too, from elsewhere; it may not have learned that it was staged."""
        save, rank = event.save, event.rank
        record = self._facts.records.get(save)
        if record is None or rank >= record.world_size:
            return []
        record.attestations[rank] = event.attestations
        told = [self._order(ev.SaveStaged(job=self._job, node=self._node, save=save), node)] if record.staged else []
        told += self._tell_end(record, node) if record.end is not None else []
        return [*told, *self._delivered(node, record, {rank: event.nbytes}, now, again=True)]

    def _delivered(
        self, node: str, record: Record, nbytes: dict[int, int], now: float, *, again: bool = False
    ) -> list[Action]:
        """Segments of these ranks lie at the node. again: said before, to this coordinator or another, so not late."""
        for rank in nbytes:
            self._facts.put(record, rank, node)
        record.delivered |= nbytes
        clash = self._facts.clash_of(record.save)
        if clash is not None:
            return self._disagree(node, record, clash)
        complete = SAVE.takes(record.state, On.WHOLE) and record.in_memory
        if record.end is not None and not (again and complete):
            return [] if again else self._tell_end(record, node)  # a late rank of a save that is over, or a repeat
        if complete:
            difference = difference_of(record.attestations)
            record.mismatched = difference is not None
            record.where = difference.where if difference else None
            return self._end(record, On.DIFFERS, difference.reason) if difference else self._complete(record, now)
        return []

    def _disagree(self, node: str, record: Record, other: Record) -> list[Action]:
        """Orders the end of both at all nodes once, and again at a node that delivers its part of them later."""
        reason = disagreement(other, record)
        repeated = self._tell_end(record, node) if record.end and not record.staged else []
        lost = [r for r in (other, record) if not r.staged and not r.end]
        return [*repeated, *(a for r in lost for a in self._end(r, On.CLASHED, reason))]

    def _complete(self, record: Record, now: float) -> list[Action]:
        disputed = record.save.incarnation == self._facts.disputed
        record.reason, record.due = "", record.due or (not disputed and self.due.is_due(record.save, now))
        if not self._facts.move(record, On.WHOLE_DUE if record.due else On.WHOLE):
            return []
        record.staged_at = None if record.adopted else now
        actions = [self._order(ev.SaveStaged(job=self._job, node=self._node, save=record.save))]
        actions += self._outrun(record.save)
        if disputed:
            return [*actions, *self.dispute(self._facts.disputed)]
        if not record.due:
            record.reason = NOT_DUE
            return [*actions, *self._tell_end(record)]
        if record.forced:  # one that waits at a time: each holds a slot
            older = [r for r in self._facts.of(State.QUEUED) if r.forced and r.save < record.save]
            actions += [a for r in older for a in self._superseded(r)]
        return actions

    def _outrun(self, newer: SaveId) -> list[Action]:
        """Older halves are over. Of what was found at start only the store can say whether it was whole once."""
        actions: list[Action] = []
        for older in [r for r in self._facts.of(State.STAGING) if r.save < newer]:
            if self._facts.ready or not older.adopted:
                late = named_ranks(older.missing)
                reason = f"{newer} was staged by all ranks first; {late} never saved this one"
                actions += self._end(older, On.INCOMPLETE, reason)
        return actions

    def skipped(self, node: str, event: ev.SaveSkipped, world_size: int, now: float) -> list[Action]:
        """A rank of the node found no slot: the save is over on all nodes. The node may say so again."""
        record = self._facts.record_of(event.save, world_size, now)
        if record.state is not State.STAGING:
            return self._tell_end(record, node)
        return self._end(record, On.SKIPPED, f"rank {event.rank}: {event.reason}")

    @property
    def went_on(self) -> bool:
        """Whether the present incarnation has staged something itself."""
        newest = self._facts.newest_staged
        return newest is not None and newest.save.incarnation == self._facts.incarnation

    def end_incomplete(self) -> list[Action]:
        """Saves that can never complete: a rank that they wait for has ended, or a newer incarnation began.

        Of an older one no silent node may have what is missing.
        """
        session, over = self._facts.session, list[tuple[Record, str]]()
        for record in self._facts.judged_incomplete:
            if record.save.incarnation < session.incarnation:
                if not self._facts.inventory.doubts:
                    over.append((record, f"incarnation {session.incarnation} began"))
            elif gone := [rank for rank in session.departed if rank not in record.delivered]:
                over.append((record, session.departed[min(gone)].before_save))
        return [a for record, reason in over for a in self._end(record, On.INCOMPLETE, reason)]

    def new_incarnation(self, awaited: Container[SaveId] = ()) -> None:
        """Its first save is due, commits are made in its name. awaited: older saves that may still become whole."""
        session = self._facts.session
        self._facts.incarnation, self._facts.awaited = session.incarnation, awaited
        self.fence.begin(session.incarnation, session.run, session.session)
        self.due.begin()
        if not self._facts.waits_for_store:  # what an older one gave up is not waited for
            self._facts.due_since = None

    def dispute(self, incarnation: int) -> list[Action]:
        """An older run owns this incarnation's names: nothing may be drained, or matched with the store."""
        self._facts.disputed = incarnation
        reason = f"incarnation {incarnation} was begun while the store was silent, and the store has it already"
        ours = [r for r in self._facts.records.values() if r.save.incarnation == incarnation]
        ours = [r for r in ours if SAVE.takes(r.state, On.DISPUTED)]
        return [a for r in ours for a in self._end(r, On.DISPUTED, f"{reason}; connect or load again")]

    def released(self, node: str, event: ev.SegmentsReleased) -> list[Action]:
        """A node's arena no longer has the segments; a save that lies nowhere else and waits for its drain is over."""
        record = self._facts.records.get(event.save)
        if record is None or not self._facts.take(record, event.ranks, node):
            return []
        lost = record.state is State.QUEUED and not record.in_memory and self._facts.ready
        return self._superseded(record) if lost else []

    # --- what is found on the store

    def saw_another_store(self) -> bool:
        """Whether the store that was seen is none of this session's. Then nothing is drained before another look."""
        wrong = self._facts.ready and not self._facts.session.store.takes(self.fence.store_id)
        self._facts.ready = self._facts.ready and not wrong
        return wrong

    def no_store(self, problem: str) -> None:
        """None lies there yet."""
        self._facts.store_problem = problem

    def scanned(self, event: ev.StoreScanned, incarnation: int, now: float) -> list[Action]:
        """Compares with what lies on the store: marks the durable, finishes or removes the unfinished."""
        self._facts.store_problem = event.problem
        if event.problem:
            if not self._facts.ready:
                self._facts.silent_since = now if self._facts.silent_since is None else self._facts.silent_since
            return [Note(job=self._job, text=f"the store does not answer: {event.problem}")]
        self._facts.ready, self._facts.silent_since = True, None
        self.fence.saw(event.store_id)
        there = {found.save: found for found in event.committed}
        for save in removed_by_others(self._facts.on_store, there, self.fence.present):
            del self._facts.on_store[save]
        self._facts.on_store |= there
        self._facts.partials -= there.keys()
        actions: list[Action] = []
        for save in self._facts.on_store:
            record = self._facts.records.get(save) if save.incarnation != self._facts.disputed else None
            if record is None or not SAVE.takes(record.state, On.FOUND):
                continue
            if save.incarnation < self._facts.incarnation or not was_taken_over(save, event.records, self.fence.void):
                actions += self._end(record, On.FOUND, self.fence.hides(save))
        newest = max(self._facts.on_store, default=None)
        best = newest_whole(self._facts.records.values(), self._facts.on_store)
        actions += self._outrun(best) if best is not None else []
        for partial in event.partials:
            actions += self._judge_partial(partial, newest, incarnation, now)
        rival = self.fence.rival(event.records)
        actions += self.superseded_by(rival) if rival and not self.fence.taken_over else []
        return [*actions, *self.retention.retire()]

    def _judge_partial(self, partial: ev.Partial, newest: SaveId | None, incarnation: int, now: float) -> list[Action]:
        save = partial.save
        record = self._facts.records.get(save)
        if save == self._facts.active:
            return []
        if newest is not None and save <= newest:
            return [RemovePartial(job=self._job, save=save)]
        open_to_it = record is None or SAVE.takes(record.state, On.VOTES_FOUND)
        if partial.complete and open_to_it and self._facts.active is None:
            record = record or self._facts.record_of(save, 0, now)
            record.due, record.drain_since = True, None  # it was, in an earlier process of this coordinator
            return self._commit(record, On.VOTES_FOUND)
        if record is None and save.incarnation < incarnation:
            return [RemovePartial(job=self._job, save=save)]
        self._facts.partials.add(save)
        return []

    def revive(self, save: SaveId) -> None:
        """All of it lies in memory again, and the job continues from it: if it was to be durable, it still is."""
        record = self._facts.records.get(save)
        lost_its_turn = record is not None and record.state in {State.FAILED, State.SUPERSEDED} and record.staged
        if record is not None and lost_its_turn and save not in self._facts.on_store:
            self._queue(record, On.ASKED)

    def next_deadline(self) -> float | None:
        """When a staging save has taken too long, or a drain is tried again."""
        staging = [r.since + self._policy.stage_timeout_s for r in self._facts.judged_incomplete]
        silent = (
            self._facts.silent_since + self._policy.drain_give_up_s if self._facts.silent_since is not None else None
        )
        return min([*staging, *(t for t in (self._facts.retry_at, silent) if t is not None)], default=None)

    def tick(self, now: float) -> list[Action]:
        """Gives up what took too long; tries again what failed."""
        actions: list[Action] = []
        for record in self._facts.judged_incomplete:
            if now - record.since >= self._policy.stage_timeout_s:
                reason = f"{named_ranks(record.missing)} did not deliver within {self._policy.stage_timeout_s:g} s"
                actions += self._end(record, On.INCOMPLETE, reason)
        if self._facts.silent_since is not None and now - self._facts.silent_since >= self._policy.drain_give_up_s:
            self._facts.silent_since = None
            actions += self._give_up_on_the_store()
        if self._facts.retry_at is not None and now >= self._facts.retry_at:
            self._facts.retry_at = None
            active = self._facts.records.get(self._facts.active) if self._facts.active is not None else None
            if active is not None and active.state is State.COMMITTING:
                actions += self._commit(active, On.AGAIN)
        return actions

    def _give_up_on_the_store(self) -> list[Action]:
        """It never answered: notifies waiters for a drain. The memory stays; after a later answer draining resumes."""
        waiting = self._facts.of(State.QUEUED)
        reason = "the store has not answered since the daemon started"
        return [a for r in waiting for a in self._end(r, On.NO_CHANCE if r.in_memory else On.OUTRUN, reason)]
