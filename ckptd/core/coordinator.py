"""One job as rank 0's daemon sees it: who the job is, how far each save has come, what a load restores. Pure."""

from dataclasses import replace

from ckptd.core import events as ev
from ckptd.core.actions import Action, MeetPeers, Note, ScanStore, ToNode
from ckptd.core.encodes import Encodes
from ckptd.core.policy import Policy
from ckptd.core.protection_view import ProtectionView
from ckptd.core.restores import Restores
from ckptd.core.roll_call import RollCall
from ckptd.core.routes import Routes
from ckptd.core.saves import Saves
from ckptd.core.sessions import Sessions
from ckptd.protocol.ids import JobKey
from ckptd.protocol.messages import End


class Coordinator:
    """The job-wide half of a job; lives on the node of rank 0."""

    def __init__(self, job: JobKey, node: str, policy: Policy) -> None:
        self.job = job
        self._node = node
        self._policy = policy
        self.sessions = Sessions(job, node, policy)
        self.saves = Saves(job, node, policy)
        self.encodes = Encodes(job, node, policy)
        self.restores = Restores(job, node, policy, Routes(job, self.saves, self.encodes, node))
        self._roll_call = RollCall(policy)
        self._entering = False  # saves of older incarnations are judged once all nodes have said what they have
        self._incarnations: dict[str, int] = {}  # the largest that each node knows of
        self._asked_here = False  # a rank has asked for a load since this daemon started
        self._behind: set[int] = set()  # ranks that came back from before the load that was agreed
        self._caught_up: set[str] = set()  # nodes that missed the end of a load and were told it
        self._now = 0.0  # of the last event
        self._touched = True  # since the last tick
        self._due: float | None = None  # as of the last tick
        self._asked_scan = False
        self._looked_at = 0.0  # when the store was scanned last
        self._rescan_at: float | None = None  # the store did not answer; drains wait until it does
        self.orphaned_at: float | None = None  # when the last rank ended without closing
        self._number_given = True  # the store gave the number that the load in progress will go on with
        self._crashed = False  # some rank of the session ended without closing
        self._closing = False  # every rank closed: free the memory once durable

    def handle(self, event: ev.Event, now: float) -> list[Action]:
        """What to do about a report of a node, or the outcome of an action of the coordinator."""
        self._now, self._touched = now, True
        match event:
            case ev.Report():
                return self._report(event.node, event.event, now)
            case ev.IncarnationTaken():
                return self._incarnation(event, now)
            case ev.StoreScanned():
                return self._scanned(event, now)
            case ev.CommitEnded():
                return self._committed(event, now)
            case ev.CheckpointRemoved():
                return self.saves.removed(event)
            case ev.PeerUp():
                return self._peer_up(event, now)
            case ev.PeerDown():
                return self._peer_down(event.node, now)
            case ev.TopologyKept():
                return self._kept(event)
        raise AssertionError(f"no row for {event}")

    def _is_stale(self, event: ev.Event) -> bool:
        """Whether it is a rank's word of another session than the present one: it counts for nothing."""
        return isinstance(event, ev.FromRank) and bool(event.session) and event.session != self.sessions.session

    def _report(self, node: str, event: ev.Event, now: float) -> list[Action]:  # noqa: C901, PLR0912 - one line per event
        if self._is_stale(event):
            return []
        match event:
            case ev.RankFound():
                self.sessions.found(node, event)
                return []
            case ev.Knocked():
                self.sessions.knocked(event, now)
                return [MeetPeers(job=self.job, peers=event.outside)] if event.outside else []
            case ev.Visited():
                before = self.sessions.session
                return [*self._with_news(self.sessions.visited(node, event, now)), *self._entered(before)]
            case ev.NodeHas():
                return self._node_has(node, event, now)
            case ev.Encoded():
                return self.encodes.encoded(node, event, self.saves, now)
            case ev.SegmentFetched():
                return self._fetched(node, event, now)
            case ev.RankAttached():
                return self._attached(node, event, now)
            case ev.RankGone() | ev.RankDetached():
                return self._left(event, now)
            case ev.SegmentStaged():
                return self._staged(node, event, now)
            case ev.SegmentReleased():
                return self.saves.released(node, event)
            case ev.SaveSkipped():
                return self.saves.skipped(event, self.sessions.world_size, now)
            case ev.DrainAsked():
                return self.saves.drain_newest(now)
            case ev.DrainMoved():
                self.saves.moved(node, event)
                return []
            case ev.Drained(committed=True):
                return self.saves.found_committed(event.save)
            case ev.Drained() | ev.VoteWritten():
                return self.saves.voted(node, event.save, event.problem, now)
            case ev.LoadAsked():
                return self._load_asked(node, event, now)
            case ev.LoadReported():
                return self._load(self.restores.reported(event, self.sessions.world_size, self.saves, now))
        return [Note(job=self.job, text=f"{node} reports what no coordinator knows: {type(event).__name__}")]

    def _load_asked(self, node: str, event: ev.LoadAsked, now: float) -> list[Action]:
        if not event.request and node in self._caught_up:
            return []  # it was answered before it was said again
        if event.rank in self._behind and self.restores.agreed is not None:
            self._behind.discard(event.rank)
            return [ToNode(job=self.job, node=node, message=self.restores.agreed)]
        self._asked_here |= event.request > 0
        self.saves.retention.hold = True
        known = self.sessions.next_number - 1
        actions = self.restores.asked(node, event, self.sessions.world_size, known, self.saves, now)
        return self._load([*actions, *self.restores.hopeless(self.sessions.incomplete)])

    def _attached(self, node: str, event: ev.RankAttached, now: float) -> list[Action]:
        scan: list[Action] = [] if self._asked_scan else [ScanStore(job=self.job)]
        self._asked_scan = True
        before, agreed = self.sessions.session, self.restores.agreed
        if event.request and agreed is not None and 0 < event.incarnation < agreed.incarnation:
            self._behind.add(event.rank)  # its daemon ended before it heard the end of that load
        loaded = agreed.incarnation if agreed is not None else 0
        actions = self._with_news(self.sessions.attach(node, event, now, loaded))
        for rank in sorted(self.sessions.departed):
            actions += self.saves.rank_gone(rank, "left the job", self.sessions.incarnation)
        actions += self._load(self.restores.hopeless(self.sessions.incomplete))
        return [*scan, *actions, *self._entered(before)]

    def _entered(self, before: str) -> list[Action]:
        """What follows when the door was opened: another session than before ends what its predecessor had begun."""
        self._somebody_is_in()
        if self.sessions.session == before:
            return []
        self._crashed = False
        nodes = self.sessions.nodes
        self.saves.known_nodes(nodes)
        self.encodes.known_nodes(nodes)
        self.encodes.opened(self.sessions.topology, self.sessions.epoch)
        self._caught_up, self._behind = set(), set()
        if self.restores.agreed is not None and self.restores.agreed.incarnation < self.sessions.incarnation:
            self.restores.agreed = None
        self._roll_call.begin(nodes, self.sessions.session, self._now)
        self._entering = True
        self.restores.blind()
        return self._load(self.restores.replaced())

    def _node_has(self, node: str, event: ev.NodeHas, now: float) -> list[Action]:
        """All that a node has. Once all have said it, what cannot become whole any more is over."""
        actions = self._catch_up(node, event)
        self.sessions.incarnation = max(self.sessions.incarnation, event.incarnation)
        actions += self.sessions.heard_epoch(event.session, event.epoch)
        self.encodes.opened(self.sessions.topology, self.sessions.epoch)
        self._roll_call.spoke(node, event.session, event.former)
        self.encodes.heard(node, event.since)
        actions += self.encodes.found(node, event.pieces, self.saves, now)
        actions += self.saves.found(node, event.segments, now)
        for rank in self.sessions.lives(node, event.live):  # what they delivered before they ended counts
            gone = ev.RankGone(job=self.job, rank=rank, session=self.sessions.session)
            actions += self._left(gone, now)
        return [*actions, *self._judge(now), *self.encodes.advance(self.saves, now)]

    def _catch_up(self, node: str, event: ev.NodeHas) -> list[Action]:
        """A node that missed the end of a load is told; one that knows of a load that this daemon forgot tells it."""
        known = self.restores.agreed
        self._incarnations[node] = event.incarnation
        ours = event.resumed is not None and self.sessions.session in ("", event.session)
        if ours and (known is None or event.incarnation > known.incarnation):
            known = self.restores.agreed = ev.LoadOrdered(
                job=self.job, node=self._node, incarnation=event.incarnation, save=event.resumed, agreed=True
            )
            if not self._asked_here:
                self.restores.forget_round()
        if known is None:
            return []
        behind = [n for n, number in self._incarnations.items() if number < known.incarnation]
        behind = [n for n in behind if n in self.sessions.nodes]
        self._caught_up |= set(behind)
        self._incarnations |= dict.fromkeys(behind, known.incarnation)
        return [ToNode(job=self.job, node=n, message=known) for n in behind]

    def _judge(self, now: float) -> list[Action]:
        """What older incarnations left, and is of no use, is given back once no silent node may hold the rest of it."""
        if not self._roll_call.complete:
            return []
        if self._entering:
            self._entering = False
            self.saves.awaited = self.encodes.pieced
            self.saves.new_incarnation(self.sessions.incarnation)
        actions: list[Action] = []
        if self._roll_call.settle():
            actions += self.saves.end_halves(self.sessions.incarnation)
            actions += self.encodes.outlived(self.saves, self.restores.settled)
            actions += self.encodes.advance(self.saves, now)
        return [*actions, *self._load(self.restores.go_on(self.sessions.world_size, self.saves, now))]

    def _peer_up(self, event: ev.PeerUp, now: float) -> list[Action]:
        self.sessions.peer_up(event.node)
        if event.node in self.sessions.present.values():
            self._somebody_is_in()
        self._roll_call.came(event.node)
        actions = [*self.encodes.peer_up(event.node), *self.saves.peer_up(event.node, now)]
        return [*actions, *self.restores.peer_up(event.node)]

    def _peer_down(self, node: str, now: float) -> list[Action]:
        before = self.sessions.session
        actions = [*self._with_news(self.sessions.peer_down(node, now)), *self._entered(before)]
        self._roll_call.went(node)
        ranks = sorted(rank for rank, home in self.sessions.members.items() if home == node)
        actions += self._load(self.restores.node_gone(node, ranks))
        actions += self.saves.peer_down(node, now)
        return [*actions, *(self._all_left(now) if ranks else []), *self._judge(now)]

    def _kept(self, event: ev.TopologyKept) -> list[Action]:
        """What an earlier life of this daemon coordinated, if it did."""
        if event.topology.coordinator != self._node:
            return []
        self.sessions.kept(event)
        self.encodes.opened(event.topology, event.epoch)
        return []

    def _fetched(self, node: str, event: ev.SegmentFetched, now: float) -> list[Action]:
        actions = [] if event.problem else self.saves.fetched(node, event.save, event.rank, now, event.shares)
        return [*actions, *self._load(self.restores.fetched(node, event, self.sessions.world_size, self.saves, now))]

    def retire(self, incarnation: int) -> None:
        """Another node coordinates the job now, in this incarnation."""
        self._touched = True
        if self.sessions.session or self.saves.records:
            self.sessions.retire(incarnation)
            self._roll_call.forget()
            reachable = self.saves.reachable  # links stay as they are, and nobody will tell again
            self.saves = Saves(self.job, self._node, self._policy)
            self.saves.reachable = reachable
            self.encodes = Encodes(self.job, self._node, self._policy)
            self.restores = Restores(
                self.job, self._node, self._policy, Routes(self.job, self.saves, self.encodes, self._node)
            )
            self.orphaned_at, self._asked_scan = None, False
            self._crashed = self._closing = False

    def _somebody_is_in(self) -> None:
        """Ranks belong to the job: it is neither closing nor an orphan. Who only knocks changes nothing."""
        if self.sessions.present:
            self._closing, self.orphaned_at = False, None
            self.saves.due.cadence = self.sessions.cadence

    def adopted(self, now: float) -> list[Action]:
        """Memory of the job was found at start and nobody is attached yet."""
        self.orphaned_at, self._asked_scan, self._touched = now, True, True
        return [ScanStore(job=self.job)]

    def _with_news(self, actions: list[Action]) -> list[Action]:
        """Adds to each welcome what became of the saves of that incarnation."""
        known = self.saves.known(self.sessions.incarnation)
        for i, action in enumerate(actions):
            if isinstance(action, ToNode) and isinstance(action.message, ev.SessionOpened):
                order = action.message
                news = replace(order, known=known)
                actions[i] = ToNode(job=self.job, node=action.node, message=news)
        return actions

    def _left(self, event: ev.RankGone | ev.RankDetached, now: float) -> list[Action]:
        ours = event.session == self.sessions.session and event.rank in self.sessions.members
        actions = self.sessions.gone(event.rank, event.session, now)
        if not ours:
            if not self.sessions.present and not self._closing and self.orphaned_at is None:
                self.orphaned_at = now  # it was the last that might have had a use for what lies here
            return actions
        crashed = isinstance(event, ev.RankGone)
        self._crashed |= crashed
        actions += self.saves.rank_gone(event.rank, "ended" if crashed else "closed", self.sessions.incarnation)
        actions += self._load(self.restores.rank_gone(event.rank))
        return [*actions, *self._all_left(now)]

    def _all_left(self, now: float) -> list[Action]:
        """What follows when nobody is in any more, as far as nodes answer: one that does not may have what is newer."""
        if self.sessions.present:
            return []
        self.orphaned_at = now
        self._closing = not self._crashed and not self.sessions.members
        return [*self.saves.drain_newest(now), *self._release_when_safe(now)]

    def _staged(self, node: str, event: ev.SegmentStaged, now: float) -> list[Action]:
        self.sessions.incarnation = max(self.sessions.incarnation, event.save.incarnation)
        before = self.saves.newest_staged
        actions = [*self.saves.staged(node, event, now), *self.encodes.advance(self.saves, now)]
        if self.saves.newest_staged is not before and not self._roll_call.doubts:
            actions += self.encodes.outlived(self.saves, self.restores.settled)
        for rank in sorted(self.sessions.departed) if event.request else []:
            actions += self.saves.rank_gone(rank, "left the job", self.sessions.incarnation)
        return actions

    def _incarnation(self, event: ev.IncarnationTaken, now: float) -> list[Action]:
        if self.sessions.taking:
            before = self.sessions.session
            actions = self._with_news(self.sessions.opened(event, now))
            return [*actions, *self._entered(before)]
        if not self.restores.wants_incarnation:
            return []
        number = self.sessions.number_of(event)
        self._number_given = not event.problem
        return self._load(self.restores.incarnation_taken(number, self.sessions.world_size, self.saves, now))

    def _committed(self, event: ev.CommitEnded, now: float) -> list[Action]:
        actions = self.saves.committed(event, now)
        if now >= self._looked_at + self._policy.store_look_s:  # others may have removed checkpoints
            self._looked_at = now
            actions.append(ScanStore(job=self.job))
        actions += self._load(self.restores.store_moved(self.sessions.world_size, self.saves, now))
        return [*actions, *self._release_when_safe(now)]

    def _scanned(self, event: ev.StoreScanned, now: float) -> list[Action]:
        self._looked_at = now
        self._rescan_at = now + self._policy.drain_retry_max_s / 4 if event.problem and not self.saves.ready else None
        actions = self._weigh_numbers(event)
        actions += self.saves.scanned(event, self.sessions.incarnation, now)
        actions += self._load(self.restores.scanned(event, self.sessions.world_size, self.saves, now))
        actions += self._load(self.restores.store_moved(self.sessions.world_size, self.saves, now))
        return [*actions, *self._release_when_safe(now)]

    def _weigh_numbers(self, event: ev.StoreScanned) -> list[Action]:
        """Incarnations that lie on the store: a number made up while it was silent must not be one of them."""
        if event.problem:
            return []
        saves = [found.save for found in event.committed] + [partial.save for partial in event.partials]
        self.sessions.floor = max(self.sessions.floor, max((save.incarnation for save in saves), default=0))
        self.restores.raise_number(self.sessions.next_number)
        # What was committed or is drained from here is no older life's, whatever number it has.
        others = [save for save in saves if save not in self.saves.on_store and save != self.saves.active]
        seen = max((save.incarnation for save in others), default=0)
        if self.sessions.confirmed or seen < self.sessions.incarnation:
            self.sessions.confirmed = True  # from here on, what lies there under this number is its own
            return []
        return self.saves.dispute(self.sessions.incarnation)

    def _load(self, actions: list[Action]) -> list[Action]:
        """After each word of a load: one that succeeded begins an incarnation; retention may go on when it is over."""
        for order in [a.message for a in actions if isinstance(a, ToNode)]:
            if isinstance(order, ev.LoadOrdered) and (order.agreed or order.save is None):
                self.sessions.incarnation = max(self.sessions.incarnation, order.incarnation)
                self.sessions.confirmed = self._number_given or self.saves.ready
                self.saves.new_incarnation(self.sessions.incarnation)
                self.saves.awaited = ()  # what could be completed was
                if not self._roll_call.doubts:
                    actions = [*actions, *self.saves.end_halves(self.sessions.incarnation)]
                    actions += self.encodes.outlived(self.saves, self.restores.settled)
                if order.save is not None:
                    actions += [*self.saves.revive(order.save, self._now), *self.encodes.advance(self.saves, self._now)]
        if self.saves.retention.hold and not self.restores.running:
            self.saves.retention.hold = False
            actions += self.saves.retire()
        return actions

    def _release_when_safe(self, now: float) -> list[Action]:
        """A closed job's memory is free once its newest checkpoint is durable; a crashed one's after orphan_ttl_s."""
        expired = self._orphan_until is not None and now >= self._orphan_until
        if self.sessions.present or not (self._closing or expired):
            return []
        went_on = any(save.incarnation == self.sessions.incarnation for save in self.saves.on_store)
        newer = self._roll_call.doubts_of(self.sessions.nodes) if went_on else self._roll_call.doubts
        if newer and not expired:
            return []  # a node that has not said yet what it has may have what is newer than all that is known
        newest = self.saves.newest_staged
        if newest is not None and newest.end is End.FAILED and not expired:
            return self.saves.drain_newest(now)  # the only copy: it is tried until the memory must go
        waits = newest is not None and newest.end is not End.DURABLE
        if self.saves.active is not None or (waits and not expired):
            return []
        self._closing, self.orphaned_at = False, None
        self.encodes.released()
        self.saves.forget_memory()
        return [ToNode(job=self.job, message=ev.JobReleased(job=self.job, node=self._node))]

    @property
    def _orphan_until(self) -> float | None:
        """When the memory of a crashed job is given up; None while anybody may want it, or a drain reads it."""
        if self.orphaned_at is None or self.sessions.wanted or self.saves.active is not None:
            return None
        held = self.saves.anything_held  # else it is only room, kept for a launcher that tries again at once
        return self.orphaned_at + (self._policy.orphan_ttl_s if held else self._policy.empty_ttl_s)

    def view(self) -> ProtectionView | None:
        """How far the nodes protect each other; None: this daemon coordinates nothing."""
        return self.encodes.view(self.saves) if self.sessions.topology is not None else None

    def next_deadline(self) -> float | None:
        """The earliest time at which tick has something to do."""
        return self._deadline() if self._touched else self._due

    def _deadline(self) -> float | None:
        times = [self.sessions.next_deadline(), self.saves.next_deadline(), self.restores.next_deadline()]
        times += [self._rescan_at, self._orphan_until, self._roll_call.next_deadline(), self.encodes.next_deadline()]
        return min((t for t in times if t is not None), default=None)

    def tick(self, now: float) -> list[Action]:
        """What is due by now."""
        if not self._touched and (self._due is None or now < self._due):
            return []  # most daemons coordinate nothing
        self._now, self._touched = now, False
        actions = self._tick(now)
        self._due = self._deadline()
        return actions

    def _tick(self, now: float) -> list[Action]:
        before = self.sessions.session
        actions = [*self._with_news(self.sessions.tick(now)), *self._entered(before)]
        actions += [*self.saves.tick(now), *self.encodes.tick(self.saves, now)]
        if self._roll_call.tick(now):
            actions += self._judge(now)
        if self._rescan_at is not None and now >= self._rescan_at:
            self._rescan_at = None
            actions.append(ScanStore(job=self.job))
        actions += self._load(self.restores.tick(now, self.sessions.world_size, self.saves))
        return [*actions, *self._release_when_safe(now)]
