"""Which session is the job: the door at the coordinator. Pure.

A session is one set of ranks started together. A new one may enter when no rank of another lives (or by takeover), and
gets the next incarnation number. A rank of the present session that comes back to a restarted daemon enters at once.
"""

from dataclasses import dataclass, field

from ckptd.core import events as ev
from ckptd.core.actions import Action, TakeIncarnation, ToNode
from ckptd.core.policy import Policy
from ckptd.protocol.ids import JobKey
from ckptd.protocol.messages import Cadence


@dataclass(slots=True)
class Waiting:
    """Ranks of a session that stand before the door."""

    since: float
    cadence: Cadence
    takeover: bool = False
    ranks: dict[int, tuple[str, int]] = field(default_factory=dict)  # rank -> (node, world size)


class Sessions:
    """The door. ``incarnation`` is the largest number this coordinator knows of."""

    def __init__(self, job: JobKey, node: str, policy: Policy) -> None:
        self._job = job
        self._node = node
        self._policy = policy
        self.session = ""
        self.incarnation = 0
        self.world_size = 0
        self.cadence = Cadence()
        self.members: dict[int, str] = {}
        self.departed: set[int] = set()  # members that left or died; nothing more comes from them
        self._dead: set[tuple[int, str]] = set()
        self.floor = 0  # the largest number seen on the store
        self.confirmed = True  # the store gave the present number, so nobody else has it
        self.spoiled = ""  # why the session will not be complete: a rank of it was refused
        self._live: dict[tuple[int, str], ev.RankFound] = {}
        self._waiting: dict[str, Waiting] = {}
        self._taking = ""

    def found(self, event: ev.RankFound) -> None:
        """A live process of some session."""
        self._live[event.rank, event.session] = event

    def gone(self, rank: int, session: str, now: float) -> list[Action]:
        """The process ended; perhaps somebody waits for that."""
        self._live.pop((rank, session), None)
        if not self.session:
            self._dead.add((rank, session))  # before anybody said which session is the job
        if session == self.session and self.members.pop(rank, None) is not None:
            self.departed.add(rank)
        waiting = self._waiting.get(session)
        if waiting is not None:
            waiting.ranks.pop(rank, None)
            if not waiting.ranks and session != self._taking:
                del self._waiting[session]
        return self._open_waiting(now)

    def attach(self, node: str, event: ev.RankAttached, now: float) -> list[Action]:
        """A rank stands before the door."""
        problem = self._misfit(event)
        if problem:
            if event.session == self.session:
                self.spoiled = f"rank {event.rank} was refused: {problem[1]}"
            return [self._refusal(event.session, (event.rank,), *problem)]
        if event.session == self.session and not event.incarnation and not self.members and self.departed:
            self.session = ""  # all of it ended: who comes under the same name now is a new life
        if event.session == self.session or event.incarnation > 0:
            if event.session != self.session:
                self.members = {}
                self.departed = {rank for rank, session in self._dead if session == event.session}
            self.session, self.world_size, self.cadence = event.session, event.world_size, event.cadence
            self.incarnation = max(self.incarnation, event.incarnation)
            self.members[event.rank] = node
            self.departed.discard(event.rank)
            self.spoiled = ""
            return [self._welcome(node, (event.rank,))]
        waiting = self._waiting.setdefault(event.session, Waiting(now, event.cadence))
        waiting.takeover |= event.takeover
        waiting.ranks[event.rank] = (node, event.world_size)
        return self._open_waiting(now)

    def _misfit(self, event: ev.RankAttached) -> tuple[str, str, str] | None:
        replaced = event.incarnation < self.incarnation
        if self.session and event.session != self.session:
            replaced = event.incarnation <= self.incarnation
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

    def _others(self, session: str) -> list[ev.RankFound]:
        return [found for (_, other), found in self._live.items() if other != session]

    def _open_waiting(self, now: float) -> list[Action]:
        if self._taking:
            return []
        for session, waiting in self._waiting.items():
            if waiting.takeover or not self._others(session):
                self._taking = session
                return [TakeIncarnation(job=self._job, at_least=self.next_number)]
        return self._refuse_late(now)

    def _refuse_late(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for session, waiting in list(self._waiting.items()):
            if now - waiting.since < self._policy.connect_timeout_s:
                continue
            del self._waiting[session]
            alive = ", ".join(f"rank {f.rank} (pid {f.pid} on {f.host})" for f in self._others(session))
            text = f"job {self._job.job!r} is still running: {alive}"
            hint = "end those processes, use another job name, or connect(..., takeover=True) to replace them"
            actions.append(self._refusal(session, tuple(waiting.ranks), "connect", text, hint))
        return actions

    @property
    def wanted(self) -> bool:
        """Whether anybody may still need the job's memory: a member, one at the door, a process that may come back."""
        return bool(self.members or self._waiting or self._live)

    @property
    def next_number(self) -> int:
        """The least number that nobody can have had, as far as this coordinator knows."""
        return max(self.incarnation, self.floor) + 1

    def number_of(self, event: ev.IncarnationTaken) -> int:
        """The number to go on with: the store's, or one that is new as far as this coordinator knows."""
        return self.next_number if event.problem else max(event.number, self.incarnation + 1)

    @property
    def incomplete(self) -> str:
        """Why this session can do nothing that takes all its ranks, empty when it can."""
        gone = ", ".join(map(str, sorted(self.departed)))
        return self.spoiled or (f"rank {gone} left the job" if gone else "")

    @property
    def taking(self) -> bool:
        """Whether an incarnation number is on its way for the door."""
        return bool(self._taking)

    def opened(self, event: ev.IncarnationTaken, now: float) -> list[Action]:
        """The number is there: the session is the job now."""
        session, self._taking = self._taking, ""
        waiting = self._waiting.pop(session)
        if not waiting.ranks:  # they ended meanwhile
            return self._open_waiting(now)
        if event.hopeless:
            text = f"store {self._job.store!r} cannot be used: {event.problem}"
            return [self._refusal(session, tuple(waiting.ranks), "config", text, event.hint), *self._open_waiting(now)]
        self.session, self.cadence = session, waiting.cadence
        self.incarnation = self.number_of(event)
        self.confirmed = not event.problem
        self.departed = set()
        self.members = {rank: node for rank, (node, _) in waiting.ranks.items()}
        self.world_size = next(size for _, size in waiting.ranks.values())
        note = f"the store did not give an incarnation number ({event.problem}); went on with {self.incarnation}"
        warnings = (note,) if event.problem else ()
        nodes = sorted(set(self.members.values()))
        ranks = {node: tuple(r for r, n in self.members.items() if n == node) for node in nodes}
        return [*(self._welcome(node, ranks[node], warnings) for node in nodes), *self._open_waiting(now)]

    def next_deadline(self) -> float | None:
        """When somebody has waited long enough."""
        if self._taking:
            return None  # who gets the number is settled first
        return min((w.since + self._policy.connect_timeout_s for w in self._waiting.values()), default=None)

    def tick(self, now: float) -> list[Action]:
        """Refuses who has waited too long."""
        return [] if self._taking else self._refuse_late(now)

    def _welcome(self, node: str, ranks: tuple[int, ...], warnings: tuple[str, ...] = ()) -> ToNode:
        order = ev.SessionOpened(
            job=self._job,
            node=self._node,
            session=self.session,
            incarnation=self.incarnation,
            ranks=ranks,
            warnings=warnings,
        )
        return ToNode(job=self._job, node=node, message=order)

    def _refusal(self, session: str, ranks: tuple[int, ...], code: str, message: str, hint: str = "") -> ToNode:
        order = ev.SessionRefused(
            job=self._job, node=self._node, session=session, ranks=ranks, code=code, message=message, hint=hint
        )
        return ToNode(job=self._job, message=order)
