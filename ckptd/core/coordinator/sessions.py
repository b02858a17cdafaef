"""Which session is the job: admission at the coordinator. Pure.

A session is one set of ranks started together. A new one may enter when no rank of another lives (or by takeover), and
gets the next incarnation number. A rank of the present session that comes back to a restarted daemon enters at once.
"""

from collections.abc import Callable, Iterable

from msgspec.structs import replace

from ckptd.core import events as ev
from ckptd.core.actions import Action, Claim, MeetPeers, ScanStore, TakeIncarnation, ToNode
from ckptd.core.coordinator.departures import Departure, How
from ckptd.core.coordinator.processes import Processes
from ckptd.core.coordinator.protection_view import less_than_asked
from ckptd.core.coordinator.wait_reasons import Reason, Waiting, late_at, speaker, still_running, unheard
from ckptd.core.links import Links
from ckptd.core.policy import Policy
from ckptd.shared.base.ids import ANY_STORE, NO_RUN, JobKey, RunId
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
        self.store_id = ""  # of the store that the session is saved to; empty: it has not answered yet
        self.asked_store = ""  # that the session asks for, or says that it is saved to
        self.remembered: set[str] = set()  # ids of stores that arenas have for the job
        self.world_size = 0
        self.cadence = Cadence()
        self.members: dict[int, str] = {}
        self.topology: Topology | None = None
        self.epoch = 0  # the incarnation in which this topology began
        self._epochs: dict[str, int] = {}  # by session, as its nodes have reported
        self.visitors: set[str] = set()  # nodes outside of it that may hold something of the job
        self.links = links or Links(node)
        self.processes = Processes(self.links)
        self.departed: dict[int, Departure] = {}  # members that left or died; nothing more comes from them
        self._dead: set[tuple[int, str]] = set()
        self._floor = 0  # the largest number seen on the store
        self._known = known  # the largest that some node had, this one or another
        self.spoiled = ""  # why the session will not be complete: a rank of it was refused
        self.heard_of: set[str] = {node}  # nodes where ranks waited to join
        self._waiting: dict[str, Waiting] = {}
        self._former: dict[str, Peer] = {}  # nodes that the job ran on before
        self.taking = ""  # the session for which an incarnation number is on its way, empty for none
        self._progress = progress  # what became of the saves of this incarnation
        self._took: dict[str, None] = {}  # sessions for which numbers were asked here, the last ones

    def kept(self, event: ev.TopologyKept) -> None:
        """What an earlier process of this coordinator knew."""
        self.topology, self.epoch = event.topology, event.epoch
        self.incarnation = max(self.incarnation, event.epoch)
        self._former |= {peer.node: peer for peer in event.outside}
        self.visitors |= {peer.node for peer in event.outside}

    def remember(self, event: ev.StoreRemembered | ev.JoinRequested | ev.FormerNodeReported) -> list[Action]:
        """An arena has the store to which the job was saved, if it has one."""
        self.remembered |= {event.store_id} - {""}
        return []

    def found(self, node: str, event: ev.RankFound) -> list[Action]:
        """A live process of some session: nothing to do."""
        self.processes.found(node, event)
        return []

    @property
    def unreachable(self) -> set[str]:
        """Nodes that do not answer."""
        return self.links.down

    def is_stale(self, event: ev.Event) -> bool:
        """Whether it is a rank's word of another session than the present one: it counts for nothing."""
        return isinstance(event, ev.FromRank) and bool(event.session) and event.session != self.session

    def join_requested(self, event: ev.JoinRequested, now: float) -> list[Action]:
        """A session waiting to join leaves these nodes, if it is let in: they are met."""
        self._known = max(self._known, event.incarnation)
        self.remember(event)
        if not event.outside:
            return []
        waiting = self._waiting.setdefault(event.session, Waiting(now, Cadence()))
        waiting.outside |= {peer.node for peer in event.outside}
        self._former |= {peer.node: peer for peer in event.outside}
        return [MeetPeers(job=self._job, peers=event.outside)]

    def former_node_reported(self, node: str, event: ev.FormerNodeReported, now: float) -> list[Action]:
        """A node that the session leaves has reported the ranks that live there."""
        self._known = max(self._known, event.incarnation)
        self.remember(event)
        self.processes.confirm(node)
        waiting = self._waiting.get(event.session)
        if waiting is None:
            return []
        waiting.outside.add(node)
        waiting.former_node_reported.add(node)
        return self._open_waiting(now)

    def lives(self, node: str, live: Iterable[tuple[int, str]]) -> list[int]:
        """Members of this session that are not among those that live at their node."""
        self.processes.confirm(node)
        here = set(live)
        return [rank for rank, home in self.members.items() if home == node and (rank, self.session) not in here]

    def peer_down(self, now: float) -> list[Action]:
        """Nobody waits for ranks of a node that does not answer: what they still do is of an old incarnation."""
        return self._open_waiting(now)

    def retire(self, incarnation: int) -> None:
        """Another node coordinates the job now, in this incarnation; what waits to join here waits on."""
        self.incarnation = max(self.incarnation, incarnation)
        self.session, self.members, self.departed, self.visitors = "", {}, {}, set()
        self.topology, self.epoch = None, 0

    def gone(self, rank: int, session: str, now: float, how: How) -> list[Action]:
        """The process ended; perhaps somebody waits for that."""
        pid = self.processes.ended(rank, session)
        if not self.session:
            self._dead.add((rank, session))  # before anybody said which session is the job
        if session == self.session and self.members.pop(rank, None) is not None:
            self.departed[rank] = Departure(rank, how, pid)
        waiting = self._waiting.get(session)
        if waiting is not None:
            waiting.ranks.pop(rank, None)
            if not waiting.ranks and session != self.taking:
                del self._waiting[session]
        return self._open_waiting(now)

    def attach(self, node: str, event: ev.RankAttached, now: float, loaded: int = 0) -> list[Action]:
        """A rank waits to join. loaded: the incarnation that this session began with a load, if it did."""
        self.heard_of.add(node)
        self.processes.confirm(node)  # it names all live ranks before each join request
        problem = self._misfit(event, loaded)
        if problem:
            if event.session == self.session:
                self.spoiled = f"rank {event.rank} was refused: {problem[1]}"
            return [self._refusal(event.session, (event.rank,), *problem)]
        if event.session == self.session and not event.incarnation and not self.members and self.departed:
            self.session = ""  # all of it ended: a session of the same name is a new one now
        if event.session == self.session or event.incarnation > 0:
            if event.session != self.session:
                self.members, self.asked_store = {}, ""
                self.store_id = "" if self.session else self.store_id  # that which was found before anybody came
                self.departed = {r: Departure(r) for r, session in self._dead if session == event.session}
            if event.session != self.session or self.topology is None:
                kept = self.epoch if event.topology == self.topology else 0
                self.epoch = self._epochs.get(event.session, kept) or event.incarnation
                self.topology = event.topology
            self.session, self.world_size, self.cadence = event.session, event.world_size, event.cadence
            self.heard_number(event.incarnation, event.run, event.session)
            self._hear_of_store(event.store_id)
            self.members[event.rank] = node
            self.departed.pop(event.rank, None)
            self.spoiled = ""
            return [self._welcome(node, (event.rank,))]
        waiting = self._waiting.setdefault(event.session, Waiting(now, event.cadence))
        waiting.takeover |= event.takeover
        waiting.store_id = waiting.store_id or event.store_id
        waiting.cadence, waiting.topology = event.cadence, event.topology
        waiting.ranks[event.rank] = (node, event.world_size)
        waiting.nodes.add(node)
        return self._open_waiting(now)

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

    def _misfit(self, event: ev.RankAttached, loaded: int) -> tuple[str, str, str] | None:
        ours = event.session == self.session
        missed = ours and loaded == self.incarnation  # the end of that load, when its daemon ended
        replaced = event.incarnation < self.incarnation and not missed
        if self.session and not ours:
            replaced = event.incarnation <= self.incarnation
        if event.incarnation == self.incarnation and self.run not in (event.run, NO_RUN):
            return ("stale", f"incarnation {event.incarnation} belongs to another run of the job", "")
        if event.incarnation and replaced:
            return ("stale", f"incarnation {event.incarnation} was replaced by {self.incarnation}", "")
        if event.rank >= event.world_size:
            return ("usage", f"rank {event.rank} does not exist in a job of {event.world_size} ranks", "")
        world = self.world_size if event.session == self.session else event.world_size
        if event.session in self._waiting:
            world = next((size for _, size in self._waiting[event.session].ranks.values()), world)
        if event.world_size != world:
            text = f"rank {event.rank} says the job has {event.world_size} ranks, others say {world}"
            return ("usage", text, "start all ranks with the same world size")
        return None

    def _open_waiting(self, now: float) -> list[Action]:
        if self.taking:
            return []
        for session, waiting in self._waiting.items():
            heard = waiting.ranks and waiting.heard(now, self._policy.outside_wait_s)
            if heard and (waiting.takeover or not self.processes.others(session)):
                self.taking = session
                return [self.take(session)]
        return self._refuse_late(now)

    def take(self, session: str) -> TakeIncarnation:
        """Asks for the next number, for a session that waits to join or the one that is in."""
        waiting = self._waiting.get(session)
        self._took.pop(session, None)
        self._took[session] = None
        while len(self._took) > MAX_VOID:
            self._took.pop(next(iter(self._took)))
        return TakeIncarnation(
            job=self._job,
            at_least=self.next_number,
            session=session,
            remembered=tuple(sorted(self.remembered)),
            wanted=waiting.store_id if waiting is not None else self.wanted_store,
        )

    @property
    def void(self) -> tuple[str, ...]:
        """Sessions that were the job here, or wanted to be, and are over: whatever number the store gives them late."""
        return tuple(sorted(self._took.keys() - {self.session, self.taking}))

    @property
    def wanted_store(self) -> str:
        """The one store that the session may be saved to; empty: none in particular yet."""
        return self.store_id or self.asked_store

    def _hear_of_store(self, store_id: str) -> None:
        """A rank that came back says to which its session is saved: it knows, and not all do."""
        if store_id not in ("", ANY_STORE, self.store_id):
            self.store_id, self.asked_store = "", store_id
        self.asked_store = self.asked_store or store_id

    def takes(self, store_id: str) -> bool:
        """Whether the session may be saved to this store."""
        return self.wanted_store in ("", ANY_STORE, store_id)

    def took_store(self, seen: ev.StoreScanned) -> ev.StoreScanned:
        """The session is saved to the store that answered, if it may be; else its ``problem`` says why not."""
        here, there, problem = seen.store_id, self._job.store, ""
        if self.takes(here):
            self.store_id = here
        else:
            problem = f"another store lies at {there} than the job is saved to: {here}, not {self.wanted_store}"
        return replace(seen, problem=problem, former=tuple(sorted(self.remembered - {here})))

    def saw_on_store(self, incarnations: Iterable[int]) -> None:
        """Saves of these lie there."""
        self._floor = max([self._floor, *incarnations])

    def scan(self, claim: Claim | None) -> ScanStore:
        """Asks what lies on the store, after the claim is on record.

        A session that has seen none yet is saved to one that is remembered, if any is, and to no other.
        """
        return ScanStore(
            job=self._job,
            remembered=tuple(sorted(self.remembered)),
            wanted=self.wanted_store,
            make=bool(self.session),
            claim=claim,
        )

    def _refuse_late(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for session, waiting in list(self._waiting.items()):
            if now - waiting.since < self._policy.connect_timeout_s:
                continue
            del self._waiting[session]
            if not waiting.ranks:
                continue
            actions.append(self._refusal(session, tuple(waiting.ranks), "connect", *self._why(session, waiting)))
        return actions

    def _why(self, session: str, waiting: Waiting) -> Reason:
        """Why the session is not let in."""
        if others := self.processes.others(session):
            return still_running(self._job.job, others)
        return unheard(self._node, waiting.topology, {node for node, _ in waiting.ranks.values()})

    def _unnotified(self) -> dict[str, float]:
        """Sessions waiting to join that have not been notified for whom they wait, and when that is due."""
        waiting = [(session, waits) for session, waits in self._waiting.items() if waits.ranks and not waits.notified]
        return {name: late_at(waits.since, running=bool(self.processes.others(name))) for name, waits in waiting}

    def _notify(self, now: float) -> list[Action]:
        """Sends waiting sessions the ranks that they wait for, once, before they are refused: a user can act."""
        actions: list[Action] = []
        if self.taking:
            return []
        for session in [name for name, due in self._unnotified().items() if now >= due]:
            waiting = self._waiting[session]
            waiting.notified = True
            (rank, node), (text, hint) = speaker(waiting.ranks), self._why(session, waiting)
            order = ev.SessionWaits(job=self._job, node=self._node, session=session, rank=rank, message=text, hint=hint)
            actions.append(ToNode(job=self._job, node=node, message=order))
        return actions

    @property
    def nodes(self) -> set[str]:
        """All nodes that have, or may have, something of the job."""
        inside = set(self.topology.nodes) if self.topology is not None else set()
        return {self._node} | inside | self.visitors

    @property
    def present(self) -> dict[int, str]:
        """Members whose nodes answer: the others may be long gone with theirs."""
        return {rank: node for rank, node in self.members.items() if node not in self.unreachable}

    @property
    def attended(self) -> bool:
        """Whether any member's node answers."""
        return any(node not in self.links.down for node in self.members.values())

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
        return max(self.incarnation, self._floor, self._known) + 1

    def is_outdated(self, event: ev.IncarnationTaken) -> bool:
        """Whether the store gave a number that is not above one that some node has reported since it was asked."""
        return not event.problem and event.number <= max(self.incarnation, self._known)

    def number_of(self, event: ev.IncarnationTaken) -> int:
        """The number to continue with: the store's, or the clock's where the store is silent."""
        return max(event.number, self.next_number if event.problem else self.incarnation + 1)

    @property
    def incomplete(self) -> str:
        """Why this session can do nothing that takes all its ranks, empty when it can."""
        gone = ", ".join(map(str, sorted(self.departed)))
        return self.spoiled or (f"rank {gone} left the job" if gone else "")

    def opened(self, event: ev.IncarnationTaken, now: float) -> list[Action]:
        """The number is there: the session is the job now."""
        session, self.taking = self.taking, ""
        waiting = self._waiting.pop(session)
        if all(node in self.unreachable for node, _ in waiting.ranks.values()):  # they ended meanwhile, or seem to
            return self._open_waiting(now)
        if event.hopeless:
            text = f"store {self._job.store!r} cannot be used: {event.problem}"
            return [self._refusal(session, tuple(waiting.ranks), "config", text, event.hint), *self._open_waiting(now)]
        self.session, self.cadence, self.asked_store = session, waiting.cadence, waiting.store_id
        self.incarnation, self.run = self.number_of(event), event.run
        self.store_id = event.store_id
        self.departed = {}
        self.topology, self.epoch = waiting.topology, self.incarnation
        inside = set(waiting.topology.nodes) if waiting.topology is not None else set()
        self.visitors = (waiting.former_node_reported | self.visitors) - self.unreachable - inside
        self.members = {rank: node for rank, (node, _) in waiting.ranks.items()}
        self.world_size = next(size for _, size in waiting.ranks.values())
        note = f"the store did not give an incarnation number ({event.problem}); went on with {self.incarnation}"
        less = less_than_asked(waiting.topology) if waiting.topology is not None else ()
        warnings = (*event.warnings, *((note,) if event.problem else ()), *less)
        nodes = sorted(set(self.members.values()))
        ranks = {node: tuple(r for r, n in self.members.items() if n == node) for node in nodes}
        for node in sorted(self.visitors):
            ranks.setdefault(node, ())
        return [
            *(self._welcome(node, admitted, warnings) for node, admitted in ranks.items()),
            *self._open_waiting(now),
        ]

    def next_deadline(self) -> float | None:
        """When somebody has waited long enough."""
        if self.taking:
            return None  # which session gets the number is settled first
        times = [w.since + self._policy.connect_timeout_s for w in self._waiting.values()]
        times += self._unnotified().values()
        times += [
            w.since + self._policy.outside_wait_s
            for w in self._waiting.values()
            if w.outside - w.former_node_reported and not w.late
        ]
        return min(times, default=None)

    def tick(self, now: float) -> list[Action]:
        """Refuses sessions that have waited too long; admits those that need not wait any more."""
        if self.taking:
            return []
        for waiting in self._waiting.values():
            waiting.late = waiting.late or now - waiting.since >= self._policy.outside_wait_s
        return [*self._open_waiting(now), *self._notify(now)]

    def _welcome(self, node: str, ranks: tuple[int, ...], warnings: tuple[str, ...] = ()) -> ToNode:
        order = ev.SessionOpened(
            job=self._job,
            node=self._node,
            session=self.session,
            incarnation=self.incarnation,
            run=self.run,
            store_id=self.store_id,
            ranks=ranks,
            known=self._progress(),
            warnings=warnings,
            topology=self.topology,
            epoch=self.epoch,
            outside=tuple(self._former[name] for name in sorted(self.visitors & set(self._former))),
        )
        return ToNode(job=self._job, node=node, message=order)

    def _refusal(self, session: str, ranks: tuple[int, ...], code: str, message: str, hint: str = "") -> ToNode:
        order = ev.SessionRefused(
            job=self._job, node=self._node, session=session, ranks=ranks, code=code, message=message, hint=hint
        )
        return ToNode(job=self._job, message=order)
