"""One job as rank 0's daemon sees it: its session, how far each save has come, what a load restores. Pure."""

from collections.abc import Callable, Iterable
from typing import Any

from msgspec.structs import replace

from ckptd.core import events as ev
from ckptd.core.actions import Action, ScanStore, ToNode
from ckptd.core.coordinator import invariants
from ckptd.core.coordinator.departures import How, how_closed
from ckptd.core.coordinator.inventory_barrier import UNKNOWN, InventoryBarrier
from ckptd.core.coordinator.job_state import JobState
from ckptd.core.coordinator.leave import Leave, Verdict
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
from ckptd.core.coordinator.timings import Timings
from ckptd.core.deadline import Deadline
from ckptd.core.links import Links
from ckptd.core.policy import Policy
from ckptd.core.preemption import Preemption
from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.protocol.topology import Topology

_MOST_ROUNDS = 16  # a turn settles in two or three


class Coordinator:
    """The job-wide half of a job; lives on the node of rank 0.

    A turn: the event is written into the facts, then each machine says what follows from them, until nothing does.
    """

    def __init__(self, job: JobKey, node: str, policy: Policy, known: int = 0, links: Links | None = None) -> None:
        self.job = job
        self._node = node
        self._policy = policy
        self.sessions = Sessions(job, node, policy, known, links, lambda: self.facts.known(self.sessions.incarnation))
        self.inventory = InventoryBarrier(policy)
        self.preemption = Preemption(job, node)
        self._know_nothing()
        self._now = 0.0  # of the last event
        self.due = Deadline(self._deadline)  # changes with what happens here
        self._blank = False  # the last scan found no store at its path
        self._looked_at = 0.0  # when the store was scanned last
        self._rescan_at: float | None = None  # the store did not answer; drains wait until it does
        self._former: frozenset[str] = frozenset()  # nodes that had something, known from before

    def _know_nothing(self) -> None:
        """Of saves, loads and parity."""
        self.facts = facts = JobState(self.job, self._node, self._policy, self.sessions, self.inventory)
        self.saves = Saves(facts)
        self.parity = ParityScheduler(facts)
        self.runs = Runs(facts)
        self.restores = Restores(facts, Routes(facts), self.runs.strangers)
        facts.restore, facts.preemption = self.restores, self.preemption
        self.leave = Leave(facts)
        self.timings = Timings(facts)
        self._notices = Notices(facts, self.timings)
        self._missing = MissingRanks(facts)
        self._missed = MissedLoads(facts)
        self._session = ""  # that was entered last
        self._placed: Topology | None = None  # of its nodes, as they were known last
        self._began: ev.LoadOrdered | None = None  # the load that began the present incarnation, if one did
        self._awaited: SaveId | None = None  # that a load waits for, and whose drain was asked for
        self._entering = False  # saves of older incarnations are judged once all nodes have said what they have
        self._needs_room = False  # a save was skipped since the session was opened
        self._asked_scan = False
        self.events, self.reports = self._events(), self._reports()

    def handle(self, event: ev.Event, now: float) -> list[Action]:
        """What to do about reports of nodes, or the outcome of an action of the coordinator."""
        self._now = now
        self.due.changed()
        if not isinstance(event, ev.Report | ev.Reports):
            return [*self.events[type(event)](event, now), *self._react(now)]
        reports = event.reports if isinstance(event, ev.Reports) else (event,)
        valid = [report for report in reports if not self.sessions.is_stale(report.event)]
        actions = [a for one in valid for a in self.reports[type(one.event)](one.node, one.event, now)]
        return [*actions, *self._react(now)] if valid else []

    def _events(self) -> dict[type[ev.Event], Callable[[Any, float], list[Action]]]:
        """Outcomes of actions of the coordinator, what was found at start, and which nodes answer."""
        return {
            ev.IncarnationTaken: self._incarnation,
            ev.StoreScanned: self._scanned,
            ev.CommitEnded: self._committed,
            ev.StepReached: lambda *_: [],  # for the journal alone
            ev.CheckpointRemoved: lambda event, _: self.saves.removed(event),
            ev.PeerUp: self._peer_up,
            ev.PeerDown: self._peer_down,
            ev.TopologyKept: lambda event, _: self._kept(event),
            ev.TopologyReported: self.sessions.topology_reported,
            ev.StoreRemembered: lambda event, _: self.sessions.remember(event),
        }

    def _reports(self) -> dict[type[ev.Fact], Callable[[str, Any, float], list[Action]]]:
        """What a node reports of itself."""
        return {
            ev.RanksFound: lambda node, event, _: self.sessions.found(node, event),
            ev.FormerNodeReported: self.sessions.former_node_reported,
            ev.NodeHas: self._node_has,
            ev.SlotsAwaited: lambda node, event, now: self._missing.allocates(node, event.ranks, now),
            ev.Encoded: self.parity.encoded,
            ev.SegmentFetched: self._fetched,
            ev.SegmentsGathered: self.restores.gathered,
            ev.NodeAttached: self._attached,
            ev.RanksGone: lambda _, event, now: self._gone(event.session, event.ranks, now),
            ev.RankDetached: lambda _, event, now: self._left(event.rank, event.session, how_closed(event), now),
            ev.SegmentsStaged: self._staged,
            ev.SegmentsReleased: self._released,
            ev.SaveSkipped: self._skipped,
            ev.DrainAsked: lambda _node, _event, now: self.saves.drain_newest(now),
            ev.PreemptAsked: lambda _, event, now: self.preemption.asked(event, self.sessions, now),
            ev.StepsRead: lambda node, event, _: self.preemption.read(node, event),
            **dict.fromkeys((ev.Drained, ev.VoteWritten), self._voted),
            ev.LoadsAsked: self._load_asked,
            ev.LoadsReported: lambda _, event, _now: self.restores.reported(event),
            **dict.fromkeys((ev.ScrubFound, ev.MendEnded), lambda *_: []),  # of the scrub alone
        }

    # --- what follows from the facts

    def _react(self, now: float) -> list[Action]:
        """What each machine says, until none has anything to say."""
        actions: list[Action] = []
        for _ in range(_MOST_ROUNDS):
            if not (more := self._round(now)):
                break
            actions += more
        return [*actions, *self._notices.react(now)]

    def _round(self, now: float) -> list[Action]:
        actions = self._follow_session()
        self._settle()
        actions += self.restores.react(now)
        self._follow_load()
        actions += [*self._look_again(), *self._drain_for_load(now)]
        return [*actions, *self.saves.react(now), *self.parity.react(now), *self._give_up_memory(now)]

    def _follow_session(self) -> list[Action]:
        """A new session ends what its predecessor had begun."""
        before, self._session = self._session, self.sessions.session
        if self._session == before:
            return self._know_nodes()
        self.leave.new_session()
        self.saves.fence.begin(self.sessions.incarnation, self.sessions.run, self.sessions.session)
        self.runs.new_session(self.sessions.incarnation, self.sessions.run, self.sessions.nodes)
        self._missed.new_session()
        self._needs_room, self._entering = False, True
        return [*self._know_nodes(opened=True), *self.restores.new_session()]

    def _know_nodes(self, *, opened: bool = False) -> list[Action]:
        """The session was opened, or its nodes, which this daemon did not know, are known now."""
        if not opened and (not self._session or self.sessions.topology is self._placed):
            return []
        nodes, self._placed = set(self.sessions.nodes), self.sessions.topology
        if self._placed is not None:
            self.facts.known_nodes(nodes)
            self.facts.chunks.known_nodes(nodes)
        self._ask_inventories()
        return self._sort_runs()

    def _ask_inventories(self, *, repeat: bool = False) -> None:
        """Every node of the session is to say what it has; again: also those that have."""
        sessions, nodes = self.sessions, set(self.sessions.nodes)
        inside = sessions.placement.nodes if sessions.placement is not None else {self._node, UNKNOWN}
        self.inventory.begin(nodes | inside, inside, sessions.session, self._now, sessions.earlier.nodes, repeat=repeat)

    def _sort_runs(self) -> list[Action]:
        actions = self.runs.sort()
        if self.runs.took_back():  # a load waits until it is in the tables again
            self._ask_inventories(repeat=True)
        return actions

    def _settle(self) -> None:
        """What older incarnations left, and is of no use, is given back once no silent node may hold the rest of it.

        A node outside of the session that is silent for long is taken for lost when the job can do without what it may
        have, because something newer is staged or the job is closed, or when it cannot continue with it.
        """
        if not self.inventory.complete:
            return
        if self._entering:
            self._entering = False
            self.saves.new_incarnation(awaited=self.facts.chunks.pieced)
        if self.inventory.overdue and (self.saves.went_on or self._needs_room or self.leave.closing):
            self.inventory.give_up()
        self.inventory.settle()

    def _look_again(self) -> list[Action]:
        """Nothing is drained before a number that was made up is on record, nor to another store than the ranks'."""
        wrong = self.saves.saw_another_store()
        answers = self.facts.ready and self._rescan_at is None
        return [self._scan()] if wrong or (answers and self.saves.fence.must_claim()) else []

    def _follow_load(self) -> None:
        """One that succeeded begins an incarnation."""
        order = self.restores.agreed
        if order is None or order is self._began:
            return
        self._began = order
        self.sessions.heard_number(order.incarnation, order.run, self.sessions.session)
        self.runs.lineage.begins(order.incarnation, order.run)
        self.saves.new_incarnation()  # what could be completed was
        if order.save is not None:
            self.saves.revive(order.save)

    def _drain_for_load(self, now: float) -> list[Action]:
        """A load waits for a checkpoint that lies in memory alone, and must be on the store."""
        before, self._awaited = self._awaited, self.restores.awaited
        return self.saves.drain_newest(now) if self._awaited not in {None, before} else []

    def _give_up_memory(self, now: float) -> list[Action]:
        verdict = self.leave.react(now)
        if verdict is Verdict.DRAINED:
            return self.saves.drain_newest(now)
        if verdict is not Verdict.RELEASED:
            return self.leave.rebuild.react(now) if verdict is Verdict.REBUILT else []
        self.parity.released()
        self.facts.known_nodes(())
        return [*self.leave.rebuild.notes, ToNode(job=self.job, message=ev.JobReleased(job=self.job, node=self._node))]

    # --- reports of nodes

    def _released(self, node: str, event: ev.SegmentsReleased, _now: float) -> list[Action]:
        actions = self.saves.released(node, event)
        return [*actions, *self._sort_runs()] if self.runs.released(node, event) else actions

    def _skipped(self, node: str, event: ev.SaveSkipped, now: float) -> list[Action]:
        self._needs_room = True
        return self.saves.skipped(node, event, self.sessions.world_size, now)

    def _voted(self, node: str, event: ev.Drained | ev.VoteWritten, now: float) -> list[Action]:
        if isinstance(event, ev.Drained) and event.committed:
            return self.saves.found_committed(event.save)
        return self.saves.voted(node, event.save, event.problem, now)

    def _load_asked(self, node: str, event: ev.LoadsAsked, now: float) -> list[Action]:
        answered = self._missed.asked(node, event)
        if answered is not None:
            return answered
        begins = not self.restores.running
        if event.run is not None and begins:
            self.runs.name(event.run)
        take = self.sessions.take(self.sessions.session)
        return [*self.restores.asked(node, event, take, now), *(self._sort_runs() if begins else ())]

    def _attached(self, node: str, event: ev.NodeAttached, now: float) -> list[Action]:
        scan: list[Action] = [] if self._asked_scan else [self._scan()]
        self._asked_scan = True
        actions = self.sessions.attached(node, event, now, self._missed.came_back(event))
        self.runs.attached(event, actions)
        return [*scan, *actions]

    def _node_has(self, node: str, event: ev.NodeHas, now: float) -> list[Action]:
        """All that a node has. Once all have said it, what cannot become whole any more is over."""
        if (ended := self._missed.ended_before(event)) is not None:
            self.restores.resumed(ended, self._missed.later(ended), asked_here=self._missed.asked_here)
            self._began = ended
        actions = self._missed.catch_up(node, event)
        self.sessions.heard_number(event.incarnation, event.run, event.session)
        segments, chunks = self.runs.sift(node, event)
        actions += [*self._sort_runs(), *self.sessions.heard_epoch(event.session, event.epoch)]
        self.inventory.spoke(node, event.session, event.former)
        actions += self._missing.allocates(node, event.awaited, now)
        self.facts.chunks.found(node, chunks, event.since)
        actions += self.parity.found(node)
        actions += self.saves.found(node, segments, now)
        actions += self.saves.wanted(event.wanted, now) if event.wanted is not None else []
        return [*actions, *self._gone(self.sessions.session, self.sessions.lives(node, event.living), now)]

    def _fetched(self, node: str, event: ev.SegmentFetched, now: float) -> list[Action]:
        actions = [] if event.problem else self.saves.fetched(node, event, now)
        self.restores.fetched(node, event)
        return [*actions, *self.leave.rebuild.fetched(event)]

    def _gone(self, session: str, ranks: Iterable[int], now: float) -> list[Action]:  # what they delivered counts
        return [action for rank in ranks for action in self._left(rank, session, How.ENDED, now)]

    def _left(self, rank: int, session: str, how: How, now: float) -> list[Action]:
        ours = session == self.sessions.session and rank in self.sessions.members
        actions = self.sessions.gone(rank, session, now, how)
        if not ours:
            self.leave.stranger_left(now)
            return actions
        self.leave.left(how)
        actions += self.saves.end_incomplete()
        actions += self.restores.rank_gone(self.sessions.departed[rank])
        return [*actions, *self._all_left(now)]

    def _all_left(self, now: float) -> list[Action]:
        """What follows when no rank is in any more, as far as nodes answer; another may have what is newer."""
        if self.sessions.attended:
            return []
        self.leave.all_left(now)
        return self.saves.drain_newest(now)

    def _staged(self, node: str, event: ev.SegmentsStaged, now: float) -> list[Action]:
        self.sessions.heard_number(event.save.incarnation, event.save.run, event.session)
        return self.saves.staged(node, event, now) if self.runs.admits(node, event) else self._sort_runs()

    # --- links, and what was kept

    def _peer_up(self, event: ev.PeerUp, now: float) -> list[Action]:
        self.inventory.came(event.node)
        self.runs.peer_up(event.node)
        actions = [*self.parity.peer_up(event.node), *self.saves.peer_up(event.node, now)]
        return [*actions, *self.restores.peer_up(event.node), *self.preemption.peer_up(event.node)]

    def _peer_down(self, event: ev.PeerDown, now: float) -> list[Action]:
        self.inventory.went(event.node)
        ranks = sorted(self.sessions.members.at(event.node))
        actions = [*self.sessions.peer_down(event.node, now), *self.restores.node_gone(event.node, ranks)]
        return [*actions, *self.saves.peer_down(event.node, now), *(self._all_left(now) if ranks else [])]

    def _kept(self, event: ev.TopologyKept) -> list[Action]:
        """What an earlier process of this daemon coordinated, if it did."""
        if event.topology.coordinator == self._node:
            self.sessions.kept(event)
            self._former, self._placed = frozenset(event.former), self.sessions.topology
        return []

    def retire(self, incarnation: int) -> None:
        """Another node coordinates the job now, in this incarnation."""
        self.due.changed()
        if self.sessions.session or self.facts.records:
            self.sessions.retire(incarnation)
            self.inventory.forget()
            self._know_nothing()

    def adopted(self, now: float) -> list[Action]:
        """Memory of the job was found at start and no rank is attached yet."""
        self.leave.adopted(now)
        self._asked_scan, self._now = True, now
        self.due.changed()
        self.inventory.born({*self.sessions.nodes, *self._former} - {self._node})
        return [self._scan(), *self._react(now)]

    # --- the store

    def _incarnation(self, event: ev.IncarnationTaken, now: float) -> list[Action]:
        joining = bool(self.sessions.taking) and event.session == self.sessions.taking
        if not joining and not (self.restores.wants_incarnation and event.session == self.sessions.session):
            return []  # of a session or a load that is over: its record on the store names that session
        if self.sessions.is_outdated(event):
            return [self.sessions.take(event.session)]
        self.saves.fence.saw(event.store_id)
        if not event.problem:
            self.saves.fence.recorded([(event.number, event.run)])
        if joining:
            actions = self.sessions.opened(event, now)
            return [*actions, *([self._scan()] if self._blank else [])]  # the number made one, or it does not answer
        actions = self.restores.incarnation_taken(self.sessions.number_of(event), event.run, self._scan())
        if event.problem:  # nor would it answer a scan
            self.restores.scanned(ev.StoreScanned(job=self.job, problem=event.problem))
            return []
        return actions

    def _committed(self, event: ev.CommitEnded, now: float) -> list[Action]:
        if not event.problem:
            self.runs.lineage.committed(event.save)
        actions = [*self.saves.committed(event, now), *self._notices.committed(event)]
        if now >= self._looked_at + self._policy.store_look_s:  # others may have removed checkpoints
            self._looked_at = now
            actions.append(self._scan())
        return actions

    def _no_store(self, event: ev.StoreScanned, now: float) -> list[Action]:
        """None was made there before the scan began, or what should be mounted there is not."""
        before, self._blank = self._blank, True
        missing = f"no store lies at {self.job.store}: is its file system mounted?"
        if not self.sessions.session and not self.leave.orphaned:
            self.saves.no_store(f"no store was made at {self.job.store} yet")
            return []  # a number makes it
        if not before and not event.after:
            return [self._scan()]
        return self._scanned(replace(event, problem=missing), now)

    def _scanned(self, event: ev.StoreScanned, now: float) -> list[Action]:
        if not event.problem:
            if not event.store_id:
                return self._no_store(event, now)
            self._blank = False
            event = self.sessions.store.took(event)
        self._looked_at = now
        wanted = not self.facts.ready or self.saves.fence.claim is not None
        self._rescan_at = now + self._policy.drain_retry_max_s / 4 if event.problem and wanted else None
        actions = self._weigh_numbers(event)
        if not event.problem:
            self.runs.scanned(event)
            actions += self._sort_runs()
        actions += self.saves.scanned(event, self.sessions.incarnation, now)
        self.restores.scanned(event)
        return [*actions, *self._look_again()]

    def _weigh_numbers(self, event: ev.StoreScanned) -> list[Action]:
        """Incarnations that lie on the store: a number made up while it was silent must not be one of them."""
        saves = [found.save for found in event.committed] + [partial.save for partial in event.partials]
        self.sessions.store.has(save.incarnation for save in saves)
        outdated = self.restores.is_outdated(self.sessions.next_number)
        again: list[Action] = [self.sessions.take(self.sessions.session)] if outdated else []
        others = (save.incarnation for save in saves if save.run != self.sessions.run)
        if self.saves.fence.looked(event, max(others, default=0)):
            again += self.saves.dispute(self.sessions.incarnation)
        return again

    def _scan(self) -> ScanStore:
        return self.sessions.scan(self.saves.fence.claim)

    # --- time, and what others see

    def view(self) -> ProtectionView | None:
        """How far the nodes protect each other; None: this daemon coordinates nothing."""
        return self.parity.view() if self.sessions.topology is not None else None

    def check(self) -> None:
        """Asserts what must always hold, and that nothing follows any more; tests call it after every event."""
        invariants.check(self.facts, self.parity)
        assert (left := self._round(self._now)) == [], f"it had not settled: {left}"  # noqa: S101

    def _deadline(self) -> float | None:
        machines = (self.sessions, self.saves, self.restores, self.inventory, self.parity, self.preemption)
        times = [machine.next_deadline() for machine in (*machines, self._missing, self.leave.rebuild)]
        return min((t for t in (*times, self._rescan_at, self.leave.until) if t is not None), default=None)

    def tick(self, now: float) -> list[Action]:
        """What is due by now."""
        if not self.due.by(now):
            return []
        self._now = now
        self.due.changed()
        return self._tick(now)

    def _tick(self, now: float) -> list[Action]:
        self.inventory.tick(now)
        machines = (self.sessions, self.saves, self.parity, self.preemption, self._missing)
        actions = [action for machine in machines for action in machine.tick(now)]
        if self._rescan_at is not None and now >= self._rescan_at:
            self._rescan_at = None
            actions.append(self._scan())
        return [*actions, *self.restores.tick(now), *self._react(now)]
