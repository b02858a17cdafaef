"""One job as rank 0's daemon sees it: its session, how far each save has come, what a load restores. Pure."""

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from ckptd.core import events as ev
from ckptd.core.actions import Action, ScanStore, ToNode
from ckptd.core.coordinator.departures import How
from ckptd.core.coordinator.inventory_barrier import InventoryBarrier
from ckptd.core.coordinator.leave import Leave
from ckptd.core.coordinator.locations import Routes
from ckptd.core.coordinator.missed_loads import MissedLoads
from ckptd.core.coordinator.missing_ranks import MissingRanks
from ckptd.core.coordinator.notices import Notices
from ckptd.core.coordinator.parity_scheduler import ParityScheduler
from ckptd.core.coordinator.protection_view import ProtectionView
from ckptd.core.coordinator.restores import Restores
from ckptd.core.coordinator.runs import Runs
from ckptd.core.coordinator.saves import Saves
from ckptd.core.coordinator.sessions import Sessions
from ckptd.core.links import Links
from ckptd.core.policy import Policy
from ckptd.core.preemption import Preemption
from ckptd.shared.base.ids import JobKey


class Coordinator:
    """The job-wide half of a job; lives on the node of rank 0."""

    def __init__(self, job: JobKey, node: str, policy: Policy, known: int = 0, links: Links | None = None) -> None:
        self.job = job
        self.links = links or Links(node)
        self._node = node
        self._policy = policy
        self.sessions = Sessions(job, node, policy, known, self.links)
        self.inventory = InventoryBarrier(policy)
        self.preemption = Preemption(job, node)
        self._know_nothing()
        self._session = ""  # that was entered last
        self._entering = False  # saves of older incarnations are judged once all nodes have said what they have
        self._missed = MissedLoads(node)
        self._now = 0.0  # of the last event
        self._touched = True  # since the last tick
        self._due: float | None = None  # as of the last tick
        self._asked_scan = False
        self._blank = False  # the last scan found no store at its path
        self._looked_at = 0.0  # when the store was scanned last
        self._rescan_at: float | None = None  # the store did not answer; drains wait until it does
        self._former: frozenset[str] = frozenset()  # nodes that had something, known from before
        self._needs_room = False  # a save was skipped since the session was opened

    def _know_nothing(self) -> None:
        """Of saves, loads and parity."""
        job, node, policy = self.job, self._node, self._policy
        self.saves = Saves(job, node, policy, self.inventory, self.links)
        self.sessions.known = lambda: self.saves.known(self.sessions.incarnation)
        self._notices = Notices(job, self.sessions, self.saves, policy.arena)
        self.parity = ParityScheduler(job, node, policy, self.saves)
        self.runs = Runs(job, node)
        routes = Routes(job, self.saves, self.saves.chunks, node, lambda: self.parity.topology)
        self.restores = Restores(job, node, policy, self.sessions, self.saves, routes, self.runs.strangers)
        self._missing = MissingRanks(job, node, self.sessions, self.saves, self.restores)
        self.leave = Leave(job, node, policy, self.sessions, self.saves, self.parity, self.inventory)
        self.events, self.facts = self._events(), self._facts()

    def handle(self, event: ev.Event, now: float) -> list[Action]:
        """What to do about a report of a node, or the outcome of an action of the coordinator."""
        self._now, self._touched, self.saves.fence.void = now, True, self.sessions.void
        if not isinstance(event, ev.Report):
            return self.events[type(event)](event, now)
        fact = event.event
        return [] if self.sessions.is_stale(fact) else self.facts[type(fact)](event.node, fact, now)

    def _events(self) -> dict[type[ev.Event], Callable[[Any, float], list[Action]]]:
        """Outcomes of actions of the coordinator, what was found at start, and which nodes answer."""
        return {
            ev.IncarnationTaken: self._incarnation,
            ev.StoreScanned: self._scanned,
            ev.CommitEnded: self._committed,
            ev.CheckpointRemoved: lambda event, _: self.saves.removed(event),
            ev.PeerUp: self._peer_up,
            ev.PeerDown: self._peer_down,
            ev.TopologyKept: lambda event, _: self._kept(event),
            ev.StoreRemembered: lambda event, _: self.sessions.remember(event),
        }

    def _facts(self) -> dict[type[ev.Fact], Callable[[str, Any, float], list[Action]]]:
        """What a node reports of itself."""
        return {
            ev.RankFound: lambda node, event, _: self.sessions.found(node, event),
            ev.JoinRequested: lambda _, event, now: self.sessions.join_requested(event, now),
            ev.FormerNodeReported: self._visited,
            ev.NodeHas: self._node_has,
            ev.SlotsAwaited: lambda node, event, now: self._missing.allocates(node, event.ranks, now),
            ev.Encoded: self.parity.encoded,
            ev.SegmentFetched: self._fetched,
            ev.RankAttached: self._attached,
            ev.RankGone: lambda _, event, now: self._left(event, now),
            ev.RankDetached: lambda _, event, now: self._left(event, now),
            ev.SegmentStaged: self._staged,
            ev.SegmentReleased: self._released,
            ev.SaveSkipped: self._skipped,
            ev.DrainAsked: lambda _node, _event, now: self.saves.drain_newest(now),
            ev.PreemptAsked: lambda _, event, now: self.preemption.asked(event, self.sessions, now),
            ev.StepsRead: lambda node, event, _: self.preemption.read(node, event),
            ev.DrainMoved: lambda node, event, _: self.saves.moved(node, event),
            ev.Drained: self._voted,
            ev.VoteWritten: self._voted,
            ev.LoadAsked: self._load_asked,
            ev.LoadReported: lambda _, event, now: self._load(self.restores.reported(event, now)),
        }

    def _visited(self, node: str, event: ev.FormerNodeReported, now: float) -> list[Action]:
        return [*self.sessions.former_node_reported(node, event, now), *self._entered()]

    def _released(self, node: str, event: ev.SegmentReleased, _now: float) -> list[Action]:
        actions = self.saves.released(node, event)
        return [*actions, *self._sort_runs()] if self.runs.released(node, event) else actions

    def _skipped(self, _node: str, event: ev.SaveSkipped, now: float) -> list[Action]:
        self._needs_room = True
        return [*self.saves.skipped(event, self.sessions.world_size, now), *self._judge(now)]

    def _voted(self, node: str, event: ev.Drained | ev.VoteWritten, now: float) -> list[Action]:
        if isinstance(event, ev.Drained) and event.committed:
            return self.saves.found_committed(event.save)
        return self.saves.voted(node, event.save, event.problem, now)

    def _load_asked(self, node: str, event: ev.LoadAsked, now: float) -> list[Action]:
        if not event.request and node in self._missed.told:
            return []  # it was answered before it was said again
        if event.rank in self._missed.ranks and self.restores.agreed is not None:
            self._missed.ranks.discard(event.rank)
            return [ToNode(job=self.job, node=node, message=self.restores.agreed)]
        self._missed.asked_here |= event.request > 0
        self.saves.retention.hold = True
        if event.run is not None and not self.restores.running:
            self.runs.name(event.run)
        take = self.sessions.take(self.sessions.session)
        actions = self.restores.asked(node, event, take, now)
        return [*self._sort_runs(), *self._load([*actions, *self.restores.hopeless(self.sessions.incomplete)])]

    def _sort_runs(self) -> list[Action]:
        actions = self.runs.sort(self.saves, lambda: self.sessions.nodes)
        if self.runs.took_back():  # a load waits until it is in the tables again
            self._ask_inventories(repeat=True)
            self.restores.blind()
        return actions

    def _attached(self, node: str, event: ev.RankAttached, now: float) -> list[Action]:
        scan: list[Action] = [] if self._asked_scan else [self._scan()]
        self._asked_scan = True
        agreed = self.restores.agreed
        if event.request and agreed is not None and 0 < event.incarnation < agreed.incarnation:
            self._missed.ranks.add(event.rank)  # its daemon ended before it received the end of that load
        loaded = agreed.incarnation if agreed is not None else 0
        actions = self.sessions.attach(node, event, now, loaded)
        self.runs.attached(event, actions)
        actions += [*self._end_incomplete(), *self._load(self.restores.hopeless(self.sessions.incomplete))]
        return [*scan, *actions, *self._entered(), *self._look_anew()]

    def _look_anew(self) -> list[Action]:
        """What was seen may be another store than that of the ranks that are in now."""
        return [self._scan()] if self.saves.saw_another_store(self.sessions) else []

    def _entered(self) -> list[Action]:
        """Follows the admission of a session: a new one ends what its predecessor had begun."""
        self._somebody_is_in()
        before, self._session = self._session, self.sessions.session
        if self._session == before:
            return []
        self.leave.crashed = False
        self.saves.fence.begin(self.sessions.incarnation, self.sessions.run, self.sessions.session)
        nodes = self.sessions.nodes
        self.runs.new_session(self.sessions.incarnation, self.sessions.run, nodes)
        self.saves.known_nodes(nodes)
        self.saves.chunks.known_nodes(nodes)
        self.parity.opened(self.sessions.topology, self.sessions.epoch)
        self._missed.new_session()
        if self.restores.agreed is not None and self.restores.agreed.incarnation < self.sessions.incarnation:
            self.restores.agreed = None
        self._ask_inventories()
        self._needs_room = False
        self._entering = True
        self.restores.blind()
        return [*self._sort_runs(), *self._claim(), *self._load(self.restores.replaced())]

    def _ask_inventories(self, *, repeat: bool = False) -> None:
        """Every node of the session is to say what it has; again: also those that have."""
        inside = self.sessions.topology.nodes if self.sessions.topology is not None else (self._node,)
        self.inventory.begin(self.sessions.nodes, inside, self.sessions.session, self._now, repeat=repeat)

    def _node_has(self, node: str, event: ev.NodeHas, now: float) -> list[Action]:
        """All that a node has. Once all have said it, what cannot become whole any more is over."""
        actions = self._missed.catch_up(node, event, self.restores, self.sessions)
        self.sessions.heard_number(event.incarnation, event.run, event.session)
        segments, chunks = self.runs.sift(node, event)
        actions += self._sort_runs()
        actions += self.sessions.heard_epoch(event.session, event.epoch)
        self.parity.opened(self.sessions.topology, self.sessions.epoch)
        self.inventory.spoke(node, event.session, event.former)
        self.saves.chunks.found(node, chunks, event.since)
        actions += self.parity.found(node, now)
        actions += self.saves.found(node, segments, now)
        for rank in self.sessions.lives(node, event.live):  # what they delivered before they ended counts
            gone = ev.RankGone(job=self.job, rank=rank, session=self.sessions.session)
            actions += self._left(gone, now)
        return [*actions, *self._judge(now), *self.parity.advance(now)]

    def _judge(self, now: float) -> list[Action]:
        """What older incarnations left, and is of no use, is given back once no silent node may hold the rest of it.

        A node outside of the session that is silent for long is taken for lost when the job can do without what it may
        have, because something newer is staged or the job is closed, or when it cannot continue with it.
        """
        if not self.inventory.complete:
            return []
        if self._entering:
            self._entering = False
            self.saves.awaited = self.saves.chunks.pieced
            self.saves.new_incarnation(self.sessions.incarnation, self.sessions.run, self.sessions.session)
        actions: list[Action] = []
        if self.inventory.overdue and (self.saves.went_on or self._needs_room or self.leave.closing):
            self.inventory.give_up()
        if self.inventory.settle():
            actions += self.saves.end_incomplete(self.sessions.incarnation)
            actions += self.parity.obsolete(self.restores.settled)
            actions += self.parity.advance(now)
        return [*actions, *self._load(self.restores.go_on(now))]

    def _peer_up(self, event: ev.PeerUp, now: float) -> list[Action]:
        self.sessions.processes.link_up(event.node)
        self._somebody_is_in()
        self.inventory.came(event.node)
        self.runs.peer_up(event.node)
        actions = [*self.parity.peer_up(event.node), *self.saves.peer_up(event.node, now)]
        return [*actions, *self.restores.peer_up(event.node), *self.preemption.peer_up(event.node)]

    def _peer_down(self, event: ev.PeerDown, now: float) -> list[Action]:
        node = event.node
        actions = [*self.sessions.peer_down(now), *self._entered()]
        self.inventory.went(node)
        ranks = sorted(rank for rank, home in self.sessions.members.items() if home == node)
        actions += self._load(self.restores.node_gone(node, ranks))
        actions += self.saves.peer_down(node, now)
        return [*actions, *(self._all_left(now) if ranks else []), *self._judge(now)]

    def _kept(self, event: ev.TopologyKept) -> list[Action]:
        """What an earlier process of this daemon coordinated, if it did."""
        if event.topology.coordinator != self._node:
            return []
        self.sessions.kept(event)
        self._former = frozenset(event.former)
        self.parity.opened(event.topology, event.epoch)
        return []

    def _fetched(self, node: str, event: ev.SegmentFetched, now: float) -> list[Action]:
        actions = [] if event.problem else self.saves.fetched(node, event.save, event.rank, now, event.attestations)
        return [*actions, *self._load(self.restores.fetched(node, event, now))]

    def retire(self, incarnation: int) -> None:
        """Another node coordinates the job now, in this incarnation."""
        self._touched = True
        if self.sessions.session or self.saves.records:
            self.sessions.retire(incarnation)
            self._session = ""
            self.inventory.forget()
            self._know_nothing()
            self._asked_scan = False

    def _somebody_is_in(self) -> None:
        """Ranks belong to the job: it is neither closing nor an orphan. A pending join request changes nothing."""
        if self.sessions.attended:
            self.leave.stay()
            self.saves.due.cadence = self.sessions.cadence

    def adopted(self, now: float) -> list[Action]:
        """Memory of the job was found at start and nobody is attached yet."""
        self.leave.orphaned_at, self._asked_scan, self._touched = now, True, True
        self.inventory.born((self.sessions.nodes | self._former) - {self._node})
        return [self._scan()]

    def _left(self, event: ev.RankGone | ev.RankDetached, now: float) -> list[Action]:
        ours = event.session == self.sessions.session and event.rank in self.sessions.members
        how = How.ENDED if isinstance(event, ev.RankGone) else How.CLOSED
        actions = self.sessions.gone(event.rank, event.session, now, how)
        if not ours:
            self.leave.stranger_left(now)
            return actions
        self.leave.crashed |= how is How.ENDED
        left = self.sessions.departed[event.rank]
        actions += self.saves.rank_gone(left, self.sessions.incarnation)
        return [*actions, *self._load(self.restores.rank_gone(left)), *self._all_left(now)]

    def _all_left(self, now: float) -> list[Action]:
        """What follows when nobody is in any more, as far as nodes answer: one that does not may have what is newer."""
        if self.sessions.attended:
            return []
        self.leave.all_left(now)
        return [*self._judge(now), *self.saves.drain_newest(now), *self.leave.when_safe(now)]

    def _staged(self, node: str, event: ev.SegmentStaged, now: float) -> list[Action]:
        self.sessions.heard_number(event.save.incarnation, event.save.run, event.session)
        if not self.runs.admits(node, event):
            return self._sort_runs()
        before, self.saves.due.from_step = self.saves.newest_staged, self.preemption.due_from(self.sessions.session)
        actions = [*self.saves.staged(node, event, now), *self.parity.advance(now)]
        if self.saves.newest_staged is not before:
            judged = self.inventory.doubts
            actions += self._judge(now) if judged else self.parity.obsolete(self.restores.settled)
        return [*actions, *(self._end_incomplete() if event.request else ())]

    def _end_incomplete(self) -> list[Action]:
        """Saves that wait for ranks which left can never complete."""
        gone = sorted(self.sessions.departed.items())
        return [action for _, left in gone for action in self.saves.rank_gone(left, self.sessions.incarnation)]

    def _incarnation(self, event: ev.IncarnationTaken, now: float) -> list[Action]:
        joining = bool(self.sessions.taking) and event.session == self.sessions.taking
        if not joining and not (self.restores.wants_incarnation and event.session == self.sessions.session):
            return []  # of a session or a load that is over: its record on the store names that session
        if self.sessions.is_outdated(event):
            return [self.sessions.take(event.session)]
        self.saves.fence.store_id = event.store_id or self.saves.fence.store_id
        if not event.problem:
            self.saves.fence.recorded([(event.number, event.run)])
        if joining:
            actions = self.sessions.opened(event, now)
            actions += [self._scan()] if self._blank else []  # the number made one, or it does not answer
            return [*actions, *self._entered(), *self._look_anew()]
        actions = self.restores.incarnation_taken(self.sessions.number_of(event), event.run, self._scan())
        if event.problem:  # nor would it answer a scan
            silent = ev.StoreScanned(job=self.job, problem=event.problem)
            return self._load(self.restores.scanned(silent, now))
        return actions

    def _committed(self, event: ev.CommitEnded, now: float) -> list[Action]:
        if not event.problem:
            self.runs.lineage.committed(event.save)
        actions = [*self.saves.committed(event, now), *self._notices.committed(event)]
        if now >= self._looked_at + self._policy.store_look_s:  # others may have removed checkpoints
            self._looked_at = now
            actions.append(self._scan())
        actions += self._load(self.restores.store_moved(now))
        return [*actions, *self.leave.when_safe(now)]

    def _no_store(self, event: ev.StoreScanned, now: float) -> list[Action]:
        """None was made there before the scan began, or what should be mounted there is not."""
        before, self._blank = self._blank, True
        missing = f"no store lies at {self.job.store}: is its file system mounted?"
        if not self.sessions.session and self.leave.orphaned_at is None:
            self.saves.store_problem = f"no store was made at {self.job.store} yet"
            return []  # a number makes it
        if not before and not event.after:
            return [self._scan()]
        return self._scanned(replace(event, problem=missing), now)

    def _scanned(self, event: ev.StoreScanned, now: float) -> list[Action]:
        if not event.problem:
            if not event.store_id:
                return self._no_store(event, now)
            self._blank = False
            event = self.sessions.took_store(event)
        self._looked_at = now
        wanted = not self.saves.ready or self.saves.fence.claim is not None
        self._rescan_at = now + self._policy.drain_retry_max_s / 4 if event.problem and wanted else None
        actions = self._weigh_numbers(event)
        if not event.problem:
            self.runs.scanned(event)
            actions += self._sort_runs()
        actions += self.saves.scanned(event, self.sessions.incarnation, now)
        actions += [] if event.problem else self._claim()
        actions += self._load(self.restores.scanned(event, now))
        actions += self._load(self.restores.store_moved(now))
        return [*actions, *self.leave.when_safe(now)]

    def _weigh_numbers(self, event: ev.StoreScanned) -> list[Action]:
        """Incarnations that lie on the store: a number made up while it was silent must not be one of them."""
        saves = [found.save for found in event.committed] + [partial.save for partial in event.partials]
        self.sessions.floor = max(self.sessions.floor, max((save.incarnation for save in saves), default=0))
        outdated = self.restores.is_outdated(self.sessions.next_number)
        again: list[Action] = [self.sessions.take(self.sessions.session)] if outdated else []
        others = (save.incarnation for save in saves if save.run != self.sessions.run)
        if self.saves.fence.looked(event, max(others, default=0)):
            again += self.saves.dispute(self.sessions.incarnation)
        return again

    def _scan(self) -> ScanStore:
        return self.sessions.scan(self.saves.fence.claim)

    def _claim(self) -> list[Action]:
        """Nothing is drained before a number that was made up is on record; the store has answered."""
        return [self._scan()] if self.saves.ready and self.saves.fence.must_claim() else []

    def _load(self, actions: list[Action]) -> list[Action]:
        """After each message of a load: one that succeeded begins an incarnation; retention resumes after it."""
        for order in [a.message for a in actions if isinstance(a, ToNode)]:
            if isinstance(order, ev.LoadOrdered) and (order.agreed or order.save is None):
                self.sessions.heard_number(order.incarnation, order.run, self.sessions.session)
                self.runs.lineage.begins(order.incarnation, order.run)
                self.saves.new_incarnation(self.sessions.incarnation, self.sessions.run, self.sessions.session)
                actions = [*actions, *self._claim()]
                self.saves.awaited = ()  # what could be completed was
                if not self.inventory.doubts:
                    actions = [*actions, *self.saves.end_incomplete(self.sessions.incarnation)]
                    actions += self.parity.obsolete(self.restores.settled)
                if order.save is not None:
                    actions += [*self.saves.revive(order.save, self._now), *self.parity.advance(self._now)]
        if self.saves.retention.hold and not self.restores.running:
            self.saves.retention.hold = False
            actions += self.saves.retire()
        return actions

    def view(self) -> ProtectionView | None:
        """How far the nodes protect each other; None: this daemon coordinates nothing."""
        return self.parity.view() if self.sessions.topology is not None else None

    def next_deadline(self) -> float | None:
        """The earliest time at which tick has something to do."""
        return self._deadline() if self._touched else self._due

    def _deadline(self) -> float | None:
        times = [self.sessions.next_deadline(), self.saves.next_deadline(), self.restores.next_deadline()]
        times += [self._rescan_at, self.leave.until, self.inventory.next_deadline(), self.parity.next_deadline()]
        times += [self.preemption.next_deadline(), self._missing.next_deadline()]
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
        actions = [*self.sessions.tick(now), *self._entered()]
        actions += [*self.saves.tick(now), *self.parity.tick(now), *self.preemption.tick(now)]
        actions += self._missing.tick(now)
        actions += self._judge(now) if self.inventory.tick(now) else []
        if self._rescan_at is not None and now >= self._rescan_at:
            self._rescan_at = None
            actions.append(self._scan())
        actions += self._load(self.restores.tick(now))
        return [*actions, *self._notices.tick(now), *self.leave.when_safe(now)]
