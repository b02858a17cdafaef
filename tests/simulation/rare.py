"""What goes wrong more rarely, and what users do: drawn from a generator of its own, so that other plays stay the same.

A coordinator's daemon restarts in a load, or a rank dies in it; all daemons restart at once; half of the nodes are cut
off for long; the store is not mounted; a checkpoint is removed by hand, or pinned; the nodes' memory is full; a session
loads a step or a run by name; one rank saves another step than the others.
"""

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Any

from ckptd.shared.base.ids import SaveId
from tests.simulation.machine import Machine

if TYPE_CHECKING:
    from tests.simulation.session import Session
    from tests.simulation.world import World


class Rare:
    """``every_s``: seconds between two of them, on average; 0: never."""

    def __init__(self, world: "World", every_s: float) -> None:
        self._world, self._every_s = world, every_s
        self._random = Random(f"{world.seed}/rare")
        self._faults = (self._restart_all, self._cut_half, self._unmount, self._remove, self._pin, self._fill)

    @property
    def active(self) -> bool:
        """Whether something may go wrong."""
        return self._every_s > 0 and self._world.chaos.active

    def begin(self) -> None:
        """The first is a while from now."""
        if self.active:
            self._world.clock.after(self._random.expovariate(1 / self._every_s), self._happen)

    def stop(self) -> None:
        """All is as it was."""
        for machine in self._world.nodes.values():
            machine.arena.budget_nbytes = None
        for store in self._world.stores.values():
            store.pinned.clear()

    def _happen(self) -> None:
        if self.active:
            self._random.choice(self._faults)()
            self.begin()

    def _chance(self, probability: float) -> bool:
        return self.active and self._random.random() < probability

    # --- nodes

    def _restart(self, machine: Machine) -> None:
        if not machine.lost:
            machine.kill()
            self._heals(self._random.uniform(0.1, 5.0), machine.start)

    def _heals(self, seconds: float, call: Callable[..., None], *args: Any) -> None:
        self._world.clock.after(seconds, call, *args)
        self._world.chaos.wound(seconds)

    def _restart_all(self) -> None:
        self._world.chaos.note("all daemons restart")
        for machine in list(self._world.nodes.values()):
            self._restart(machine)

    def _cut_half(self) -> None:
        names = sorted(self._world.nodes)
        self._random.shuffle(names)
        some, seconds = frozenset(names[: len(names) // 2]), self._random.choice([15.0, 60.0, 120.0])
        if some:
            self._world.chaos.note("half are cut off")
            self._world.network.partition(some, frozenset(names) - some, seconds)
            self._world.chaos.wound(seconds)

    def _fill(self) -> None:
        """Nothing more fits in the memory of some nodes, for a while."""
        self._world.chaos.note("memory full")
        for machine in self._world.nodes.values():
            if not machine.lost and self._random.random() < 0.5:
                machine.arena.budget_nbytes = machine.arena.used_nbytes
                self._heals(self._random.uniform(5.0, 60.0), setattr, machine.arena, "budget_nbytes", None)

    # --- the store

    def _unmount(self) -> None:
        store = self._random.choice(list(self._world.stores.values()))
        if store.mode == "ok":
            self._world.chaos.note("store not mounted")
            store.mode = "unmounted"
            self._heals(self._random.uniform(5.0, 90.0), setattr, store, "mode", "ok")

    def _remove(self) -> None:
        """Any but the newest: whoever removes that gives it up."""
        store = self._random.choice(list(self._world.stores.values()))
        if old := sorted(store.committed)[:-1]:
            self._world.chaos.note("checkpoint removed by hand")
            store.taken.add(save := self._random.choice(old))
            del store.committed[save]

    def _pin(self) -> None:
        store = self._random.choice(list(self._world.stores.values()))
        if store.committed:
            self._world.chaos.note("checkpoint pinned")
            save = self._random.choice(sorted(store.committed))
            store.pinned.add(save)
            self._world.clock.after(self._random.uniform(10.0, 200.0), store.pinned.discard, save)

    # --- a session

    def names(self, session: "Session") -> tuple[int | None, bytes | None]:
        """The step and the run that its ranks load, None: the newest, and of the job's run."""
        if session.launcher.goal or not self._chance(0.4):
            return None, None
        truth, store = self._world.promises.of(session.job), self._world.store(session.job)
        known: list[SaveId] = sorted({*store.committed, *(s for s, t in truth.saves.items() if t.ever_whole)})
        if not known:
            return None, None
        save = self._random.choice(known[-6:])
        by_step = self._random.random() < 0.5
        self._world.chaos.note("load of a named step" if by_step else "load of a named run")
        return (save.step, None) if by_step else (None, save.run)

    def loads(self, session: "Session") -> None:
        """Its load begins: perhaps a daemon restarts in it, or a rank dies."""
        if self._chance(0.25):
            self._world.chaos.note("coordinator restarts in a load")
            self._world.clock.after(self._random.uniform(0.0, 1.5), self._restart, session.homes[0])
        if self._chance(0.1):
            self._world.chaos.note("rank dies in a load")
            self._world.clock.after(self._random.uniform(0.0, 1.5), self._dies, session)

    def _dies(self, session: "Session") -> None:
        if session.phase == "load":
            session.crash([self._random.choice(session.procs)])

    def errs(self) -> bool:
        """Whether a rank saves another step than the others."""
        if wrong := self._chance(0.002):
            self._world.chaos.note("steps differ")
        return wrong
