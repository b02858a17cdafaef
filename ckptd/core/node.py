"""One job on this node: its ranks, its slots, its share of each drain. Pure: events in, actions out.

What concerns all ranks is decided by the coordinator (rank 0's daemon); this half carries it out and reports.
"""

from dataclasses import dataclass

from ckptd.core import events as ev
from ckptd.core.actions import (
    Action,
    Drain,
    ForgetJob,
    Note,
    TakeDigests,
    ToNode,
    ToRank,
    WriteVote,
)
from ckptd.core.policy import Policy
from ckptd.core.slots import Slot, SlotTable
from ckptd.protocol.ids import JobKey, SaveId
from ckptd.protocol.messages import (
    Attached,
    Done,
    LoadFrom,
    Milestone,
    Progress,
    Refused,
    Reply,
    SlotGranted,
    SlotsComing,
    SlotsRefused,
    Tier,
)


@dataclass(slots=True)
class LocalRank:
    """A rank that presented itself here."""

    rank: int
    session: str
    pid: int
    host: str
    world_size: int
    request: int
    load_request: int | None = None
    load_order: ev.LoadOrdered | None = None  # the answer, kept back until the slot's digests are taken


class JobNode:
    """The node's half of a job."""

    def __init__(self, job: JobKey, node: str, policy: Policy) -> None:
        self.job = job
        self.node = node
        self.incarnation = 0
        self._client_started = policy.client_started
        self.slots = SlotTable(job, policy.slots_per_rank)
        self.ranks: dict[int, LocalRank] = {}  # let in by the coordinator
        self.waiting: dict[tuple[int, str], LocalRank] = {}  # by rank and session, before the door
        self.replaced: dict[tuple[int, str], LocalRank] = {}  # still told what becomes of their saves
        self.live: dict[tuple[int, str], ev.RankFound] = {}
        self.newest_staged: SaveId | None = None
        self.pending: set[SaveId] = set()  # held here, neither staged nor given up by the coordinator
        self.draining: SaveId | None = None
        self.forced: set[SaveId] = set()  # to be drained for sure, so kept until they are
        self._written = False  # the draining save's files are synced
        self._loading: SaveId | None = None

    # --- shorthands

    def _report(self, event: ev.Event) -> Action:
        return ToNode(job=self.job, node=None, message=ev.Report(job=self.job, node=self.node, event=event))

    def _tell(self, rank: int, message: Reply) -> list[Action]:
        local = self.ranks.get(rank)
        return [self._to(local, message)] if local else []

    def _to(self, local: LocalRank, message: Reply) -> Action:
        return ToRank(job=self.job, rank=local.rank, session=local.session, message=message)

    def _tell_all(self, message: Reply) -> list[Action]:
        return [self._to(local, message) for local in (*self.ranks.values(), *self.replaced.values())]

    def _done(self, rank: int, request: int) -> list[Action]:
        return self._tell(rank, Done(reply_to=request))

    def _refuse(self, rank: int, request: int, code: str, message: str, hint: str = "") -> list[Action]:
        return self._tell(rank, Refused(reply_to=request, code=code, message=message, hint=hint))

    # --- events

    def handle(self, event: ev.Event) -> list[Action]:  # noqa: C901, PLR0912 - one line per event
        """What to do about an event of this node, or an order of the coordinator."""
        if isinstance(event, ev.FromRank) and event.session and not self._is_in(event):
            return [self._stranger(event)]
        match event:
            case ev.RankFound():
                self.live[event.rank, event.session] = event
                return [self._report(event)]
            case ev.RankAttached():
                return self._attached(event)
            case ev.RankGone():
                return self._gone(event)
            case ev.RankDetached():
                return self._detached(event)
            case ev.SlotsAsked():
                actions = self.slots.demand(event.rank, event.capacity)
                coming = SlotsComing(reply_to=event.request, count=self.slots.coming(event.rank))
                return [*self._tell(event.rank, coming), *actions, *self._grant(event.rank)]
            case ev.SlotReady():
                return [*self.slots.ready(event.slot, event.rank, event.capacity), *self._grant(event.rank)]
            case ev.SlotsFailed():
                self.slots.failed(event.rank, event.count)
                refusal = SlotsRefused(code=event.code, message=event.message, hint=event.hint)
                return [*self._tell(event.rank, refusal), Note(job=self.job, text=event.message)]
            case ev.SegmentStaged():
                return self._staged(event)
            case ev.SlotAdopted():
                return self._adopted(event)
            case ev.SaveSkipped() | ev.DrainAsked():
                return [*self._done(event.rank, event.request), self._report(event)]
            case ev.LoadAsked() | ev.LoadReported():
                return self._load_word(event)
            case ev.DigestsSealed():
                known = self.slots.digested(event.slot, event.save)
                return [*self._vote(), *self._answer_loads()] if known else []
            case ev.DigestsFailed():
                return self._unreadable(event)
            case ev.DrainMoved():
                return [self._report(event)]
            case ev.Drained():
                return self._drained(event)
            case ev.VoteWritten():
                return [self._report(event)]
            case ev.NodeMessage():
                return self._order(event)
        raise AssertionError(f"no row for {event}")

    def _order(self, order: ev.NodeMessage) -> list[Action]:  # noqa: C901 - one line per order
        match order:
            case ev.SessionOpened():
                return self._opened(order)
            case ev.SessionRefused():
                return self._refused(order)
            case ev.SaveStaged():
                self.pending.discard(order.save)
                self.newest_staged = max(order.save, self.newest_staged or order.save)
                return [*self._tell_all(Progress(save=order.save, milestone=Milestone.STAGED)), *self.collect()]
            case ev.SaveEnded():
                self.pending.discard(order.save)
                self.forced.discard(order.save)
                milestone = Milestone.DURABLE if order.end == "durable" else None
                news = Progress(save=order.save, milestone=milestone, end=order.end, reason=order.reason)
                return [*self._tell_all(news), *self.collect()]
            case ev.DrainOrdered():
                return self._drain(order.save)
            case ev.DrainDropped():
                if self.draining == order.save:
                    self.draining = None
                return self.collect()
            case ev.LoadOrdered():
                return self._load_ordered(order)
            case ev.LoadRefused():
                return self._load_refused(order)
            case ev.JobReleased():
                return self._released()
        raise AssertionError(f"no row for {order}")

    # --- ranks

    def _is_in(self, event: ev.FromRank) -> bool:
        local = self.ranks.get(event.rank)
        return local is not None and local.session == event.session

    def _stranger(self, event: ev.FromRank) -> Action:
        """An answer for a rank that was replaced, or is not let in yet: its words count for nothing."""
        if (event.rank, event.session) in self.waiting:
            code, text = "protocol", "this rank is not attached yet"
        else:
            code, text = "stale", f"another process is rank {event.rank} of the job now"
        refusal = Refused(reply_to=event.request, code=code, message=text)
        return ToRank(job=self.job, rank=event.rank, session=event.session, message=refusal)

    def _attached(self, event: ev.RankAttached) -> list[Action]:
        self.live[event.rank, event.session] = ev.RankFound(
            job=self.job, rank=event.rank, session=event.session, pid=event.pid, host=event.host
        )
        self.waiting[event.rank, event.session] = LocalRank(
            event.rank, event.session, event.pid, event.host, event.world_size, event.request
        )
        return [*(self._report(found) for found in self.live.values()), self._report(event)]

    def _opened(self, order: ev.SessionOpened) -> list[Action]:
        self.incarnation = max(self.incarnation, order.incarnation)
        actions: list[Action] = []
        for old in [local for local in self.ranks.values() if local.session != order.session]:
            del self.ranks[old.rank]
            if (old.rank, old.session) in self.live:
                self.replaced[old.rank, old.session] = old
            if old.load_request is not None:
                text = f"another process is rank {old.rank} of the job now"
                actions.append(self._to(old, Refused(reply_to=old.load_request, code="stale", message=text)))
            actions += self.slots.rank_left(old.rank, writer_gone=(old.rank, old.session) not in self.live)
        for rank in order.ranks:
            local = self.waiting.pop((rank, order.session), None)
            if local is None:
                continue
            actions += self._seat(local)
            welcome = Attached(
                reply_to=local.request,
                node=self.node,
                incarnation=order.incarnation,
                client_started=self._client_started,
                known=list(order.known),
                warnings=list(order.warnings),
            )
            actions += [self._to(local, welcome), *self.slots.trim(local.world_size)]
        return actions

    def _seat(self, local: LocalRank) -> list[Action]:
        """The rank is in. What another process of that rank may still be writing is given up."""
        self.ranks[local.rank] = local
        others = any(rank == local.rank and session != local.session for rank, session in self.live)
        return self.slots.rank_left(local.rank, writer_gone=False) if others else []

    def _refused(self, order: ev.SessionRefused) -> list[Action]:
        actions: list[Action] = []
        for rank in order.ranks:
            local = self.waiting.pop((rank, order.session), None)
            if local is not None:
                refusal = Refused(reply_to=local.request, code=order.code, message=order.message, hint=order.hint)
                actions.append(self._to(local, refusal))
        return actions

    def _gone(self, event: ev.RankGone) -> list[Action]:
        self.live.pop((event.rank, event.session), None)
        actions = [*self._drop(event.rank, event.session), self._report(event)]
        return actions if self.needed else [*actions, ForgetJob(job=self.job)]

    @property
    def needed(self) -> bool:
        """Whether anybody is here, or anything lies here."""
        return bool(self.ranks or self.waiting or self.live or self.slots)

    def _detached(self, event: ev.RankDetached) -> list[Action]:
        done = Done(reply_to=event.request)
        answer = ToRank(job=self.job, rank=event.rank, session=event.session, message=done)
        self.live.pop((event.rank, event.session), None)
        return [answer, *self._drop(event.rank, event.session), self._report(event)]

    def _drop(self, rank: int, session: str) -> list[Action]:
        self.waiting.pop((rank, session), None)
        self.replaced.pop((rank, session), None)
        local = self.ranks.get(rank)
        if local is None or local.session != session:
            return []
        del self.ranks[rank]
        return self.slots.rank_left(rank, writer_gone=True)

    def _grant(self, rank: int) -> list[Action]:
        """No seal of a save that nobody heard of may be in force while the rank overwrites its bytes."""
        actions: list[Action] = []
        for slot in self.slots.grantable(rank):
            actions += self.slots.free(slot) if slot.unsure else []
            actions += self._tell(rank, SlotGranted(slot=slot.name, capacity=slot.capacity))
        return actions

    # --- segments

    def _staged(self, event: ev.SegmentStaged) -> list[Action]:
        if event.save.incarnation != self.incarnation:
            text = f"{event.save} comes from an incarnation that {self.incarnation} has replaced"
            return self._refuse(event.rank, event.request, "stale", text)
        again = any(slot.name == event.slot for slot in self.slots.holding(event.save))
        problem = self.slots.hold(event)
        if problem:
            return self._refuse(event.rank, event.request, "protocol", problem)
        if event.drain:
            self.forced.add(event.save)
        answer = self._done(event.rank, event.request)
        if again:  # by a rank that did not hear the answer
            return [*answer, self._report(event)]
        self.pending.add(event.save)
        return [*answer, TakeDigests(job=self.job, slot=event.slot, save=event.save), self._report(event)]

    def _adopted(self, event: ev.SlotAdopted) -> list[Action]:
        self.slots.adopt(event)
        if event.save is None:
            return []
        self.incarnation = max(self.incarnation, event.save.incarnation)
        self.pending.add(event.save)
        segment = ev.SegmentStaged(
            job=self.job,
            rank=event.rank,
            world_size=event.world_size,
            slot=event.slot,
            save=event.save,
            nbytes=event.nbytes,
        )
        return [self._report(segment)]

    def collect(self) -> list[Action]:
        """Frees every slot that nothing holds on to, and grants it again."""
        wanted = (
            self.pending
            | self.forced
            | {s for s in (self.newest_staged, self.draining, self._loading) if s is not None}
        )
        actions: list[Action] = []
        for slot in [s for s in self.slots if s.save is not None and s.save not in wanted]:
            actions += self._free(slot)
        return actions

    def _free(self, slot: Slot) -> list[Action]:
        save, rank = slot.save, slot.rank
        assert save is not None  # noqa: S101 - only held slots come here
        actions = self.slots.free(slot)
        actions.append(self._report(ev.SegmentReleased(job=self.job, rank=rank, save=save)))
        return [*actions, *self.slots.provision(rank), *self._grant(rank)]

    # --- drain

    def _drain(self, save: SaveId) -> list[Action]:
        names = tuple(slot.name for slot in self.slots.holding(save))
        if not names:
            problem = f"no slot of this node holds {save}"
            return [self._report(ev.Drained(job=self.job, save=save, problem=problem))]
        self.draining, self._written = save, False
        return [Drain(job=self.job, save=save, slots=names)]

    def _drained(self, event: ev.Drained) -> list[Action]:
        if event.save != self.draining:
            return []
        if event.problem or event.committed:
            return [self._report(event)]
        self._written = True
        return self._vote()

    def _vote(self) -> list[Action]:
        """The vote, once the files are synced and every digest is known."""
        save = self.draining
        if save is None or not self._written:
            return []
        held = self.slots.holding(save)
        bad = next((slot.unreadable for slot in held if slot.unreadable), "")
        if bad:
            self._written = False
            return [self._report(ev.Drained(job=self.job, save=save, problem=bad))]
        if not held or not all(slot.digested for slot in held):
            return []
        self._written = False
        names = tuple(slot.name for slot in held)
        return [WriteVote(job=self.job, save=save, slots=names)]

    def _unreadable(self, event: ev.DigestsFailed) -> list[Action]:
        """A slot that cannot be read can be neither voted for nor loaded: who waits for it is told."""
        actions: list[Action] = [Note(job=self.job, text=event.problem)]
        for slot in self.slots.holding(event.save):
            slot.unreadable = event.problem if slot.name == event.slot else slot.unreadable
        actions += self._vote()
        for local in self.ranks.values():
            order = local.load_order
            if order is not None and order.save == event.save:
                local.load_order = None
                actions += self._answer_load(local, order, "")
        return actions

    # --- load

    def _load_word(self, event: ev.LoadAsked | ev.LoadReported) -> list[Action]:
        local = self.ranks.get(event.rank)
        if local is None:
            return []
        local.load_request = event.request
        return [self._report(event)]

    def _load_ordered(self, order: ev.LoadOrdered) -> list[Action]:
        if order.agreed or order.save is None:  # a load that fails leaves the ranks in the incarnation they have
            self.incarnation = max(self.incarnation, order.incarnation)
        self._loading = None if order.agreed else order.save
        for local in self.ranks.values():
            local.load_order = order if local.load_request is not None else None
        return [*self._answer_loads(), *self.collect()]

    def _answer_loads(self) -> list[Action]:
        """Answers the ranks that have their order and can follow it: a slot can be read once its digests are taken."""
        actions: list[Action] = []
        for local in self.ranks.values():
            order = local.load_order
            slot = self._slot_to_read(local.rank, order) if order is not None else None
            if order is not None and (slot is None or slot.digested):
                local.load_order = None
                actions += self._answer_load(local, order, slot.name if slot else "")
        return actions

    def _slot_to_read(self, rank: int, order: ev.LoadOrdered) -> Slot | None:
        if order.save is None or order.agreed or rank not in order.in_arena:
            return None
        return next((slot for slot in self.slots.holding(order.save) if slot.rank == rank), None)

    def _answer_load(self, local: LocalRank, order: ev.LoadOrdered, slot: str) -> list[Action]:
        request, local.load_request = local.load_request, None
        answer = LoadFrom(
            reply_to=request or 0,
            incarnation=order.incarnation,
            save=order.save,
            tier=Tier.ARENA if slot else Tier.PFS,
            slot=slot,
            path=f"{self.job.store}/{self.job.job}/{order.dirname}" if order.dirname else "",
            agreed=order.agreed,
            notes=list(order.notes),
        )
        return self._tell(local.rank, answer)

    def _load_refused(self, order: ev.LoadRefused) -> list[Action]:
        self._loading = None if order.rank is None else self._loading
        actions: list[Action] = []
        for local in self.ranks.values():
            if order.rank not in (None, local.rank):
                continue
            request, local.load_request, local.load_order = local.load_request, None, None
            if request is not None:
                actions += self._refuse(local.rank, request, order.code, order.message, order.hint)
        return [*actions, *self.collect()]

    # --- the end

    def _released(self) -> list[Action]:
        self.newest_staged = None
        self.pending.clear()
        self.forced.clear()
        actions = [*self.collect(), *self.slots.trim()]
        return actions if self.needed else [*actions, ForgetJob(job=self.job)]

    def check(self) -> None:
        """Asserts what must always hold; tests call it after every event."""
        for slot in self.slots:
            assert not (slot.granted and slot.save is not None), f"{slot} is granted and held"  # noqa: S101
            assert slot.save is not None or not slot.digested, f"{slot} has digests of nothing"  # noqa: S101
        staged = self.newest_staged
        if staged is not None and any(s.save == staged for s in self.slots):
            assert all(s.save != staged or not s.granted for s in self.slots)  # noqa: S101
