"""One job on this node: its ranks, its slots, its share of each drain. Pure: events in, actions out.

What concerns all ranks is decided by the coordinator (rank 0's daemon); this half carries it out and reports.
"""

from msgspec.structs import replace

from ckptd.core import events as ev
from ckptd.core.actions import Action, ForgetJob, Note, TakeDigests, ToRank
from ckptd.core.node.data_column import OwnColumn
from ckptd.core.node.drain import DrainShare
from ckptd.core.node.fetch import Fetching
from ckptd.core.node.foreign_memory import ForeignMemory
from ckptd.core.node.inventory import PeerAnswers, pieces_of, segments_of
from ckptd.core.node.load import LoadAnswers
from ckptd.core.node.membership import Membership
from ckptd.core.node.orphan_timer import LeftAlone
from ckptd.core.node.parity import Protection
from ckptd.core.node.parity_share import ParityShare
from ckptd.core.node.ranks import LocalRanks
from ckptd.core.node.retained import Keeps
from ckptd.core.node.slots import Slot, SlotTable
from ckptd.core.node.standing import Standing
from ckptd.core.node.succession import Succession
from ckptd.core.policy import Policy
from ckptd.core.preemption import Notice
from ckptd.shared.base.ids import NO_RUN, JobKey, Run
from ckptd.shared.protocol.messages import Attached, Done, End, Milestone, Progress, Refused, SlotGranted, SlotsComing


class JobNode:
    """The node's half of a job."""

    def __init__(self, job: JobKey, node: str, policy: Policy, incarnation: int = 0) -> None:
        self.job = job
        self.node = node
        self.standing = Standing(job, incarnation)
        self.slots = SlotTable(job, policy.slots_per_rank)
        self.ranks = LocalRanks(job, self.slots)
        self.membership = Membership(job, node, self.ranks)
        self.protection = Protection(job, node)
        self.own_column = OwnColumn(job, node, self.slots, self.membership, self.protection)
        self.fetching = Fetching(job, node, policy)
        parity = ParityShare(job, self.protection, on=policy.drain_parity, wait_s=policy.parity_wait_s)
        self.drain = DrainShare(job, self.slots, self.membership.report, parity)
        self.succession = Succession(job, node, self.membership, self.drain, self.ranks)
        self.answers = PeerAnswers(job, node, self.slots, self.protection)
        self.loads = LoadAnswers(job, self.ranks, self.slots, self.membership.report)
        self._client_started = policy.client_started
        self._alone = LeftAlone(policy)
        self.keeps = Keeps()
        self.notice = Notice(job)
        self._world_size = 0  # of the session that is in
        self.foreign = ForeignMemory(job, policy, self.slots, self.keeps, self.protection)

    @property
    def incarnation(self) -> int:
        """The largest that is known here."""
        return self.standing.incarnation

    @property
    def coordinator(self) -> str:
        """The node whose daemon's orders count."""
        return self.membership.coordinator

    # --- events

    def handle(self, event: ev.Event) -> list[Action]:
        """What to do about an event of this node, or an order of the coordinator."""
        actions = self._from_rank(event)
        return [*actions, *(self.membership.report(fact) for fact in self.ranks.slots_awaited())]

    def _from_rank(self, event: ev.Event) -> list[Action]:  # noqa: C901, PLR0912 - one line per event
        if isinstance(event, ev.FromRank) and event.session and not self.ranks.is_in(event):
            return [self.ranks.stranger(event)]
        match event:
            case ev.RankFound():
                self.ranks.live[event.rank, event.session] = event
                return self.membership.report_to_all(event)
            case ev.RankAttached():
                return self._attached(event)
            case ev.RankGone():
                return self._gone(event)
            case ev.RankDetached():
                answer = Done(reply_to=event.request)
                word = ToRank(job=self.job, rank=event.rank, session=event.session, message=answer)
                return [*self.ranks.missed(event.rank, self.keeps.pending), word, *self._left(event)]
            case ev.SlotsAsked():
                coming = SlotsComing(reply_to=event.request, count=self.slots.coming(event.rank))
                actions = [*self.ranks.tell(event.rank, coming), *self.slots.demand(event.rank, event.capacity)]
                return [*actions, *self._grant(event.rank)]
            case ev.SlotsFit():
                return self.slots.give_way(event.rank)
            case ev.SlotReady():
                return [*self.slots.ready(event.slot, event.rank, event.capacity), *self._grant(event.rank)]
            case ev.SlotsFailed():
                self.slots.failed(event.rank, event.count)
                return self._short_of_slots(event)
            case ev.SegmentStaged():
                return self._staged(event)
            case ev.SlotAdopted():
                return self._adopted(event)
            case ev.SaveSkipped() | ev.DrainAsked() | ev.PreemptAsked():
                return [*self.ranks.done(event.rank, event.request), self.membership.report(event)]
            case ev.LoadAsked() | ev.LoadReported():
                return self.loads.word(event)
            case ev.DigestsSealed():
                known = self.slots.digested(event.slot, event.save, event.seal)
                told = [*self.drain.vote(), *self.loads.answer(), *self.answers.settled()]
                return [*told, *self.own_column.offer()] if known else []
            case ev.DigestsFailed():
                return self._unreadable(event)
        return self._outcome(event)

    def _outcome(self, event: ev.Event) -> list[Action]:  # noqa: C901, PLR0912 - one line per event
        """What became of an action, what was found at start, what other nodes do."""
        match event:
            case ev.DrainMoved():
                return self.drain.moved(event)
            case ev.Drained():
                return [*self.drain.drained(event), *self.collect()]
            case ev.VoteWritten():
                return [*self.drain.wrote_vote(event), *self.collect()]
            case ev.CommitEnded():
                return self.succession.finished(event)
            case ev.StoreRemembered():
                self.standing.store_id = event.store_id
                return []
            case ev.TopologyKept():
                self.standing.heard(event.epoch, NO_RUN)
                actions = self.membership.kept(event)
                return [*actions, *self.protection.moved(event.topology, event.epoch)]
            case ev.PieceAdopted():
                self.protection.adopt(event.piece)
                return []
            case ev.Encoded():
                return [*self.protection.encoded(event), *self.drain.encoded(event)]
            case ev.StepsRead():
                return [self.membership.report(self.notice.heard(event))]
            case ev.ParityDrained():
                return [*self.drain.copied(event), *self.collect()]
            case ev.SegmentFetched():
                return self._fetched(event)
            case ev.PeerUp():
                return self._peer_up(event.node)
            case ev.PeerDown():
                return self._peer_down(event.node)
            case ev.NodeMessage():
                return self._order(event)
        raise AssertionError(f"no row for {event}")

    def _order(self, order: ev.NodeMessage) -> list[Action]:  # noqa: C901 - one line per order
        match order:
            case ev.SessionOpened():
                return self._opened(order)
            case ev.SessionRefused():
                return self.ranks.refused(order)
            case ev.SessionWaits():
                return self.ranks.session_waits(order)
            case ev.Introduced():
                return self.membership.introduced(order, self.incarnation, self.standing.store_id)
            case ev.CommitFinished():
                return self.succession.durable(order.save)
            case ev.ColumnOffered():
                return self.protection.offered(order)
            case ev.SealAsked() | ev.PieceAsked():
                return self.answers.asked(order)
            case ev.SealTold():
                return self.fetching.sealed(order)
            case ev.PieceTold():
                return self.fetching.described(order)
        if order.node != self.coordinator:
            return []
        self._alone.spoken_to()
        return self._coordinators_order(order)

    def _coordinators_order(self, order: ev.NodeMessage) -> list[Action]:  # noqa: C901, PLR0912 - one line per order
        match order:
            case ev.SaveStaged():
                self.keeps.staged(order.save)
                return [*self.ranks.tell_all(Progress(save=order.save, milestone=Milestone.STAGED)), *self.collect()]
            case ev.SaveWaits():
                return self.ranks.save_waits(order)
            case ev.EncodeOrdered():
                return [*self.protection.order(order), *self.own_column.offer(), *self.collect()]
            case ev.SaveProtected():
                news = self.ranks.tell_all(Progress(save=order.save, milestone=Milestone.PROTECTED))
                return [*news, *self.protection.protected(order), *self.collect()]
            case ev.SaveEnded():
                return self._save_ended(order)
            case ev.Outlived():
                self.keeps.outlived(order)
                return [*self.protection.outlived(order), *self.collect()]
            case ev.DrainOrdered():
                return [*self.standing.saved_to(order.store_id), *self.drain.order(order)]
            case ev.PreemptOrdered():
                mine = (rank for rank, session in sorted(self.ranks.live) if session == order.session)
                return self.notice.ordered(order, tuple(mine))
            case ev.ForeignRuns():
                return self._set_apart(order)
            case ev.FetchOrdered():
                self.loads.save = order.save
                return self.fetching.order(order, self.protection.pieces.get((order.save, order.epoch)))
            case ev.DrainDropped():
                self.drain.dropped(order.save)
                return self.collect()
            case ev.LoadOrdered():
                return self._load_ordered(order)
            case ev.LoadRefused():
                return [*self.loads.refused(order), *self.collect()]
            case ev.JobReleased():
                return self._released()
        return [Note(job=self.job, text=f"{order.node} says what no node knows: {type(order).__name__}")]

    def _save_ended(self, order: ev.SaveEnded) -> list[Action]:
        self.keeps.ended(order, self.incarnation)
        self.drain.ended(order.save)
        durable, actions = order.end is End.DURABLE, []
        if durable:
            self.drain.dropped(order.save)
            actions = self.protection.durable(order.save)
        milestone = Milestone.DURABLE if durable else None
        news = Progress(save=order.save, milestone=milestone, end=order.end, reason=order.reason, apart=order.apart,
                        where=order.where)  # fmt: skip
        return [*actions, *self.ranks.tell_all(news), *self.collect()]

    # --- ranks

    def _attached(self, event: ev.RankAttached) -> list[Action]:
        self.ranks.lives(event)
        if 0 < event.incarnation < self.incarnation and not self.membership.is_of(event):
            text = f"incarnation {event.incarnation} was replaced by {self.incarnation}"
            refusal = Refused(reply_to=event.request, code="stale", message=text)
            return [ToRank(job=self.job, rank=event.rank, session=event.session, message=refusal)]
        self.ranks.came(event)
        return self.membership.attached(event, self.incarnation, self.standing.store_id)

    def _opened(self, order: ev.SessionOpened) -> list[Action]:
        late = order.incarnation < self.incarnation or (
            order.incarnation == self.incarnation and self.membership.session
        )
        if order.node != self.coordinator and late:
            return []  # of a coordinator that was replaced
        actions = self.standing.opened(order.session, order.incarnation, order.run, order.store_id)
        actions += self.ranks.replace(order.session)
        actions += self._moved(order)
        for rank in order.ranks:
            local = self.ranks.waiting.pop((rank, order.session), None)
            if local is None:
                continue
            actions += [*self.ranks.seat(local), *self.notice.came(rank, order.session)]
            welcome = Attached(
                reply_to=local.attached.request,
                node=self.node,
                incarnation=order.incarnation,
                run=order.run,
                store_id=order.store_id,
                client_started=self._client_started,
                scheme=self.protection.scheme,
                known=list(order.known),
                warnings=list(order.warnings),
            )
            self._world_size = local.attached.world_size
            actions += [self.ranks.to(local, welcome), *self.slots.trim(local.attached.world_size)]
        return actions

    def _moved(self, order: ev.SessionOpened) -> list[Action]:
        """Another session, perhaps on other nodes: its coordinator learns what lies here."""
        before = self.coordinator
        kept = self.membership.opened(order, self.keeps.settled)
        if kept is None:
            return []
        if self.coordinator != before:
            self.drain.orphaned()
        return [*self.protection.moved(order.topology, order.epoch), *kept, *self._resync()]

    def _resync(self) -> list[Action]:
        """All that the coordinator must know of this node, whatever it was told before."""
        has = replace(
            self.membership.has(self.incarnation),
            run=self.standing.run,
            segments=segments_of(self.slots),
            pieces=pieces_of(self.protection),
            resumed=self.keeps.resumed_in(self.incarnation),
        )
        again = self.ranks.again(self.incarnation, self.standing.run, self.standing.sessions_store)
        awaited = self.ranks.slots_awaited(anew=True)
        facts: list[ev.Fact] = [*self.ranks.live.values(), has, *awaited, *again, *self.loads.unanswered()]
        self.membership.told(self.coordinator)
        return [self.membership.report(fact) for fact in facts]

    def _peer_up(self, node: str) -> list[Action]:
        """Whatever it was told before may be lost."""
        actions = self._resync() if node == self.coordinator else []
        actions += self.membership.peer_up(node, self.incarnation, self.standing.store_id)
        return [*actions, *self.fetching.peer_up(node), *self.protection.peer_up(node)]

    def _peer_down(self, node: str) -> list[Action]:
        """What was asked of it is not answered."""
        self.membership.peer_down(node)
        alone = self.drain.parity_failed() if node in self.protection.members else []
        finish = self.succession.lost(node, self.incarnation)
        finish += self.ranks.coordinator_lost(node, self.keeps, self.drain.voted) if node == self.coordinator else []
        return [*self.fetching.peer_down(node), *self.protection.peer_down(node), *alone, *finish]

    def _left(self, event: ev.RankGone | ev.RankDetached) -> list[Action]:
        self.ranks.live.pop((event.rank, event.session), None)
        reports = self.membership.report_gone(event)
        return [*self.ranks.drop(event.rank, event.session), *reports]

    def _gone(self, event: ev.RankGone) -> list[Action]:
        return [*self._left(event), *([] if self.needed else [ForgetJob(job=self.job)])]

    @property
    def needed(self) -> bool:
        """Whether anybody is here, or anything lies here."""
        return bool(self.busy or self.ranks.live)

    @property
    def busy(self) -> bool:
        """Whether anybody has come in or stands at the door, or anything lies here."""
        return bool(self.ranks.seated or self.ranks.waiting or self.slots or self.protection.pieces)

    def _short_of_slots(self, event: ev.SlotsFailed) -> list[Action]:
        """Memory is short; what other runs of the job left in it is told, for the user can give it back."""
        refusal = self.foreign.refusal(event)
        return [*self.ranks.tell(event.rank, refusal), Note(job=self.job, text=refusal.message)]

    def _grant(self, rank: int) -> list[Action]:
        """No seal of a save that nobody heard of may be in force while the rank overwrites its bytes."""
        actions: list[Action] = []
        for slot in self.slots.grantable(rank):
            actions += self.slots.free(slot) if slot.unsure else []
            actions += self.ranks.tell(rank, SlotGranted(slot=slot.name, capacity=slot.capacity))
        return actions

    # --- segments

    def _staged(self, event: ev.SegmentStaged) -> list[Action]:
        if event.save.incarnation != self.incarnation or event.save.run != self.standing.run:
            text = f"{event.save} comes from an incarnation that {self.incarnation} has replaced"
            return self.ranks.refuse(event.rank, event.request, "stale", text)
        again = any(slot.name == event.slot for slot in self.slots.holding(event.save))
        problem = self.slots.hold(event)
        if problem:
            return self.ranks.refuse(event.rank, event.request, "protocol", problem)
        if event.drain:
            self.keeps.forced.add(event.save)
        answer, event = self.ranks.done(event.rank, event.request), self.ranks.saves_late(event)
        if again:  # by a rank that did not hear the answer
            return [*answer, self.membership.report(event)]
        self.keeps.pending.add(event.save)
        return [*answer, TakeDigests(job=self.job, slot=event.slot, save=event.save), self.membership.report(event)]

    def _adopted(self, event: ev.SlotAdopted) -> list[Action]:
        staged = self.slots.adopt(event)
        if staged is None:
            return []
        self.standing.heard(staged.save.incarnation, staged.save.run)
        self.keeps.pending.add(staged.save)
        return [self.membership.report(staged)]

    def collect(self) -> list[Action]:
        """Frees every slot that nothing holds on to, and grants it again.

        Those of ranks that a smaller world does not have go altogether, once a checkpoint of it is safe.
        """
        wanted = (
            self.keeps.wanted
            | self.protection.wanted
            | self.fetching.saves
            | {s for s in (self.drain.save, self.loads.save) if s is not None}
        )
        actions: list[Action] = []
        for slot in [s for s in self.slots if s.save is not None and s.save not in wanted and not s.foreign]:
            actions += self._free(slot)
        if self._world_size and self.keeps.settled == self.incarnation:
            actions += self.slots.trim(self._world_size)
            topology = self.membership.topology
            actions += self.slots.trim_moved(topology.ranks_of(self.node)) if topology is not None else []
        if self._left_behind:
            actions += self.slots.trim()
            actions += [] if self.needed else [ForgetJob(job=self.job)]
        return [*self.answers.settled(), *actions]

    @property
    def _left_behind(self) -> bool:
        """Whether the job has moved to other nodes: what lies here is kept as far as it is promised, and no longer."""
        topology = self.membership.topology
        inside = topology is None or self.node in topology.nodes
        return not inside and self.coordinator != self.node and not self._peopled

    @property
    def _peopled(self) -> bool:
        """Whether a rank lives here, or stands at the door."""
        return bool(self.ranks.live or self.ranks.seated or self.ranks.waiting)

    def _free(self, slot: Slot) -> list[Action]:
        save, rank = slot.save, slot.rank
        assert save is not None  # noqa: S101 - only held slots come here
        actions = self.slots.free(slot)
        actions.append(self.membership.report(ev.SegmentReleased(job=self.job, rank=rank, save=save)))
        return [*actions, *self.slots.provision(rank), *self._grant(rank)]

    # --- drain

    def _unreadable(self, event: ev.DigestsFailed) -> list[Action]:
        """A slot that cannot be read can be neither voted for nor loaded: who waits for it is told."""
        actions: list[Action] = [Note(job=self.job, text=event.problem)]
        if event.save == self.protection.waits:
            actions.append(self.own_column.failed(event.problem))
        for slot in self.slots.holding(event.save):
            slot.unreadable = event.problem if slot.name == event.slot else slot.unreadable
        return [*actions, *self.drain.vote(), *self.loads.unreadable(event.save), *self.answers.settled()]

    # --- load

    def _load_ordered(self, order: ev.LoadOrdered) -> list[Action]:
        if order.agreed or order.save is None:  # a load that fails leaves the ranks in the incarnation they have
            self.standing.heard(order.incarnation, order.run)
        if order.agreed:
            self.keeps.resume(order)
        return [*self.loads.ordered(order), *self.collect()]

    def _fetched(self, event: ev.SegmentFetched) -> list[Action]:
        """The segment lies here now: in place of a copy that cannot be read, if there was one."""
        self.fetching.ended(event)
        if event.seal is None:
            return [self.membership.report(event), *self.collect()]
        actions = [*self.slots.fetched(event, event.seal), *self._grant(event.rank)]
        word = replace(event, seal=None, shares=event.seal.shares)
        return [*actions, self.membership.report(word), *self.collect()]

    # --- runs and stores

    def _set_apart(self, order: ev.ForeignRuns) -> list[Action]:
        """What these runs left is not the job's. The coordinator hears anew what lies here."""
        self.foreign.set_apart(frozenset(order.runs), frozenset(order.disputed))
        provided = [a for rank in self.ranks.seated for a in (*self.slots.provision(rank), *self._grant(rank))]
        return [*provided, *self._resync()]

    def _give_up_foreign(self, runs: set[Run]) -> list[Action]:
        """Nobody has asked for them in all that time."""
        gone = self.foreign.give_up(runs)
        return [*gone, *self._resync(), *([] if self.needed else [ForgetJob(job=self.job)])]

    # --- the end

    def _released(self) -> list[Action]:
        self.loads.save = None
        self.keeps.released()
        self.drain.forget()
        self.fetching.forget()
        actions = [*self.protection.released(), *self.collect(), *self.slots.trim()]
        return actions if self.needed or self._left_behind else [*actions, ForgetJob(job=self.job)]

    @property
    def _holds(self) -> bool:
        return bool(self.protection.pieces) or any(slot.save for slot in self.slots)

    def next_deadline(self) -> float | None:
        """When tick has something to do."""
        attended = self.coordinator == self.node or self._peopled
        alone = None if attended else self._alone.until(held=self._holds)
        return min(
            (t for t in (alone, self.foreign.until, self.fetching.next_deadline()) if t is not None), default=None
        )

    def tick(self, now: float) -> list[Action]:
        """Gives up what lies here when no rank lives here and no coordinator has spoken for orphan_ttl_s."""
        actions = self.fetching.tick(now)
        if runs := self.foreign.too_old(now):
            actions += self._give_up_foreign(runs)
        if self.coordinator == self.node or self._peopled:
            self._alone.spoken_to()
            return actions
        if not self._alone.too_long(now, held=self._holds):
            return actions
        self._alone.begin_anew(now)
        return [*actions, *self._released()]

    def check(self) -> None:
        """Asserts what must always hold; tests call it after every event."""
        self.slots.check()
