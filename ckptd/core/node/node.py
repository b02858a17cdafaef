"""One job on this node: its ranks, its slots, its share of each drain. Pure: events in, actions out.

What concerns all ranks is decided by the coordinator (rank 0's daemon); this half carries it out and reports.
"""

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from ckptd.core import events as ev
from ckptd.core.actions import Action, ForgetJob, Note, TakeDigests, ToRank
from ckptd.core.deadline import Deadline
from ckptd.core.links import Links
from ckptd.core.node.delivery import Delivery
from ckptd.core.node.demands import Demands
from ckptd.core.node.drain import DrainShare
from ckptd.core.node.fetch import Fetching
from ckptd.core.node.foreign_memory import ForeignMemory
from ckptd.core.node.gather import Gathering
from ckptd.core.node.inventory import PeerAnswers, chunks_of, segments_of
from ckptd.core.node.kept_links import KeptLinks
from ckptd.core.node.load import LoadAnswers
from ckptd.core.node.membership import Membership
from ckptd.core.node.parity import OwnDataColumn, Protection
from ckptd.core.node.parity_share import ParityShare
from ckptd.core.node.pulled import PulledSegments
from ckptd.core.node.ranks import LocalRank, LocalRanks
from ckptd.core.node.readers import Readers
from ckptd.core.node.slot_retention import SlotRetention
from ckptd.core.node.slots import Slot, SlotTable
from ckptd.core.node.standing import LeftAlone, Standing
from ckptd.core.node.succession import Succession
from ckptd.core.policy import Policy
from ckptd.core.preemption import Notice
from ckptd.shared.base.ids import JobKey
from ckptd.shared.protocol.messages import Done, Milestone, Refused, SlotGranted, SlotsComing

Parts = tuple[Callable[[Any], list[Action]], ...]
Handlers = dict[type[ev.Event], Parts]


class JobNode:
    """The node's half of a job."""

    def __init__(
        self, job: JobKey, node: str, policy: Policy, incarnation: int = 0, links: Links | None = None
    ) -> None:
        self.job, self.node = job, node
        links = links or Links(node)
        self.standing = Standing(job, incarnation)
        self.slots = SlotTable(job, policy.slots_per_rank)
        self.ranks = LocalRanks(job, self.slots)
        self.membership = Membership(job, node, self.ranks, self.standing, links)
        self.delivery = Delivery(job, node, self.ranks, self.slots, self.membership)
        self.protection = Protection(job, node, links)
        self.slot_retention = SlotRetention(self.standing)
        self.demands = Demands(self.membership, self.slot_retention)
        self.own_column = OwnDataColumn(job, node, self.slots, self.membership, self.protection)
        self.fetching = Fetching(job, node, policy, links)
        self.gathering = Gathering(job, node, policy, links, self.membership, self.ranks, self.slots)
        self.pulled = PulledSegments(job, node, policy, links, self.ranks, self.slots)
        parity = ParityShare(job, self.protection, on=policy.drain_parity, wait_s=policy.parity_wait_s)
        self.drain = DrainShare(job, self.slots, self.membership, parity)
        parts = (self.standing, self.membership, self.drain, self.ranks, self.slot_retention, self.protection)
        self.succession = Succession(node, policy, *parts)
        fetching = (self.fetching, self.gathering, self.pulled)
        self._kept_links = KeptLinks(job, node, policy, self.membership, self.protection, *fetching)
        self.answers = PeerAnswers(job, node, self.slots, self.protection)
        self.readers = Readers(job, node, self.ranks, self.membership)
        self.loads = LoadAnswers(job, self.ranks, self.slots, self.membership.report, self.readers)
        self._client_started = policy.client_started
        self._alone, self.notice = LeftAlone(policy), Notice(job)
        self._world_size = 0  # of the session that is in
        self.foreign = ForeignMemory(job, policy, self.slots, self.slot_retention, self.protection)
        waiting = (self.membership, *fetching, self.readers, self.loads.reports)
        self._waiting = (*waiting, self.succession, self.drain)
        self.events, self.orders = self._events(), self._orders()
        self.due = Deadline(self._deadline)  # changes with what happens here, and with links

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
        if isinstance(event, ev.FromRank) and event.session and not self.ranks.is_in(event):
            actions = [self.ranks.stranger(event)]
        else:
            actions = [action for part in self._parts(event) for action in part(event)]
        self.succession.follow()
        self.due.changed()
        if self._attended:
            self._alone.spoken_to()
        return [*self.delivery.reported_with(actions), *self._kept_links.changed()]

    def _parts(self, event: Any) -> Parts:
        if (parts := self.events.get(type(event))) is not None:
            return parts
        if event.node != self.coordinator:
            return ()
        self._alone.spoken_to()
        return self.orders[type(event)]

    def _events(self) -> Handlers:
        """Of this node, and messages of nodes that need not coordinate: which parts react, in this order."""
        slots, ranks, drain = self.slots, self.ranks, self.drain
        protection, membership = self.protection, self.membership
        return {
            ev.RankFound: (ranks.found, membership.found),
            ev.RankAttached: (self._attached,),
            ev.RankGone: (self.pulled.left, self._left, self.delivery.gone, self._emptied),
            ev.RankDetached: (self.pulled.left, self._detached, self._left, self.membership.report_gone),
            ev.SlotsAsked: (self._slots_asked, self._grant),
            ev.SlotsFit: (lambda event: slots.fit(event.rank),),
            ev.SlotReady: (lambda event: slots.ready(event.slot, event.rank, event.capacity), self._grant),
            ev.SlotsFailed: (self._short_of_slots, self.collect),
            ev.SegmentStaged: (self._staged,),
            ev.SlotAdopted: (self._adopted,),
            **dict.fromkeys((ev.SaveSkipped, ev.DrainAsked, ev.PreemptAsked), (ranks.taken_over, self.demands.made)),
            **dict.fromkeys((ev.LoadAsked, ev.LoadReported), (self.loads.word,)),
            ev.PlaceAsked: (self.readers.asked,),
            ev.SegmentsWanted: (self.pulled.wanted,),
            ev.SegmentsDropped: (self.pulled.dropped,),
            ev.SegmentsPulled: (self.pulled.pulled,),
            ev.DigestsSealed: (self._digested,),
            ev.DigestsFailed: (self._unreadable,),
            ev.DrainMoved: (drain.moved,),
            ev.Drained: (drain.drained, self.succession.written, self.collect),
            ev.VoteWritten: (drain.wrote_vote, self.succession.written, self.collect),
            ev.ParityDrained: (drain.copied, self.collect),
            ev.CommitEnded: (self.succession.finished,),
            ev.StoreRemembered: (self.standing.remembered,),
            ev.TopologyKept: (self.standing.kept, membership.kept, self._placed),
            ev.ChunkAdopted: (protection.adopt,),
            ev.Encoded: (protection.encoded, drain.encoded),
            ev.StepsRead: (lambda event: [membership.report(self.notice.heard(event))],),
            ev.SegmentFetched: (self._fetched, self.collect),
            **self._of_nodes(),
            ev.SessionOpened: (self._opened,),
            ev.SessionRefused: (ranks.refused, lambda _: membership.end_meetings()),
            ev.SessionWaits: (ranks.session_waits,),
            ev.SessionAnnounced: (membership.session_announced,),
            ev.AnnounceOrdered: (membership.announce_ordered,),
            ev.TopologyAsked: (membership.topology_asked,),
            ev.TopologyReported: (membership.topology_reported,),
            ev.CommitFinished: (self.succession.durable,),
        }

    def _of_nodes(self) -> Handlers:
        """Which nodes answer, and what they ask of this one without the coordinator."""
        protection = self.protection
        fetching = (self.fetching, self.gathering, self.pulled)
        linked = (self.membership, *fetching, protection, self.readers)
        return {
            ev.PeerUp: (self._peer_up, *(part.peer_up for part in linked)),
            ev.PeerDown: tuple(part.peer_down for part in (*linked, self.drain, self.succession)),
            ev.ColumnOffered: (protection.offered,),
            ev.SealAsked: (self.answers.seal_asked,),
            ev.ChunkRequested: (self.answers.chunk_requested,),
            ev.SealTold: tuple(part.sealed for part in fetching),
            ev.ChunkReported: (self.fetching.described,),
            ev.ExchangeAsked: (self.readers.exchange_asked,),
            ev.ExchangeTold: (self.readers.exchange_told,),
        }

    def _orders(self) -> Handlers:
        """Orders that count only when the coordinator gives them."""
        slot_retention, ranks, protection = self.slot_retention, self.ranks, self.protection
        keeping = (slot_retention, self.demands, self.drain, protection)
        loads = self.pulled.ordered, self.loads.ordered
        return {
            ev.SaveStaged: (slot_retention.staged, ranks.save_reached(Milestone.STAGED), self.collect),
            ev.SaveWaits: (ranks.save_waits,),
            ev.EncodeOrdered: (protection.order, self.own_column.offer, self.collect),
            ev.SaveProtected: (ranks.save_reached(Milestone.PROTECTED), protection.protected, self.collect),
            ev.SaveEnded: (*(part.ended for part in keeping), ranks.save_ended, self.collect),
            ev.SavesObsolete: (slot_retention.obsolete, self.demands.obsolete, protection.obsolete, self.collect),
            ev.DrainOrdered: (self.standing.saved_to, self.drain.order),
            ev.PreemptOrdered: (lambda o: self.notice.ordered(o, ranks.of(o.session)), self.demands.preempt_ordered),
            ev.ForeignRuns: (self._isolate,),
            ev.FetchOrdered: (self.loads.protects, lambda o: self.fetching.order(o, protection.chunk_for(o))),
            ev.GatherOrdered: (self.loads.protects, self.gathering.ordered, self.collect),
            ev.DrainDropped: (self.drain.dropped, self.collect),
            ev.LoadOrdered: (self.standing.loads, slot_retention.loaded, *loads, self.collect),
            ev.LoadRefused: (self.pulled.refused, self.loads.refused, self.collect),
            ev.JobReleased: (self._released,),
        }

    # --- ranks

    def _attached(self, event: ev.RankAttached) -> list[Action]:
        self.ranks.lives(event)
        if 0 < event.incarnation < self.incarnation and not self.membership.is_of(event):
            text = f"incarnation {event.incarnation} was replaced by {self.incarnation}"
            refusal = Refused(reply_to=event.request, code="stale", message=text)
            return [ToRank(job=self.job, rank=event.rank, session=event.session, message=refusal)]
        self.ranks.came(event)
        return self.membership.attached(event)

    def _opened(self, order: ev.SessionOpened) -> list[Action]:
        late = order.incarnation < self.incarnation or (
            order.incarnation == self.incarnation and self.membership.session
        )
        if order.node != self.coordinator and late:
            return []  # of a coordinator that was replaced
        actions = self.standing.opened(order)
        actions += self.ranks.replace(order.session)
        actions += self._moved(order)
        for rank in order.ranks:
            local = self.ranks.waiting.pop((rank, order.session), None)
            if local is None:
                continue
            actions += [*self.ranks.admit(local), *self.notice.came(rank, order.session)]
            request, scheme = local.attached.request, self.protection.scheme
            welcome = self.membership.welcome(order, request, scheme, client_started=self._client_started)
            self._world_size = local.attached.world_size
            actions += [self.ranks.to(local, welcome), *self.slots.trim(local.attached.world_size)]
        return [*actions, *self.membership.end_meetings()]

    def _moved(self, order: ev.SessionOpened) -> list[Action]:
        """Another session, perhaps on other nodes: its coordinator learns what lies here."""
        before = self.coordinator
        kept = self.membership.opened(order, self.slot_retention.settled)
        if kept is None:
            return []
        if self.coordinator != before:
            self.drain.orphaned()
        return [*self._placed(), *kept, *self._resync(order)]

    def _placed(self, _: object = None) -> list[Action]:
        return self.protection.moved(self.membership.place, self.membership.epoch)

    def _resync(self, answer: ev.SessionOpened | None = None) -> list[Action]:
        """Everything that the coordinator must know of this node, sent before or not. answer: as Membership has it."""
        has = replace(
            self.membership.has(),
            run=self.standing.run,
            segments=segments_of(self.slots, self.slot_retention.forced),
            wanted=self.demands.durable,
            chunks=chunks_of(self.protection),
            resumed=self.slot_retention.resumed_in(self.incarnation),
            awaited=self.ranks.slots_awaited().ranks,
        )
        report = self.membership.report
        facts = (*self.demands.repeat(), *self.loads.reports.repeat())
        return [report(has), *self.membership.resync(answer), *map(report, facts)]

    def _peer_up(self, event: ev.PeerUp) -> list[Action]:
        """Earlier messages to it may be lost, and its daemon may be another one."""
        if event.node != self.coordinator:
            return []
        self.membership.coordinator_came()
        return self._resync()

    def _left(self, event: ev.RankGone | ev.RankDetached) -> list[Action]:
        self.ranks.live.pop((event.rank, event.session), None)
        return [*self.ranks.drop(event.rank, event.session), *self.membership.end_meetings()]

    def _detached(self, event: ev.RankDetached) -> list[Action]:
        done = ToRank(job=self.job, rank=event.rank, session=event.session, message=Done(reply_to=event.request))
        return [*self.ranks.missed(event.rank, self.slot_retention.pending), done]

    def _emptied(self, _: Any) -> list[Action]:
        return [] if self.needed else [ForgetJob(job=self.job)]

    @property
    def needed(self) -> bool:
        """Whether anybody is here, or anything lies here."""
        return bool(self.busy or self.ranks.live)

    @property
    def busy(self) -> bool:
        """Whether anybody has come in or waits to join, or anything lies here."""
        return bool(self.ranks.admitted or self.ranks.waiting or self.slots or self.protection.chunks)

    def _slots_asked(self, event: ev.SlotsAsked) -> list[Action]:
        coming = SlotsComing(reply_to=event.request, count=self.slots.coming(event.rank))
        return [*self.ranks.tell(event.rank, coming), *self.slots.demand(event.rank, event.capacity)]

    def _short_of_slots(self, event: ev.SlotsFailed) -> list[Action]:
        """Memory is short: reports what other runs of the job left in it, which the user can give back."""
        self.slots.failed(event.rank, event.count)
        self.loads.spare = None
        refusal = self.foreign.refusal(event)
        return [*self.ranks.tell(event.rank, refusal), Note(job=self.job, text=refusal.message)]

    def _grant(self, to: ev.SlotsAsked | ev.SlotReady | ev.SegmentFetched | Slot | LocalRank) -> list[Action]:
        """No seal of a save that was never reported may be in force while the rank overwrites its bytes."""
        actions, rank = list[Action](), to.rank
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
            self.slot_retention.forced.add(event.save)
        answer = self.ranks.done(event.rank, event.request)
        self.ranks.saves_late(event)
        self.delivery.staged(event)
        if again:  # by a rank that did not receive the answer
            return answer
        self.slot_retention.pending.add(event.save)
        return [*answer, TakeDigests(job=self.job, slot=event.slot, save=event.save)]

    def _adopted(self, event: ev.SlotAdopted) -> list[Action]:
        staged = self.slots.adopt(event)
        if staged is None:
            return []
        self.standing.heard(staged.save.incarnation, staged.save.run)
        self.slot_retention.pending.add(staged.save)
        return [self.membership.report(staged)]

    def collect(self, _: object = None) -> list[Action]:
        """Frees every slot that nothing holds on to, and grants it again.

        Those of ranks that a smaller world does not have go altogether, once a checkpoint of it is safe.
        """
        used = self.fetching.saves | {s for s in (self.loads.save, self.drain.save) if s is not None}
        wanted = self.slot_retention.wanted | self.protection.wanted | used
        copied = self.fetching.saves | self.loads.copied(self.slot_retention.newest_staged)
        actions = self.slots.drop_copies(copied, self.drain.share(), self.delivery.released)
        over = [s for s in self.slots if s.save is not None and s.save not in wanted and not (s.foreign or s.copied)]
        actions += [action for slot in over for action in self._free(slot)]
        if self._world_size and self.slot_retention.settled == self.incarnation:
            actions += self.slots.trim(self._world_size)
            place = self.membership.place
            actions += self.slots.trim_moved(place.ranks) if place is not None else []
        if self._left_behind:
            actions += [*self.slots.trim(), *self._emptied(None)]
        return [*self.answers.settled(), *actions]

    @property
    def _left_behind(self) -> bool:
        """Whether the job has moved to other nodes: what lies here is kept as far as it is promised, and no longer."""
        place = self.membership.place
        inside = place is None or bool(place.ranks)
        return not inside and self.coordinator != self.node and not self._peopled

    @property
    def _peopled(self) -> bool:
        """Whether a rank lives here, or waits to join."""
        return bool(self.ranks.live or self.ranks.admitted or self.ranks.waiting)

    def _free(self, slot: Slot) -> list[Action]:
        save, rank = slot.save, slot.rank
        assert save is not None  # noqa: S101 - only held slots come here
        self.delivery.released(rank, save)
        return [*self.slots.free(slot), *self.slots.provision(rank), *self._grant(slot)]

    # --- drain

    def _digested(self, event: ev.DigestsSealed) -> list[Action]:
        known = self.slots.digested(event.slot, event.save, event.seal)
        told = [*self.drain.vote(), *self.loads.answer(), *self.answers.settled(), *self.pulled.settled()]
        return [*told, *self.own_column.offer()] if known else []

    def _unreadable(self, event: ev.DigestsFailed) -> list[Action]:
        """A slot that cannot be read can be neither voted for nor loaded: notifies the waiters."""
        actions: list[Action] = [Note(job=self.job, text=event.problem)]
        if event.save == self.protection.waits:
            actions.append(self.own_column.failed(event.problem))
        for slot in self.slots.holding(event.save):
            slot.unreadable = event.problem if slot.name == event.slot else slot.unreadable
        told = [*self.drain.vote(), *self.loads.unreadable(event.save), *self.answers.settled()]
        return [*actions, *told, *self.pulled.settled()]

    # --- load

    def _fetched(self, event: ev.SegmentFetched) -> list[Action]:
        """The segment lies here now: in place of a copy that cannot be read, if there was one."""
        if (copied := self.gathering.fetched(event)) is not None:
            return copied
        self.fetching.ended(event)
        if (seal := event.seal) is None:
            return [self.membership.report(event)]
        actions = [*self.slots.fetched(event, seal), *self._grant(event)]
        told = replace(event, seal=None, nbytes=seal.image_nbytes, attestations=seal.attestations)
        return [*actions, self.membership.report(told)]

    # --- runs and stores

    def _isolate(self, order: ev.ForeignRuns) -> list[Action]:
        """What these runs left is not the job's. The coordinator receives again what lies here."""
        self.foreign.isolate(frozenset(order.runs), frozenset(order.disputed))
        self.demands.foreign(frozenset(order.runs))
        provided = [
            a for r, local in self.ranks.admitted.items() for a in (*self.slots.provision(r), *self._grant(local))
        ]
        return [*provided, *self._resync()]

    # --- the end

    def _released(self, _: object = None) -> list[Action]:
        self.loads.forget()
        self.slot_retention.released()
        self.demands.released()
        self.drain.forget()
        self.fetching.forget()
        self.gathering.forget()
        actions = [*self.pulled.over(), *self.protection.released(), *self.collect(), *self.slots.trim()]
        return actions if self.needed or self._left_behind else [*actions, ForgetJob(job=self.job)]

    @property
    def _holds(self) -> bool:
        return bool(self.protection.chunks) or any(slot.save for slot in self.slots)

    @property
    def _attended(self) -> bool:
        return self.coordinator == self.node or self._peopled

    def _deadline(self) -> float | None:
        alone = None if self._attended else self._alone.until(held=self._holds)
        times = [alone, self.foreign.until, *(part.next_deadline() for part in (*self._waiting, self.delivery))]
        return min((t for t in times if t is not None), default=None)

    def tick(self, now: float) -> list[Action]:
        """What is due. Gives up what lies here when no rank lives here and nobody has spoken for orphan_ttl_s."""
        if not self.due.by(now):
            return []
        self.due.changed()
        actions = [action for part in self._waiting for action in part.tick(now)]
        if runs := self.foreign.too_old(now):  # nobody has asked for them in all that time
            actions += [*self.foreign.give_up(runs), *self._resync(), *self._emptied(None)]
        if not self._attended and self._alone.too_long(now, held=self._holds):
            self._alone.begin_anew(now)
            actions += self._released()
        return self.delivery.reported_with(actions, now)

    def check(self) -> None:
        """Asserts what must always hold; tests call it after every event."""
        self.slots.check()
