"""One start of a training job: its ranks gather who is where, load, and save in step until something ends them."""

from random import Random
from typing import TYPE_CHECKING, Any

from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.protocol.messages import Cadence, LoadFrom, Milestone, Progress
from ckptd.shared.protocol.topology import Rendezvous
from tests.simulation.machine import Machine
from tests.simulation.ranks import Proc
from tests.simulation.replicas import draw

if TYPE_CHECKING:
    from tests.simulation.launcher import Launcher

STUCK_S = 500.0  # longer than every deadline of the core, one after the other
_LOOK_S = 25.0


class Session:
    """``phase``: gather, connect, load, train, close, over. The launcher hears when it ends."""

    def __init__(self, launcher: "Launcher", name: str, homes: list[Machine], *, takeover: bool) -> None:
        self.launcher = launcher
        self.world = launcher.world
        self.job: JobKey = launcher.job
        self.name = name
        self.homes = homes
        self.world_size = len(homes)
        self.takeover = takeover
        drawn = Cadence(steps=self.world.clock.random.choice([1, 1, 1, 30]))
        self.cadence = self.world.cadence or drawn
        self.rendezvous: Rendezvous | None = None
        own = Random(f"{self.world.seed}/{name}")  # so that plays without shares are what they were
        self.replicas = draw(own, self.world_size, shared=self.world.shared, odd=self.world.odd)
        self.relaid = own.random() < self.world.relaid  # its tensors lie otherwise on the ranks than what it loads
        self.procs: list[Proc] = []
        self.phase = "gather"
        self.rounds = 0
        self.since = self.world.clock.now  # of the last progress
        self.began_load = 0.0
        self.named: tuple[int | None, bytes | None] = (None, None)  # step and run that it loads
        self._waiting: set[int] = set()
        self.orders: dict[int, LoadFrom] = {}
        self.outcomes: set[tuple[SaveId | None, int]] = set()  # of loads: what, and with which incarnation
        self.newest: SaveId | None = None  # saved by all ranks
        self.told_to_start_again = False  # no save of it becomes durable any more
        self.told: dict[tuple[SaveId, Milestone], int] = {}  # how many ranks heard
        self.world.clock.after(_LOOK_S, self._watch)

    @property
    def alive(self) -> bool:
        """Whether it goes on."""
        return self.phase != "over"

    def _moved(self, phase: str) -> None:
        self.world.log(self.homes[0], f"session {self.name}: {phase}")
        self.phase, self.since = phase, self.world.clock.now

    def _watch(self) -> None:
        """Nothing may hang while nothing is wrong. While something is, whoever waits too long is ended."""
        if not self.alive:
            return
        clock = self.world.clock
        quiet = clock.now - max(self.since, self.world.chaos.calm_since)
        if all(p.alive for p in self.procs) and not self.replaced:
            states = [f"{p}: {p.state}, {p.doing}" for p in self.procs[:8]]
            assert quiet < STUCK_S, f"session {self.name} hangs in {self.phase}: {states}"
        if clock.now - self.since >= STUCK_S * 1.5:
            self.end("hung")
        clock.after(_LOOK_S, self._watch)

    @property
    def replaced(self) -> bool:
        """Whether another session took the job over."""
        return self.launcher.current is not self

    # --- connect

    def gather(self) -> None:
        """Collective: goes on when every node's daemon answers; a client starts the one that is missing."""
        if self.phase != "gather":
            return
        clock = self.world.clock
        if any(m.lost for m in self.homes):
            self.end("a node is lost")
            return
        down = [m for m in self.homes if m.catalogue is None]
        for machine in down:
            clock.after(clock.between(0.1, 2), machine.start)
        if down or any(m.frozen for m in self.homes):
            clock.after(2.5, self.gather)
            return
        machines = list(dict.fromkeys(self.homes))
        if len(machines) > 1 or self.world.scheme.losses:
            ticket = f"{self.job.job}/{self.name}".encode().ljust(32, b".")[:32]
            self.rendezvous = Rendezvous(machines[0].peer, ticket, self.world.scheme, self.world.set_size)
        self._moved("connect")
        self.procs = [Proc(self, rank, machine) for rank, machine in enumerate(self.homes)]
        self._waiting = set(range(self.world_size))
        for proc in self.procs:
            clock.after(clock.mostly(0.05, 5.0), proc.attach)

    def attached(self, proc: Proc) -> None:
        """A rank is in; when all are, they load."""
        self._waiting.discard(proc.rank)
        if self._waiting or self.phase != "connect":
            return
        self._moved("load")
        self.began_load = self.world.clock.now
        self.named = self.world.rare.names(self)
        self.world.rare.loads(self)
        self._waiting = set(range(self.world_size))
        for other in self.procs:
            self.world.clock.after(self.world.clock.mostly(0.02, 2.0), other.load)

    def loaded(self, proc: Proc, order: LoadFrom) -> None:
        """A rank's load ended well; when all did, they train."""
        self.orders[proc.rank] = order
        self.world.promises.loaded(self, proc, order)
        self._waiting.discard(proc.rank)
        if self._waiting or self.phase != "load":
            return
        self.world.promises.agreed(self)
        self.world.counts["loads" if order.save else "empty loads"] += 1
        self.launcher.loaded(self)
        self._moved("train")
        self._next_round()

    # --- train

    def _next_round(self) -> None:
        if self.phase != "train":
            return
        self.rounds += 1
        self.since = self.world.clock.now
        if self.launcher.between_rounds(self):
            return
        clock = self.world.clock
        self._waiting = {p.rank for p in self.procs if p.alive}
        drain = clock.chance(self.world.forced) or bool(self.launcher.goal)
        for proc in self.procs:
            clock.after(clock.mostly(0.02, 3.0), self._save_one, proc, self.rounds, drain)

    def _save_one(self, proc: Proc, number: int, drain: bool) -> None:
        if self.rounds == number and self.phase == "train":
            proc.save(number * 10 + self.world.rare.errs(), drain=drain)

    def saved(self, proc: Proc) -> None:
        """A rank's call of save returned. The next step waits for all: training is collective."""
        self._waiting.discard(proc.rank)
        if self._waiting or self.phase != "train":
            return
        self.since = self.world.clock.now
        self.newest = SaveId(proc.incarnation, proc.counter, self.rounds * 10, proc.run)
        think = self.world.clock.mostly(self.world.think_s, self.world.think_s * 5)
        self.world.clock.after(think, self._next_round)

    def news(self, proc: Proc, news: Progress) -> None:
        """A rank heard of a save."""
        self.told_to_start_again |= news.reason.endswith("; connect or load again")
        if news.milestone is not None:
            key = (news.save, news.milestone)
            self.told[key] = self.told.get(key, 0) + 1

    def count(self, save: SaveId, milestone: Milestone) -> int:
        """How many ranks heard of it."""
        return self.told.get((save, milestone), 0)

    def heard_by_all(self, save: SaveId, milestone: Milestone) -> bool:
        """Whether every rank's handle says so."""
        return all(save in p.saves and milestone in p.saves[save].milestones for p in self.procs)

    # --- the end

    def failed(self, proc: Proc, why: str) -> None:
        """A rank's connect or load raised: the program ends, and the launcher starts another."""
        self.world.counts["failed sessions"] += 1
        self.world.log(proc.machine, f"{proc}: {why}")
        if "no checkpoint can be restored" in why and not self.world.promises.anything_restorable(self.job):
            for seconds in (3.0, 6.0, 12.0):  # more was lost than was promised: the user gives the rest up
                self.world.clock.after(seconds, self.launcher.forget)
            self.world.clock.after(0.0, self.end, "nothing to go on with")
            return
        if why.startswith("load") and self.named != (None, None):  # the user named what is not there any more
            self.world.clock.after(0.0, self.end, "what it named is not there")
            return
        if "is still running" in why:
            lost = {m.name for m in self.world.lost} - set(self.world.nodes)
            self.launcher.told_running_on_a_lost_node |= any(f" on {name})" in why for name in lost)
        calm = self.world.clock.now - self.world.chaos.calm_since
        assert calm < STUCK_S or self.replaced or self.since < self.world.chaos.calm_since + 60, (
            f"{proc} fails while nothing is wrong: {why}"
        )
        self.world.clock.after(0.0, self.end, "failed")

    def close(self) -> None:
        """All ranks say goodbye."""
        self._moved("close")
        self._waiting = {p.rank for p in self.procs}
        for proc in self.procs:
            self.world.clock.after(self.world.clock.mostly(0.05, 2.0), self._close_one, proc)

    def _close_one(self, proc: Proc) -> None:
        proc.close()
        if not proc.alive:
            self.closed(proc)

    def closed(self, proc: Proc) -> None:
        """A rank is gone in peace."""
        self._waiting.discard(proc.rank)
        if not self._waiting and self.phase == "close":
            self.end("closed")

    def end(self, why: str) -> None:
        """Whatever still lives of it is killed."""
        if not self.alive:
            return
        self._moved(f"over: {why}")
        self.phase = "over"
        for proc in self.procs:
            proc.die()
        self.launcher.ended(self, why)

    def crash(self, procs: list[Proc]) -> None:
        """These die; the launcher notices after a while."""
        for proc in procs:
            proc.die()
        self.world.clock.after(self.world.clock.between(0.5, 8), self.end, "a rank crashed")

    def summary(self) -> dict[str, Any]:
        """For transcripts."""
        return {"phase": self.phase, "rounds": self.rounds, "ranks": {str(p): p.state for p in self.procs}}
