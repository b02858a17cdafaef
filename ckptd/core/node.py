"""One job on this node: its ranks, its slots, its share of each drain. Pure: events in, actions out.

What concerns all ranks is decided by the coordinator (rank 0's daemon); this half carries it out and reports.
"""

from dataclasses import dataclass, replace

from ckptd.core import events as ev
from ckptd.core.actions import (
    Action,
    Commit,
    Drain,
    ForgetJob,
    KeepTopology,
    MeetPeers,
    Note,
    TakeDigests,
    ToNode,
    ToRank,
    WriteVote,
)
from ckptd.core.fetching import Fetching
from ckptd.core.policy import Policy
from ckptd.core.protection import Protection
from ckptd.core.slots import Slot, SlotTable
from ckptd.protocol.ids import JobKey, SaveId
from ckptd.protocol.messages import (
    Attached,
    Done,
    End,
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
from ckptd.protocol.topology import Peer, Topology


@dataclass(slots=True)
class LocalRank:
    """A rank that presented itself here."""

    attached: ev.RankAttached
    load_request: int | None = None
    load_step: int | None = None  # asked for
    load_order: ev.LoadOrdered | None = None  # the answer, kept back until the slot's digests are taken

    @property
    def rank(self) -> int:
        """Its number."""
        return self.attached.rank

    @property
    def session(self) -> str:
        """Those it was started with."""
        return self.attached.session

    @property
    def host(self) -> str:
        """The machine's name, as the rank sees it."""
        return self.attached.host

    @property
    def pid(self) -> int:
        """Of its process."""
        return self.attached.pid


class JobNode:
    """The node's half of a job."""

    def __init__(self, job: JobKey, node: str, policy: Policy) -> None:
        self.job = job
        self.node = node
        self.incarnation = 0
        self.session = ""  # the one that was opened last
        self.coordinator = node  # whose orders count
        self.topology: Topology | None = None  # of the session; None: this node alone
        self.epoch = 0  # the incarnation in which this topology began
        self.protection = Protection(job, node)
        self.fetching = Fetching(job, node)
        self._doors: set[str] = set()  # nodes that were told who lives here
        self._visits: dict[str, str] = {}  # sessions at the door that use other nodes -> who may come to coordinate
        self._down: set[str] = set()  # peers that do not answer
        self._voted: SaveId | None = None  # synced and voted for, its commit not heard of
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
        self._mine: frozenset[int] = frozenset()  # ranks whose segments this node drains
        self._loading: SaveId | None = None
        self._world_size = 0  # of the session that is in
        self._settled = 0  # the incarnation that has a checkpoint as safe as it was to become

    # --- shorthands

    def _report(self, event: ev.Event, to: str | None = None) -> Action:
        report = ev.Report(job=self.job, node=self.node, event=event)
        return ToNode(job=self.job, node=to, message=report)

    def _report_to_all(self, event: ev.Event) -> list[Action]:
        """To the coordinator, and to those that may come to be it."""
        told = dict.fromkeys((self.coordinator, *self._candidates))
        self._doors.update(told)
        return [self._report(event, node) for node in told]

    def _report_gone(self, event: ev.Event) -> list[Action]:
        """To all that were ever told that the rank lives: a door that misses it would wait for the rank for ever."""
        told = dict.fromkeys((self.coordinator, *self._candidates, *sorted(self._doors)))
        return [self._report(event, node) for node in told]

    @property
    def _candidates(self) -> list[str]:
        return [
            *(_coordinator_of(local.attached, self.node) for local in self.waiting.values()),
            *self._visits.values(),
        ]

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
                return self._report_to_all(event)
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
                known = self.slots.digested(event.slot, event.save, event.seal)
                return [*self._vote(), *self._answer_loads(), *self._offer()] if known else []
            case ev.DigestsFailed():
                return self._unreadable(event)
            case ev.DrainMoved():
                return [self._report(event)]
            case ev.Drained():
                return self._drained(event)
            case ev.VoteWritten():
                self._voted = event.save if not event.problem else self._voted
                return [self._report(event)]
            case ev.CommitEnded():
                return self._finished(event)
            case ev.TopologyKept():
                return self._kept(event)
            case ev.PieceAdopted():
                self.protection.adopt(event.piece)
                return []
            case ev.Encoded():
                return self.protection.encoded(event)
            case ev.SegmentFetched():
                return self._fetched(event)
            case ev.PeerUp():
                return self._peer_up(event.node)
            case ev.PeerDown():
                return self._peer_down(event.node)
            case ev.NodeMessage():
                return self._order(event)
        raise AssertionError(f"no row for {event}")

    def _order(self, order: ev.NodeMessage) -> list[Action]:
        match order:
            case ev.SessionOpened():
                return self._opened(order)
            case ev.SessionRefused():
                return self._refused(order)
            case ev.Introduced():
                return self._introduced(order)
            case ev.ColumnOffered():
                return self.protection.offered(order)
            case ev.SealAsked() | ev.PieceAsked():
                return self._asked(order)
            case ev.SealTold():
                return self.fetching.sealed(order)
            case ev.PieceTold():
                return self.fetching.described(order)
        return self._coordinators_order(order) if order.node == self.coordinator else []

    def _coordinators_order(self, order: ev.NodeMessage) -> list[Action]:  # noqa: C901 - one line per order
        match order:
            case ev.SaveStaged():
                self.pending.discard(order.save)
                self.newest_staged = max(order.save, self.newest_staged or order.save)
                return [*self._tell_all(Progress(save=order.save, milestone=Milestone.STAGED)), *self.collect()]
            case ev.EncodeOrdered():
                return [*self.protection.order(order), *self._offer(), *self.collect()]
            case ev.SaveProtected():
                told = self._tell_all(Progress(save=order.save, milestone=Milestone.PROTECTED))
                return [*told, *self.protection.protected(order), *self.collect()]
            case ev.SaveEnded():
                self.pending.discard(order.save)
                self.forced.discard(order.save)
                self._voted = None if order.save == self._voted else self._voted
                if order.end is End.DURABLE:  # so it was staged, though a new coordinator may never have said so
                    self.newest_staged = max(order.save, self.newest_staged or order.save)
                if order.end in (End.DURABLE, End.KEPT):
                    self._settled = max(self._settled, order.save.incarnation)
                milestone = Milestone.DURABLE if order.end == "durable" else None
                news = Progress(save=order.save, milestone=milestone, end=order.end, reason=order.reason)
                return [*self._tell_all(news), *self.collect()]
            case ev.DrainOrdered():
                return self._drain(order)
            case ev.FetchOrdered():
                self._loading = order.save
                return self.fetching.order(order, self.protection.pieces.get((order.save, order.epoch)))
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
        self.waiting[event.rank, event.session] = LocalRank(event)
        actions: list[Action] = []
        others = tuple(peer for peer in event.topology.peers if peer.node != self.node) if event.topology else ()
        if others:
            actions.append(MeetPeers(job=self.job, peers=others))
        actions += [self._introduce(event, peer.node) for peer in self._outside(event)]
        return [*actions, *self._knock(event)]

    def _knock(self, event: ev.RankAttached) -> list[Action]:
        """Tells who may come to coordinate that the rank stands at the door, and who lives here already."""
        door = _coordinator_of(event, self.node)
        self._doors.add(door)
        knocked = ev.Knocked(job=self.job, session=event.session, outside=self._outside(event))
        return [
            *(self._report(found, door) for found in self.live.values()),
            *([self._report(knocked, door)] if knocked.outside else []),
            self._report(event, door),
        ]

    def _outside(self, event: ev.RankAttached) -> tuple[Peer, ...]:
        """Nodes that the job ran on before and the rank's session does not use."""
        if event.session == self.session or self.topology is None:
            return ()
        inside = {peer.node for peer in event.topology.peers} if event.topology else set()
        gone = inside | self._down | {self.node}
        return tuple(peer for peer in self.topology.peers if peer.node not in gone)

    def _introduce(self, event: ev.RankAttached, node: str) -> Action:
        topology = event.topology or Topology((Peer(self.node, "alone", "", "-" * 40),), (0,))
        introduced = ev.Introduced(job=self.job, node=self.node, session=event.session, topology=topology)
        return ToNode(job=self.job, node=node, message=introduced)

    def _introduced(self, order: ev.Introduced) -> list[Action]:
        """A session that does not use this node has come: who may coordinate it is told who lives here."""
        door = order.topology.coordinator
        self._visits[order.session] = door
        others = tuple(peer for peer in order.topology.peers if peer.node != self.node)
        return [MeetPeers(job=self.job, peers=others), *self._visit(order.session, door)]

    def _visit(self, session: str, door: str) -> list[Action]:
        visited = ev.Visited(job=self.job, session=session)
        self._doors.add(door)
        return [self._report(event, door) for event in (*self.live.values(), visited)]

    def _opened(self, order: ev.SessionOpened) -> list[Action]:
        if order.node != self.coordinator and order.incarnation <= self.incarnation and self.session:
            return []  # of a coordinator that was replaced
        self.incarnation = max(self.incarnation, order.incarnation)
        actions = self._moved(order)
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
                reply_to=local.attached.request,
                node=self.node,
                incarnation=order.incarnation,
                client_started=self._client_started,
                scheme=self.protection.scheme,
                known=list(order.known),
                warnings=list(order.warnings),
            )
            self._world_size = local.attached.world_size
            actions += [self._to(local, welcome), *self.slots.trim(local.attached.world_size)]
        return actions

    def _moved(self, order: ev.SessionOpened) -> list[Action]:
        """Another session, perhaps on other nodes: its coordinator learns what lies here."""
        if order.session == self.session and order.node == self.coordinator:
            return []
        self.session, self.coordinator = order.session, order.node
        self.topology, self.epoch = order.topology, order.epoch
        self._visits.pop(order.session, None)
        actions = self.protection.moved(order.topology, order.epoch)
        if order.topology is not None:
            actions.append(KeepTopology(job=self.job, topology=order.topology, epoch=order.epoch))
        return [*actions, *self._resync()]

    def _resync(self) -> list[Action]:
        """All that the coordinator must know of this node, whatever it was told before."""
        segments = tuple(
            ev.HeldSegment(slot.save, slot.rank, slot.world_size, slot.nbytes) for slot in self.slots if slot.save
        )
        pieces = tuple(
            ev.HeldPiece(p.save, p.epoch, p.scheme, p.index, tuple(tuple(s.rank for s in c.seals) for c in p.columns))
            for p in self.protection.pieces.values()
        )
        has = ev.NodeHas(job=self.job, incarnation=self.incarnation, segments=segments, pieces=pieces)
        seated = [replace(r.attached, incarnation=self.incarnation, request=0) for r in self.ranks.values()]
        self._doors.add(self.coordinator)
        events: list[ev.Event] = [has, *self.live.values(), *seated]
        for local in self.ranks.values():
            if local.load_request is not None and local.load_order is None:
                asked = ev.LoadAsked(job=self.job, rank=local.rank, session=local.session, step=local.load_step)
                events.append(asked)
        return [self._report(event) for event in events]

    def _kept(self, event: ev.TopologyKept) -> list[Action]:
        self.topology, self.epoch = event.topology, event.epoch
        self.coordinator = event.topology.coordinator
        others = tuple(peer for peer in event.topology.peers if peer.node != self.node)
        meet: list[Action] = [MeetPeers(job=self.job, peers=others)] if others else []
        return [*meet, *self.protection.moved(event.topology, event.epoch)]

    def _peer_up(self, node: str) -> list[Action]:
        """Whatever it was told before may be lost."""
        self._down.discard(node)
        actions = self._resync() if node == self.coordinator else []
        if node in self._doors and node != self.coordinator:
            actions += [self._report(found, node) for found in self.live.values()]
        for local in self.waiting.values():
            if _coordinator_of(local.attached, self.node) == node:
                actions += self._knock(local.attached)
            if any(peer.node == node for peer in self._outside(local.attached)):
                actions.append(self._introduce(local.attached, node))
        for session, door in self._visits.items():
            actions += self._visit(session, door) if door == node else []
        return [*actions, *self.protection.peer_up(node)]

    def _peer_down(self, node: str) -> list[Action]:
        """What was asked of it is not answered. A commit that it was to make is made here, if all votes are there."""
        self._down.add(node)
        actions = self.fetching.peer_down(node)
        if node == self.coordinator and self._voted is not None:
            actions.append(Commit(job=self.job, save=self._voted))
        return actions

    def _finished(self, event: ev.CommitEnded) -> list[Action]:
        """This node has tried to finish the commit of a coordinator that it lost."""
        if event.problem or event.save != self._voted or self.coordinator == self.node:
            return []
        self._voted = None
        return self._tell_all(Progress(save=event.save, milestone=Milestone.DURABLE, end=End.DURABLE))

    def _asked(self, order: ev.SealAsked | ev.PieceAsked) -> list[Action]:
        """A node of the job is to copy a segment, or to rebuild one."""
        told: ev.NodeMessage
        if isinstance(order, ev.SealAsked):
            seals = [slot.seal for slot in self.slots.holding(order.save) if slot.rank == order.rank]
            told = ev.SealTold(
                job=self.job, node=self.node, save=order.save, rank=order.rank, seal=seals[0] if seals else None
            )
        else:
            piece = self.protection.pieces.get((order.save, order.epoch))
            told = ev.PieceTold(job=self.job, node=self.node, save=order.save, epoch=order.epoch, piece=piece)
        return [ToNode(job=self.job, node=order.node, message=told)]

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
                refusal = Refused(
                    reply_to=local.attached.request, code=order.code, message=order.message, hint=order.hint
                )
                actions.append(self._to(local, refusal))
        return actions

    def _gone(self, event: ev.RankGone) -> list[Action]:
        self.live.pop((event.rank, event.session), None)
        reports = self._report_gone(event)
        actions = [*self._drop(event.rank, event.session), *reports]
        return actions if self.needed else [*actions, ForgetJob(job=self.job)]

    @property
    def needed(self) -> bool:
        """Whether anybody is here, or anything lies here."""
        return bool(self.busy or self.live)

    @property
    def busy(self) -> bool:
        """Whether anybody has come in or stands at the door, or anything lies here."""
        return bool(self.ranks or self.waiting or self.slots or self.protection.pieces)

    def _detached(self, event: ev.RankDetached) -> list[Action]:
        done = Done(reply_to=event.request)
        answer = ToRank(job=self.job, rank=event.rank, session=event.session, message=done)
        self.live.pop((event.rank, event.session), None)
        reports = self._report_gone(event)
        return [answer, *self._drop(event.rank, event.session), *reports]

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
        """Frees every slot that nothing holds on to, and grants it again.

        Those of ranks that a smaller world does not have go altogether, once a checkpoint of it is safe.
        """
        wanted = (
            self.pending
            | self.forced
            | self.protection.wanted
            | self.fetching.saves
            | {s for s in (self.newest_staged, self.draining, self._loading) if s is not None}
        )
        actions: list[Action] = []
        for slot in [s for s in self.slots if s.save is not None and s.save not in wanted]:
            actions += self._free(slot)
        if self._world_size and self._settled == self.incarnation:
            actions += self.slots.trim(self._world_size)
        return actions

    def _free(self, slot: Slot) -> list[Action]:
        save, rank = slot.save, slot.rank
        assert save is not None  # noqa: S101 - only held slots come here
        actions = self.slots.free(slot)
        actions.append(self._report(ev.SegmentReleased(job=self.job, rank=rank, save=save)))
        return [*actions, *self.slots.provision(rank), *self._grant(rank)]

    # --- protection

    def _offer(self) -> list[Action]:
        """This node's column for its set, once every segment of the save has its digests."""
        save = self.protection.waits
        if save is None or self.topology is None:
            return []
        seals = {slot.rank: slot.seal for slot in self.slots.holding(save)}
        ranks = self.topology.ranks_of(self.node)
        missing = [rank for rank in ranks if rank not in seals]
        if missing:
            problem = f"the segment of rank {missing[0]} does not lie at {self.node}"
            return [self._report(ev.Encoded(job=self.job, save=save, epoch=self.epoch, problem=problem))]
        column = ev.Column(self.node, tuple(seal for rank in ranks if (seal := seals[rank]) is not None))
        return self.protection.offer(column) if len(column.seals) == len(ranks) else []

    # --- drain

    def _drain(self, order: ev.DrainOrdered) -> list[Action]:
        save = order.save
        self._mine = frozenset(order.ranks)
        names = tuple(slot.name for slot in self._drained_slots(save))
        if not names:
            problem = f"no slot of this node holds {save}"
            return [self._report(ev.Drained(job=self.job, save=save, problem=problem))]
        self.draining, self._written = save, False
        return [Drain(job=self.job, save=save, slots=names)]

    def _drained_slots(self, save: SaveId) -> list[Slot]:
        """One slot of each rank whose segment this node drains."""
        return [slot for slot in self.slots.holding(save) if slot.rank in self._mine]

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
        held = self._drained_slots(save)
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
        if event.save == self.protection.waits:
            failed = ev.Encoded(job=self.job, save=event.save, epoch=self.epoch, problem=event.problem)
            actions.append(self._report(failed))
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
        local.load_step = event.step if isinstance(event, ev.LoadAsked) else local.load_step
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
        if order.save is None or order.agreed or not order.tiers or order.tiers[rank] is Tier.PFS:
            return None
        return next((slot for slot in self.slots.holding(order.save) if slot.rank == rank), None)

    def _answer_load(self, local: LocalRank, order: ev.LoadOrdered, slot: str) -> list[Action]:
        request, local.load_request = local.load_request, None
        answer = LoadFrom(
            reply_to=request or 0,
            incarnation=order.incarnation,
            save=order.save,
            tier=order.tiers[local.rank] if slot else Tier.PFS,
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

    def _fetched(self, event: ev.SegmentFetched) -> list[Action]:
        """The segment lies here now: in place of a copy that cannot be read, if there was one."""
        self.fetching.ended(event)
        if event.seal is None:
            return [self._report(event), *self.collect()]
        replaced = [slot for slot in self.slots.holding(event.save) if slot.rank == event.rank]
        adopted = ev.SlotAdopted(
            job=self.job,
            rank=event.rank,
            slot=event.slot,
            capacity=event.capacity,
            world_size=event.seal.world_size,
            save=event.save,
            nbytes=event.seal.image_nbytes,
            seal=event.seal,
        )
        self.slots.adopt(adopted)
        actions: list[Action] = [action for slot in replaced for action in self.slots.free(slot)]
        return [*actions, self._report(replace(event, seal=None)), *self.collect()]

    # --- the end

    def _released(self) -> list[Action]:
        self.newest_staged = None
        self.pending.clear()
        self.forced.clear()
        actions = [*self.protection.released(), *self.collect(), *self.slots.trim()]
        return actions if self.needed else [*actions, ForgetJob(job=self.job)]

    def check(self) -> None:
        """Asserts what must always hold; tests call it after every event."""
        for slot in self.slots:
            assert not (slot.granted and slot.save is not None), f"{slot} is granted and held"  # noqa: S101
            assert slot.save is not None or not slot.digested, f"{slot} has digests of nothing"  # noqa: S101
        staged = self.newest_staged
        if staged is not None and any(s.save == staged for s in self.slots):
            assert all(s.save != staged or not s.granted for s in self.slots)  # noqa: S101


def _coordinator_of(event: ev.RankAttached, node: str) -> str:
    """The node whose daemon coordinates the session that the rank belongs to."""
    return event.topology.coordinator if event.topology is not None else node
