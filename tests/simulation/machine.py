"""A node: its arena, and the daemon that runs over it now, if one does. ``say`` is the daemon's loop."""

from collections import deque
from typing import TYPE_CHECKING, Any

from ckptd.core import actions as act
from ckptd.core import events as ev
from ckptd.core.jobs import Catalogue
from ckptd.shared.base.ids import JobKey, incarnation_at
from ckptd.shared.format.slot import SlotState
from ckptd.shared.protocol.topology import Peer, Rendezvous, Topology
from tests.simulation.arena import Arena

if TYPE_CHECKING:
    from tests.simulation.world import World

BEGAN = 1_800_000_000.0  # the time of day when a world begins, in seconds since 1970
_EPSILON_S = 1e-4  # a clock read a little late, so that rounding never leaves a deadline just ahead


def make(kind: type[Any], **values: Any) -> Any:
    """The event with as many of the values as it has fields for: the simulator tells all it knows."""
    return kind(**{name: value for name, value in values.items() if name in _fields(kind)})


_FIELDS: dict[type[Any], frozenset[str]] = {}


def _fields(kind: type[Any]) -> frozenset[str]:
    if kind not in _FIELDS:
        _FIELDS[kind] = frozenset(kind.__struct_fields__)
    return _FIELDS[kind]


class Machine:
    """One node. A lost one is another object, with another arena, even if it has the name of the old one."""

    def __init__(self, world: "World", name: str, domain: str, ident: str) -> None:
        self.world = world
        self.name = name
        self.arena = Arena(name, ident, world.promises)
        key = (name + ident).ljust(40, "k")[:40]
        self.peer = Peer(name, ident, f"tcp://{name}:1", key, domain)
        self.catalogue: Catalogue | None = None
        self.life = 0
        self.frozen = False
        self.lost = False
        self.known: dict[JobKey, dict[str, str]] = {}  # whom this life accepts: name -> arena
        self.expected: dict[tuple[JobKey, str], bytes] = {}  # job, session -> ticket of daemons that it accepts
        self.shown: dict[tuple[JobKey, str], Rendezvous] = {}  # job, session -> to whom it shows a ticket
        self.seen: dict[tuple[str, JobKey], int] = {}  # the other daemon's life when it was last tied to this one
        self.watched: set[tuple[JobKey, int, str]] = set()  # live ranks that this life has seen
        self.offset = float(world.clock.random.randrange(1, 1 << 20))  # every node's clock began at another time
        self._queue: deque[ev.Event] = deque()
        self._deferred: list[ev.Event] = []
        self._busy = False
        self._wake_at: float | None = None

    # --- life

    @property
    def up(self) -> bool:
        """Whether a daemon runs and answers."""
        return self.catalogue is not None and not self.frozen

    def start(self) -> None:
        """A daemon starts and takes over what lies here, as ckptd.daemon.loop._adopt does."""
        if self.catalogue is not None or self.lost:
            return
        self.life = next(self.world.lives)
        self.catalogue = Catalogue(self.name, self.world.policy)
        self.known, self.watched, self.seen, self.expected, self.shown = {}, set(), {}, {}, {}
        self._begun()
        self.world.log(self, "daemon starts, life", self.life)
        for memory in self.arena.jobs.values():
            memory.pulled.clear()  # nobody finds what an earlier daemon pulled
        life = self.life
        for job, number in sorted(self.arena.numbers.items()):
            if number >= incarnation_at(BEGAN + self.world.clock.now):
                self.say(ev.NumberKept(job=job, number=number))
        for job in sorted(self.arena.jobs):
            memory = self.arena.jobs[job]
            if not memory.slots and not memory.chunks:
                continue  # a job is found by its files
            self._adopt(job)
            if self.life != life or self.catalogue is None:
                return

    def _begun(self) -> None:
        """A daemon process is there, and has done nothing yet."""

    def _adopt(self, job: JobKey) -> None:
        memory = self.arena.jobs[job]
        if memory.kept is not None:
            self.say(memory.kept)
        for slot in sorted(memory.slots.values(), key=lambda s: s.name):
            digested = slot.seal.state is SlotState.DIGESTED
            self.say(
                make(
                    ev.SlotAdopted,
                    job=job,
                    rank=slot.rank,
                    slot=slot.name,
                    capacity=slot.capacity,
                    world_size=slot.seal.world_size,
                    save=slot.save,
                    nbytes=slot.seal.image_nbytes,
                    digested=digested,
                    seal=slot.seal if digested else None,
                    attestations=slot.seal.attestations,
                )
            )
        if job in self.arena.stores:
            self.say(ev.StoreRemembered(job=job, store_id=self.arena.stores[job]))
        for key in sorted(memory.chunks):
            self.say(make(ev.ChunkAdopted, job=job, chunk=memory.chunks[key]))
        for (rank, session), proc in list(memory.rank_files.items()):
            if proc.alive:
                self.found(job, rank, session)
            else:
                del memory.rank_files[rank, session]
                self.say(make(ev.RankGone, job=job, rank=rank, session=session))
        if self.catalogue is not None:
            self.all_of(self.catalogue.adopted(job, self.now))
            self._turn()

    def found(self, job: JobKey, rank: int, session: str) -> None:
        """A live rank's file was seen, once in a daemon's life."""
        if (job, rank, session) not in self.watched:
            self.watched.add((job, rank, session))
            self.say(make(ev.RankFound, job=job, rank=rank, session=session, pid=1, host=self.name))

    def kill(self) -> None:
        """SIGKILL to the daemon: of what is under way, each has happened or has not."""
        if self.catalogue is None:
            return
        self.world.log(self, "daemon killed")
        self.world.journals.died(self)
        self.catalogue = None
        self.frozen = False
        self._queue.clear()
        self._deferred.clear()
        self._wake_at = None
        self.world.effects.cut(self)
        self.world.network.died(self.name)
        for job in list(self.arena.jobs):
            for proc in list(self.arena.jobs[job].rank_files.values()):
                proc.daemon_lost()

    def freeze(self, seconds: float) -> None:
        """The machine stands still; its links go silent. Then it goes on as if nothing had been."""
        if self.frozen or self.catalogue is None:
            return
        self.world.log(self, "frozen for", seconds)
        self.frozen = True
        self.world.clock.after(seconds, self._thaw, self.life)

    def _thaw(self, life: int) -> None:
        if self.life != life or not self.frozen:
            return
        self.frozen = False
        self.world.log(self, "goes on")
        deferred, self._deferred = self._deferred, []
        for event in deferred:
            self.say(event)
        if not deferred:
            self._wake(self.world.clock.now, life)
        for link in self.world.network.links_of(self.name):
            self.world.network.consider(link)

    def wipe(self) -> None:
        """The node is lost: daemon, ranks and memory."""
        self.world.log(self, "node lost")
        self.kill()
        self.lost = True
        for job in list(self.arena.jobs):
            for proc in list(self.arena.jobs[job].rank_files.values()):
                proc.die(told=False)
        self.world.promises.wiped(self)
        self.arena.jobs.clear()

    # --- the loop

    @property
    def now(self) -> float:
        """What this node's clock says."""
        return self.world.clock.now + self.offset + _EPSILON_S

    def say(self, event: ev.Event) -> None:
        """Something happened here. Events that its actions cause wait for their turn."""
        if self.catalogue is None:
            return
        if self.frozen:
            self._deferred.append(event)
            return
        self._queue.append(event)
        if not self._busy:
            self._turn()

    def _turn(self) -> None:
        """All that waits, then what is due: a core that waits for more than it says is found out."""
        if self._busy:
            return
        life, due, ticked = self.life, None, False
        self._busy = True
        try:
            while self.catalogue is not None and self.life == life:
                if self._queue:
                    event = self._queue.popleft()
                    self.world.saw(self, event)
                    self.all_of(self.catalogue.handle(event, self.now))
                    ticked = False
                    continue
                due = self.catalogue.next_deadline()
                if due is None or due > self.now:
                    break
                assert not ticked, f"{self.name}: the loop would spin: due {due}, now {self.now}"
                self.all_of(self.catalogue.tick(self.now))
                ticked = True
        finally:
            self._busy = False
        if self.catalogue is None or self.life != life:
            return
        if self.world.thorough or self.world.events % 16 == 0:
            self.catalogue.check()
        if due is not None:
            when = due - self.offset
            if self._wake_at is None or when < self._wake_at:
                self._wake_at = when
                self.world.clock.at(when, self._wake, when, life)

    def _wake(self, when: float, life: int) -> None:
        if self.life != life or self.catalogue is None:
            return
        if self._wake_at is not None and when >= self._wake_at:
            self._wake_at = None
        if not self.frozen:
            self._turn()

    def all_of(self, actions: list[act.Action]) -> None:
        """Each of the actions, as long as this life lasts."""
        life = self.life
        for action in actions:
            if self.catalogue is None or self.life != life:
                return
            self.perform(action)

    def perform(self, action: act.Action) -> None:
        """One action of the core."""
        self.world.did(self, action)
        match action:
            case act.ToRank():
                self._to_rank(action)
            case act.ToNode():
                assert action.node is not None, f"{self.name}: {type(action.message).__name__} is addressed to nobody"
                self._to_node(action, action.node)
            case act.MeetPeers():
                self.meet(action.job, action.peers)
            case act.Meet():
                self.meet_at(action)
            case act.EndMeeting():
                self.expected.pop((action.job, action.session), None)
                self.shown.pop((action.job, action.session), None)
            case act.KeepLinks():
                self.keep_links(action)
            case act.Note():
                self.world.notes += 1
            case act.KeepEntry():
                self.world.journals.kept(self, action)
            case _:
                self.world.effects.perform(self, action)

    def _to_rank(self, action: act.ToRank) -> None:
        self.world.to_rank(self, action)

    def _to_node(self, action: act.ToNode, node: str) -> None:
        self.world.network.send(self.name, node, action.message)

    # --- peers

    def meet(self, job: JobKey, peers: tuple[Peer, ...]) -> None:
        """Accept these daemons, and talk to them."""
        known = self.known.setdefault(job, {})
        fresh = {peer.node: peer.arena for peer in peers if known.get(peer.node) != peer.arena}
        known |= fresh
        self.world.network.met(self.name, list(fresh))

    def keep(self, job: JobKey, topology: Topology, outside: tuple[Peer, ...]) -> None:
        """The daemons of the job's session: ranks or a coordinator named them before."""
        self.meet(job, topology.peers if self.world.keeping_is_meeting else ())

    def meet_at(self, action: act.Meet) -> None:
        """Accept whoever has the session's ticket, or show it to the daemon that does."""
        key, rendezvous = (action.job, action.session), action.rendezvous
        if rendezvous.peer.node != self.name:
            self.shown[key] = rendezvous
            self.meet(action.job, (rendezvous.peer,))
            self.world.network.met(self.name, [rendezvous.peer.node])
            return
        self.expected[key] = rendezvous.ticket
        for link in self.world.network.links_of(self.name):
            self.world.network.consider(link)

    def accept(self, other: "Machine") -> None:
        """The other daemon shows its tickets, if the two reach each other."""
        for (job, session), rendezvous in other.shown.items():
            if rendezvous.peer == self.peer and self.expected.get((job, session)) == rendezvous.ticket:
                self.known.setdefault(job, {})[other.name] = other.arena.ident

    def keep_links(self, action: act.KeepLinks) -> None:
        """Keep a link to these; here links have no path."""
        self.world.network.keep_links(self.name, action.job, action.nodes)

    def knows(self, job: JobKey, other: "Machine") -> bool:
        """Whether this life accepts that daemon for the job."""
        return self.known.get(job, {}).get(other.name) == other.arena.ident

    def _forget_tickets(self, job: JobKey) -> None:
        for tickets in (self.expected, self.shown):
            for key in [key for key in tickets if key[0] == job]:
                del tickets[key]

    def forget(self, job: JobKey) -> None:
        """Nothing of the job is left here: its peers are told."""
        self.known.pop(job, None)
        self._forget_tickets(job)
        self.world.network.leave(self.name, job)
