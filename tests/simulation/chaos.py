"""What goes wrong, and when: drawn from the seed, until it is told to stop."""

from collections import Counter
from typing import TYPE_CHECKING

from ckptd.core import actions as act
from tests.simulation.machine import Machine

if TYPE_CHECKING:
    from tests.simulation.world import World


class Chaos:
    """``calm_since``: the time since which nothing was wrong; infinite while something is."""

    def __init__(self, world: "World", *, every_s: float, reshape: float, compound: float = 0.0) -> None:
        self._world = world
        self._every_s = every_s
        self.reshape = reshape
        self._compound = compound  # chance that several things go wrong at once, about one coordinator
        self.active = every_s > 0
        self.happened: Counter[str] = Counter()
        self._last = 0.0
        self._crash_chance = 0.0
        self._wounds = 0  # things that are wrong now and will be set right

    def begin(self) -> None:
        """The first thing goes wrong a while from now."""
        if self.active:
            self._crash_chance = 1 / (600 * len(self._world.nodes))
            self._next()

    def stop(self) -> None:
        """Nothing more goes wrong."""
        self.active = False
        self._crash_chance = 0.0

    def note(self, what: str) -> None:
        """Something is wrong now."""
        self.happened[what] += 1
        self._last = self._world.clock.now

    @property
    def calm_since(self) -> float:
        """When the last thing that was wrong was set right."""
        world = self._world
        wrong = any(not m.up and not m.lost for m in world.nodes.values()) or world.network.partitions
        wrong = wrong or any(store.mode != "ok" for store in world.stores.values())
        if wrong:
            self._last = world.clock.now
        return self._last

    def wound(self, seconds: float) -> None:
        """Something is wrong for so long."""
        self._world.clock.after(seconds, self._healed)

    def _healed(self) -> None:
        self._last = self._world.clock.now

    def crash_at(self, machine: Machine, action: act.Action) -> str:
        """Whether the daemon dies at this action: before, after, or (empty) not."""
        if not self._world.clock.chance(self._crash_chance):
            return ""
        when = self._world.clock.random.choice(["before", "after"])
        self.note(f"crash {when} {type(action).__name__}")
        self._world.clock.after(self._world.clock.between(0.1, 20), machine.start)
        return when

    def fails(self, action: act.Action) -> bool:
        """Whether an action on arenas or peers fails this time."""
        if not self.active or not isinstance(
            action, act.AllocateSlots | act.Encode | act.FetchSegment | act.PullSegments
        ):
            return False
        if self._world.clock.chance(0.02):
            self.note(f"{type(action).__name__} fails")
            return True
        return False

    def _next(self) -> None:
        self._world.clock.after(self._world.clock.random.expovariate(1 / self._every_s), self._happen)

    def _happen(self) -> None:  # noqa: C901, PLR0912 - one line per fault
        if not self.active:
            return
        clock, world = self._world.clock, self._world
        standing = [m for m in world.nodes.values() if not m.lost]
        if self._compound and clock.chance(self._compound):
            self._beset()
            self._next()
            return
        dice = clock.random.random()
        if not standing:
            self._next()
            return
        victim = clock.random.choice(standing)
        if dice < 0.25:
            self._kill(victim, clock.mostly(1.0, 40.0, 0.1))
        elif dice < 0.42:
            self._lose(victim)
            if clock.chance(0.2):
                clock.after(clock.between(0, 3), self._lose, clock.random.choice(standing))
        elif dice < 0.6:
            self._cut(standing)
        elif dice < 0.7:
            seconds = clock.random.choice([0.5, 5.0, 25.0])
            self.note(f"frozen {seconds:g} s")
            victim.freeze(seconds)
            if seconds > 10:
                group = frozenset({victim.name})
                world.network.partition(group, frozenset(world.nodes) - group, seconds)
            self.wound(seconds)
        elif dice < 0.8 and len(world.nodes) > 1:
            self.note("link reset")
            links = world.network.links_of(victim.name)
            if links:
                world.network.reset(clock.random.choice(links))
        elif dice < 0.9:
            self._trouble()
        else:
            self.note("bad weather")
            world.network.bad_weather = not world.network.bad_weather
        self._next()

    def _beset(self) -> None:
        """A coordinator restarts while another node is silent, for longer than it is waited for; ranks, store as well.

        It may restart again, or be started anew elsewhere, before that node answers.
        """
        clock, world = self._world.clock, self._world
        session = clock.random.choice(world.launchers).current
        homes = list(dict.fromkeys(session.homes)) if session is not None else list(world.nodes.values())
        chief, others = homes[0], [m for m in world.nodes.values() if m is not homes[0] and not m.lost]
        self.note("beset")
        if others:
            silent = frozenset({clock.random.choice(others).name})
            seconds = clock.random.choice([12.0, 40.0, 90.0, 200.0])
            world.network.partition(silent, frozenset(world.nodes) - silent, seconds)
            self.wound(seconds)
        if clock.chance(0.5):
            self._trouble()
        for _ in range(clock.random.choice([1, 1, 2, 3])):
            clock.after(clock.between(0, 30), self._kill, chief, clock.mostly(1.0, 40.0, 0.1))
        if session is not None and clock.chance(0.5):
            clock.after(clock.between(0, 10), session.crash, session.procs)

    def _kill(self, machine: Machine, seconds: float) -> None:
        self.note("daemon killed")
        machine.kill()
        self._world.clock.after(seconds, machine.start)
        self.wound(seconds)

    def _lose(self, machine: Machine) -> None:
        """Arena and all; another node takes its place after a while, under its name or a new one."""
        world = self._world
        standing = [m for m in world.nodes.values() if not m.lost]
        if machine.lost or (len(standing) < 2 and len(world.nodes) > 1):
            return
        self.note("node lost")
        machine.wipe()
        for launcher in world.launchers:
            for session in (launcher.current, *launcher.zombies):
                if session is not None and machine in session.homes:
                    world.clock.after(world.clock.between(0.5, 8), session.end, "a node was lost")
        world.clock.after(world.clock.mostly(2.0, 60.0, 0.2), world.replace, machine)

    def _cut(self, standing: list[Machine]) -> None:
        clock, names = self._world.clock, [m.name for m in standing]
        if len(names) < 2:
            return
        clock.random.shuffle(names)
        size = clock.random.choice([1, 1, 1, len(names) // 2])
        some, others = frozenset(names[:size]), frozenset(names[size:])
        if clock.chance(0.3):
            others = frozenset(names[size : size + 1])
        seconds = clock.random.choice([0.3, 3.0, 12.0, 40.0])
        self.note(f"partition {seconds:g} s")
        self._world.network.partition(some, others, seconds)
        self.wound(seconds)

    def _trouble(self) -> None:
        clock, store = self._world.clock, self._world.clock.random.choice(list(self._world.stores.values()))
        store.mode = clock.random.choice(["slow", "failing", "silent"])
        self.note(f"store {store.mode}")
        seconds = clock.mostly(10.0, 80.0, 0.2)
        self._world.clock.after(seconds, setattr, store, "mode", "ok")
        self.wound(seconds)
