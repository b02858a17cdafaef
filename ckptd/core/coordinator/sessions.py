"""Which session is the job: admission at the coordinator. Pure.

A session is one set of ranks started together. A new one may enter when nodes have named all of its ranks and no rank
of another lives (or by takeover), and gets the next incarnation number. Then its topology is made. A rank of the
present session that comes back to a restarted daemon enters at once.
"""

from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet

from ckptd.core import events as ev
from ckptd.core.actions import Action, Claim, ScanStore, TakeIncarnation, ToNode
from ckptd.core.coordinator.admission_states import AdmissionOn
from ckptd.core.coordinator.departures import Departure, How
from ckptd.core.coordinator.former_nodes import Earlier
from ckptd.core.coordinator.members import Members
from ckptd.core.coordinator.patience import Patience
from ckptd.core.coordinator.processes import Processes
from ckptd.core.coordinator.protection_view import less_than_asked
from ckptd.core.coordinator.save_record import few
from ckptd.core.coordinator.session_store import SessionStore
from ckptd.core.coordinator.wait_reasons import Waiting
from ckptd.core.coordinator.waiting_sessions import WaitingSessions
from ckptd.core.links import Links
from ckptd.core.placement import Misfit, Placement, Roster, of_peers
from ckptd.core.policy import Policy
from ckptd.shared.base.errors import ProtocolError
from ckptd.shared.base.ids import NO_RUN, JobKey, RunId
from ckptd.shared.protocol.messages import Cadence, Progress
from ckptd.shared.protocol.node_messages import MAX_VOID
from ckptd.shared.protocol.topology import Peer, Topology


class Sessions:
    """Admission of sessions. ``incarnation`` is the largest number this coordinator knows of."""

    def __init__(  # noqa: PLR0913, PLR0917 - what an earlier process knew, and what its parts share
        self,
        job: JobKey,
        node: str,
        policy: Policy,
        known: int = 0,
        links: Links | None = None,
        progress: Callable[[], tuple[Progress, ...]] = tuple,
    ) -> None:
        self._job = job
        self._node = node
        self._policy = policy
        self.session = ""
        self.incarnation = 0
        self.run: RunId = NO_RUN  # drawn with the incarnation
        self.store = SessionStore(job)
        self.world_size = 0
        self.cadence = Cadence()
        self.members = Members()
        self.placement: Placement | None = None  # of the session, or of the one that an earlier process coordinated
        self._placed = ""  # the session of which it is
        self._roster = Roster()  # of the session, as its nodes report it
        self.epoch = 0  # the incarnation in which this topology began
        self._epochs: dict[str, int] = {}  # by session, as its nodes have reported
        self._outside: Topology | None = None  # of nodes that the job ran on before
        self.visitors: set[str] = set()  # nodes outside of it that may hold something of the job
        self.links = links or Links(node)
        self.processes = Processes(self.links)
        self._patience = Patience(job, node, policy, self.processes)
        self.departed: dict[int, Departure] = {}  # members that left or died; nothing more comes from them
        self._dead: set[tuple[int, str]] = set()
        self._known = known  # the largest that some node had, this one or another
        self.spoiled = ""  # why the session will not be complete: a rank of it was refused
        self.heard_of: set[str] = {node}  # nodes where ranks waited to join
        self._waiting = WaitingSessions(job, node)
        self._former: dict[str, Peer] = {}  # nodes that the job ran on before
        self.earlier = Earlier()  # where sessions before this one ran, as far as this process knows
        self._progress = progress  # what became of the saves of this incarnation
        self._took: dict[str, None] = {}  # sessions for which numbers were asked here, the last ones

    def kept(self, event: ev.TopologyKept) -> None:
        """What an earlier process of this coordinator knew."""
        self.placement, self._placed, self.epoch = Placement(event.topology), event.session, event.epoch
        self.incarnation = max(self.incarnation, event.epoch)
        self._former |= {peer.node: peer for peer in event.outside}
        self.visitors |= {peer.node for peer in event.outside}
        self._outside = of_peers(event.outside)

    @property
    def topology(self) -> Topology | None:
        """Of the session; None while its nodes are not known."""
        return self.placement.topology if self.placement is not None else None

    def remember(self, event: ev.StoreRemembered | ev.FormerNodeReported) -> list[Action]:
        """An arena has the store to which the job was saved, if it has one."""
        self.store.remember(event.store_id)
        return []

    def found(self, node: str, event: ev.RanksFound) -> list[Action]:
        """The live processes of a node: nothing to do."""
        self.processes.report(node, event.living)
        return []

    def is_stale(self, event: ev.Event) -> bool:
        """Whether it is a rank's word of another session than the present one: it counts for nothing."""
        if not isinstance(event, ev.FromRank | ev.SegmentsStaged):
            return False
        return bool(event.session) and event.session != self.session

    def former_node_reported(self, node: str, event: ev.FormerNodeReported, now: float) -> list[Action]:
        """A node that the session leaves has reported the ranks that live there."""
        self._known = max(self._known, event.incarnation)
        self.remember(event)
        self.processes.report(node, event.living)
        waiting = self._waiting.get(event.session)
        if waiting is None:
            return []
        waiting.former.has_reported(node)
        return self._open_waiting(now)

    def lives(self, node: str, living: Iterable[ev.Living]) -> list[int]:
        """Members of this session that are not among those that live at their node."""
        living = tuple(living)
        self.processes.report(node, living)
        return sorted(self.members.at(node) - {one.rank for one in living if one.session == self.session})

    def peer_down(self, node: str, now: float) -> list[Action]:
        """Nobody waits for ranks of a node that does not answer: what they still do is of an old incarnation."""
        asked = [a for waiting in self._waiting.values() for a in waiting.former.peer_down(node, self.links.down)]
        return [*asked, *self._open_waiting(now)]

    def topology_reported(self, event: ev.TopologyReported, now: float) -> list[Action]:
        """A node sends the topology of an earlier session."""
        if not any(waiting.former.lacks(event.packed.digest) for waiting in self._waiting.values()):
            return []
        try:
            topology = Topology.unpacked(event.packed)
        except ProtocolError:
            return []
        for waiting in self._waiting.values():
            waiting.former.found(topology)
        return self._open_waiting(now)

    def retire(self, incarnation: int) -> None:
        """Another node coordinates the job now, in this incarnation; what waits to join here waits on."""
        self.incarnation = max(self.incarnation, incarnation)
        self.session, self.members, self.departed, self.visitors, self.earlier = "", Members(), {}, set(), Earlier()
        self.placement, self._placed, self.epoch, self._roster, self._outside = None, "", 0, Roster(), None

    def gone(self, rank: int, session: str, now: float, how: How) -> list[Action]:
        """The process ended; perhaps somebody waits for that."""
        pid = self.processes.ended(rank, session)
        if not self.session:
            self._dead.add((rank, session))  # before anybody said which session is the job
        if session == self.session and self.members.remove(rank):
            self.departed[rank] = Departure(rank, how, pid)
        waiting = self._waiting.get(session)
        if waiting is not None:
            waiting.roster.drop(rank)
            self._waiting.left(session)
        return self._open_waiting(now)

    def attached(self, node: str, event: ev.NodeAttached, now: float, loaded: int = 0) -> list[Action]:
        """Ranks of a node wait to join, or are in. loaded: the incarnation that this session began with a load."""
        self.heard_of.add(node)
        self.processes.report(node, event.living)
        self._known = max(self._known, event.known)
        self.store.remember(event.saved_to)
        refused: dict[Misfit, list[int]] = {}
        comes: list[ev.Arrival] = []
        entered: list[int] = []
        members = [ev.Arrival(rank, event.world_size, event.incarnation, event.run) for rank in event.members]
        for arrival in (*event.waiting, *members):
            if event.session == self.session and not arrival.incarnation and not self.members and self.departed:
                self.session = ""  # all of it ended: a session of the same name is a new one now
            problem = self._misfit(event.session, arrival, loaded)
            if problem is not None:
                refused.setdefault(problem, []).append(arrival.rank)
            elif event.session == self.session or arrival.incarnation > 0:
                self._enter(node, event, arrival)
                entered.append(arrival.rank)
            else:
                comes.append(arrival)
        actions: list[Action] = []
        for problem, ranks in refused.items():
            if event.session == self.session:
                self.spoiled = f"rank {ranks[0]} was refused: {problem[1]}"
            actions.append(self._refusal(event.session, tuple(ranks), *problem))
        if entered:
            asked = {arrival.rank for arrival in event.waiting}
            actions += self._place(node, event, tuple(rank for rank in entered if rank in asked))
        if comes or event.session in self._waiting:
            actions += self._wait(node, event, comes, now)
        return actions

    def _enter(self, node: str, event: ev.NodeAttached, arrival: ev.Arrival) -> None:
        """The rank belongs to the session that is the job, or comes back from it."""
        if event.session != self.session:
            self.members, self.store.asked, self._roster, self.earlier = Members(), "", Roster(), Earlier()
            self.store.id = "" if self.session else self.store.id  # that which was found before anybody came
            self.departed = {r: Departure(r) for r, session in self._dead if session == event.session}
            if event.session != self._placed:
                self.placement, self._placed, self.epoch = None, event.session, 0
            self.epoch = self._epochs.get(event.session, self.epoch) or arrival.incarnation
        self.session, self.world_size, self.cadence = event.session, arrival.world_size, event.cadence
        self.heard_number(arrival.incarnation, arrival.run, event.session)
        self.store.reported(event.store_id)
        self.members.add(arrival.rank, node)
        self.departed.pop(arrival.rank, None)
        self.spoiled = ""

    def _place(self, node: str, event: ev.NodeAttached, ranks: tuple[int, ...]) -> list[Action]:
        """Sends the node its place, and all of them theirs where this node was the last that was not known."""
        if self.placement is None:
            arrivals = [ev.Arrival(rank, self.world_size) for rank in self.members.at(node)]
            self._roster.put(node, event, arrivals)
            if self._roster.whole:
                self.placement = Placement(self._roster.topology())
                others = [self._welcome(other, ()) for other in sorted(self.placement.nodes) if other != node]
                return [*self._library(self.topology, self._outside), self._welcome(node, ranks), *others]
        return [self._welcome(node, ranks, has=event.digest)]

    def _wait(self, node: str, event: ev.NodeAttached, arrivals: list[ev.Arrival], now: float) -> list[Action]:
        """Ranks of the node wait to join, these and no others."""
        session = event.session
        waiting = self._waiting.came(session, now)
        if (problem := waiting.roster.misfit(node, arrivals, self.links.down)) is not None:
            return self._turn_away(session, problem, now)
        before = waiting.roster.attached.get(node)
        waiting.roster.put(node, event, arrivals)
        waiting.add(event)
        waiting.outdated |= before is not None and before.peer != event.peer
        self._waiting.left(session)
        actions = waiting.former.named(node, event.former)
        if waiting.placement is not None and node != self._node:
            actions += waiting.former.again(node, event.former.digest, self._own(waiting))
        return [*actions, *self._open_waiting(now)]

    def _own(self, waiting: Waiting) -> Peer:
        """This daemon, as its ranks' node reports it."""
        return waiting.roster.attached[self._node].peer

    def _turn_away(self, session: str, problem: Misfit, now: float) -> list[Action]:
        """No rank of the session may join."""
        refused = self._waiting.move(session, AdmissionOn.REFUSED)
        return [*([self._refusal(session, (), *problem)] if refused else []), *self._open_waiting(now)]

    def heard_number(self, incarnation: int, run: RunId, session: str) -> None:
        """Somebody has this number. Of another session: the next number is above it, and no more."""
        if session != self.session:
            self._known = max(self._known, incarnation)
            return
        if incarnation > self.incarnation or (incarnation == self.incarnation and self.run == NO_RUN):
            self.incarnation, self.run = incarnation, run

    def heard_epoch(self, session: str, epoch: int) -> list[Action]:
        """A node says since when its session has its topology; this daemon may have restarted before it kept that."""
        self._epochs[session] = max(epoch, self._epochs.get(session, 0))
        if not session or session != self.session or epoch <= self.epoch:
            return []
        self.epoch = epoch
        return [self._welcome(self._node, ())]

    def _misfit(self, session: str, arrival: ev.Arrival, loaded: int) -> Misfit | None:
        """Why a rank of the session that is the job, or comes back from one, may not join."""
        ours = session == self.session
        missed = ours and loaded == self.incarnation  # the end of that load, when its daemon ended
        replaced = arrival.incarnation < self.incarnation and not missed
        if self.session and not ours:
            replaced = arrival.incarnation <= self.incarnation
        if arrival.incarnation == self.incarnation and self.run not in (arrival.run, NO_RUN):
            return ("stale", f"incarnation {arrival.incarnation} belongs to another run of the job", "")
        if arrival.incarnation and replaced:
            return ("stale", f"incarnation {arrival.incarnation} was replaced by {self.incarnation}", "")
        if (ours or arrival.incarnation) and arrival.rank >= arrival.world_size:
            return ("usage", f"rank {arrival.rank} does not exist in a job of {arrival.world_size} ranks", "")
        if ours and arrival.world_size != self.world_size:
            text = f"rank {arrival.rank} says the job has {arrival.world_size} ranks, others say {self.world_size}"
            return ("usage", text, "start all ranks with the same world size")
        return None

    def _open_waiting(self, now: float) -> list[Action]:
        if self.taking:
            return []
        actions: list[Action] = []
        for session, waiting in self._waiting.placed():
            if waiting.place(now):
                if (problem := waiting.roster.fault(waiting.topology, self._node)) is not None:
                    return [*actions, *self._turn_away(session, problem, now)]
                actions += self._library(waiting.topology)  # most of the work, before the number is here
            actions += waiting.former.review(waiting.topology, self._own(waiting))
            heard = waiting.heard(now, self._policy.outside_wait_s)
            alone = heard and (waiting.takeover or not self.processes.others(session))
            if alone and self._waiting.move(session, AdmissionOn.HEARD):
                return [*actions, self.take(session)]
        return [*actions, *self._refuse_late(now)]

    def take(self, session: str) -> TakeIncarnation:
        """Asks for the next number, for a session that waits to join or the one that is in."""
        waiting = self._waiting.get(session)
        self._took = dict.fromkeys([*(one for one in self._took if one != session), session][-MAX_VOID:])
        return TakeIncarnation(
            job=self._job,
            at_least=self.next_number,
            session=session,
            remembered=tuple(sorted(self.store.remembered)),
            wanted=waiting.store_id if waiting is not None else self.store.wanted,
        )

    @property
    def void(self) -> tuple[str, ...]:
        """Sessions that were the job here, or wanted to be, and are over: whatever number the store gives them late."""
        return tuple(sorted(self._took.keys() - {self.session, self.taking}))

    def scan(self, claim: Claim | None) -> ScanStore:
        """Asks what lies on the store, after the claim is on record."""
        return self.store.scan(claim, make=bool(self.session))

    def _refuse_late(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for session, reason in self._patience.ended(self._waiting, now).items():
            if self._waiting[session].ranks and self._waiting.move(session, AdmissionOn.REFUSED):
                actions.append(self._refusal(session, (), "connect", *reason))
        return actions

    @property
    def nodes(self) -> AbstractSet[str]:
        """All nodes that have, or may have, something of the job."""
        inside = self.placement.nodes if self.placement is not None else frozenset[str]()
        return inside if self._node in inside and not self.visitors else {self._node} | inside | self.visitors

    @property
    def attended(self) -> bool:
        """Whether a member is at a node that answers: the others may be long gone with theirs."""
        return any(node not in self.links.down for node in self.members.nodes)

    @property
    def wanted(self) -> bool:
        """Whether a rank may still need the job's memory: a member, one waiting to join, or one that may come back."""
        return bool(self.attended or self._waiting or self.processes.near())

    @property
    def peopled(self) -> bool:
        """Whether a rank of the session is in, or lives and has not come back to a daemon that restarted."""
        return bool(self.attended or self.processes.near(self.session))

    @property
    def living(self) -> str:
        """The session whose ranks are in, or live and have not come back yet to a daemon that restarted; else empty."""
        sessions = self.processes.sessions
        alone = next(iter(sessions)) if len(sessions) == 1 else ""
        return (self.session if self.members else "") or alone

    @property
    def next_number(self) -> int:
        """The least number that nobody can have had, as far as this coordinator knows."""
        return max(self.incarnation, self.store.floor, self._known) + 1

    def is_outdated(self, event: ev.IncarnationTaken) -> bool:
        """Whether the store gave a number that is not above one that some node has reported since it was asked."""
        return not event.problem and event.number <= max(self.incarnation, self._known)

    def number_of(self, event: ev.IncarnationTaken) -> int:
        """The number to continue with: the store's, or the clock's where the store is silent."""
        return max(event.number, self.next_number if event.problem else self.incarnation + 1)

    @property
    def incomplete(self) -> str:
        """Why this session can do nothing that takes all its ranks, empty when it can."""
        return self.spoiled or (f"rank {few(sorted(self.departed))} left the job" if self.departed else "")

    def opened(self, event: ev.IncarnationTaken, now: float) -> list[Action]:
        """The number is there: the session is the job now."""
        session = self.taking
        waiting = self._waiting[session]
        if all(node in self.links.down for node in waiting.roster.nodes):  # they ended meanwhile, or seem to
            return self._open_waiting(now) if self._waiting.move(session, AdmissionOn.LOST) else []
        if event.hopeless:
            text = f"store {self._job.store!r} cannot be used: {event.problem}"
            return self._turn_away(session, ("config", text, event.hint), now)
        if not self._waiting.move(session, AdmissionOn.OPENED):
            return []
        self.session, self.cadence, self.store.asked = session, waiting.cadence, waiting.store_id
        self.incarnation, self.run = self.number_of(event), event.run
        self.store.id = event.store_id
        self.departed = {}
        waiting.place(now)
        self.placement, self._placed, self.epoch = waiting.placement, session, self.incarnation
        inside = self.placement.nodes if self.placement is not None else frozenset[str]()
        self._former |= waiting.former.outside
        self.earlier = waiting.former.earlier
        self.visitors = (waiting.former.reported | self.visitors) - self.links.down - inside
        outside = (waiting.former.outside.keys() | self.visitors) & self._former.keys() - inside  # some may come back
        self._outside = of_peers([self._former[name] for name in sorted(outside)])
        self.members, self._roster = Members(waiting.ranks), waiting.roster
        self.world_size = waiting.roster.world_size
        note = f"the store did not give an incarnation number ({event.problem}); went on with {self.incarnation}"
        less = less_than_asked(self.placement.topology, self.placement.sets) if self.placement is not None else ()
        warnings = (*event.warnings, *((note,) if event.problem else ()), *less)
        nodes = [*sorted(self.members.nodes), *sorted(self.visitors - self.members.nodes)]
        welcomes = [self._welcome(node, tuple(sorted(self.members.at(node))), warnings) for node in nodes]
        return [*self._library(self.topology, self._outside), *welcomes, *self._open_waiting(now)]

    def _library(self, *topologies: Topology | None) -> list[Action]:
        """This node has the topologies that others ask it for."""
        known = [one for one in topologies if one is not None]
        reports = (ev.TopologyReported(job=self._job, node=self._node, packed=one.packed) for one in known)
        return [self._to(self._node, report) for report in reports]

    @property
    def taking(self) -> str:
        """The session for which an incarnation number is on its way, empty for none."""
        return self._waiting.taking

    def next_deadline(self) -> float | None:
        """When somebody has waited long enough; which session gets the number on its way is settled first."""
        return None if self.taking else self._patience.next_deadline(self._waiting)

    def tick(self, now: float) -> list[Action]:
        """Refuses sessions that have waited too long; admits those that need not wait any more."""
        notices = [] if self.taking else self._patience.notify(self._waiting, now)
        return [*self._open_waiting(now), *notices]

    def _welcome(
        self, node: str, ranks: tuple[int, ...], warnings: tuple[str, ...] = (), *, has: bytes = b""
    ) -> ToNode:
        """has: the topology that the node has already."""
        placement = self.placement
        known = placement is None or has == placement.topology.digest
        order = ev.SessionOpened(
            job=self._job,
            node=self._node,
            session=self.session,
            incarnation=self.incarnation,
            run=self.run,
            store_id=self.store.id,
            ranks=ranks,
            known=self._progress(),
            warnings=warnings,
            place=None if known or placement is None else placement.place(node),
            epoch=self.epoch,
            outside=self._outside.digest if self._outside is not None else b"",
            former=self.earlier.digests,
        )
        return self._to(node, order)

    def _to(self, node: str, message: ev.Message) -> ToNode:
        return ToNode(job=self._job, node=node, message=message)

    def _refusal(self, session: str, ranks: tuple[int, ...], code: str, message: str, hint: str = "") -> ToNode:
        order = ev.SessionRefused(
            job=self._job, node=self._node, session=session, ranks=ranks, code=code, message=message, hint=hint
        )
        return ToNode(job=self._job, message=order)
