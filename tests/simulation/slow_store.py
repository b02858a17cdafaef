"""``python -m tests.simulation.slow_store``: an hour of saving to a store a tenth as fast as that takes.

The whole job saves every so many seconds, each time as many bytes as the store writes in ten times that. Arenas have
room for what slots and parity may take, and no byte more. At each event of each daemon the arenas are within their
budgets, and the newest checkpoint that some rank heard to be staged lies in memory, whole. In the middle the store may
stop answering, or fail; and all ranks may be killed, whereupon they load the newest. In the end every save has ended
once, as its rank heard, and the status tells how many ended how.
"""

import argparse
import sys
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

from ckptd.core.policy import Policy
from ckptd.daemon import status
from ckptd.shared.base.ids import SaveId
from ckptd.shared.format.schemes import Scheme
from ckptd.shared.protocol.messages import Cadence
from tests.simulation.book import is_one_end
from tests.simulation.ranks import CAPACITY
from tests.simulation.session import Session
from tests.simulation.world import KEY, World

HOUR_S = 3600.0
SHARE = 0.1  # of the speed that the saves would take
_PARITY_FILES = 2  # that a node keeps
_SETTLED_S = 7200.0  # for the last drain and its commit, after an hour in which nothing went wrong any more


@dataclass(frozen=True, slots=True, kw_only=True)
class Hour:
    """What happens in it. trouble: from when, until when the store is in that mode; crashes: when all ranks die."""

    seed: int = 1
    nodes: int = 4
    every_s: float = 30.0
    slots_per_rank: int = 3
    scheme: Scheme = Scheme.XOR
    cadence: Cadence = field(default_factory=lambda: Cadence(steps=1))
    forced: float = 0.0  # chance that a save is to be drained for sure: it holds a slot until then
    keep_every: int = 0  # steps; a save's is ten times its number
    trouble: tuple[float, float, str] | None = None
    crashes: tuple[float, ...] = ()
    short_nbytes: int = 0  # of what slots and parity may take
    seconds: float = HOUR_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """ends: how many saves ended how; peak: most that an arena held, of its budget."""

    saves: int
    ends: Counter[str]
    peak: float
    refused: int
    loads: int
    durable: tuple[SaveId, ...]  # what lies on the store in the end
    cpu_s: float

    def __str__(self) -> str:
        ends = ", ".join(f"{end} {count}" for end, count in sorted(self.ends.items()))
        return (
            f"{self.saves} saves: {ends}; {self.loads} loads; arenas up to {self.peak:.0%}; {self.cpu_s:.1f} s of CPU"
        )


class _Watch:
    """Looks at all arenas at each event."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.peak = 0.0

    def look(self) -> None:
        """Raises AssertionError."""
        for machine in self._world.nodes.values():
            used, budget = machine.arena.used_nbytes, machine.arena.budget_nbytes
            assert budget is not None
            assert used <= budget, f"{machine.name} holds {used} bytes, of {budget}"
            self.peak = max(self.peak, used / budget)
        truth = self._world.promises.of(KEY)
        newest = truth.staged
        if newest is not None and newest not in self._world.store(KEY).committed:
            whole = any(save >= newest and found.whole for save, found in truth.saves.items())
            assert whole, f"{newest} was told staged, and nothing as new lies in memory"


def play(hour: Hour) -> Report:
    """Raises AssertionError when something is not as it must be."""
    began = time.process_time()
    policy = Policy(slots_per_rank=hour.slots_per_rank, keep_last=3, keep_every=hour.keep_every)
    world = World(hour.seed, hour.nodes, scheme=hour.scheme, policy=policy, fault_every_s=0, shared=0, relaid=0)
    launcher, store = world.launchers[0], world.store(KEY)
    launcher._placement = lambda: list(world.nodes.values())  # type: ignore[method-assign]
    for machine in world.nodes.values():
        machine.arena.budget_nbytes = need_nbytes(hour) - hour.short_nbytes
    watch = _Watch(world)
    world.at_each_event = watch.look
    world.think_s = hour.every_s
    store.bytes_per_s = SHARE * hour.nodes * (10_000 + 997 * (hour.nodes - 1) / 2) / hour.every_s
    if hour.trouble is not None:
        since, until, mode = hour.trouble
        world.clock.at(since, setattr, store, "mode", mode)
        world.clock.at(until, setattr, store, "mode", "ok")
    for when in hour.crashes:
        world.clock.at(when, _crash, world)
    world.cadence, world.forced = hour.cadence, hour.forced
    world.begin()
    world.run(hour.seconds)
    return _end(world, watch, began)


def need_nbytes(hour: Hour) -> int:
    """What slots and parity of a node may take, and the README tells the user to have."""
    parity = _PARITY_FILES * hour.scheme.losses * CAPACITY // max(hour.nodes - hour.scheme.losses, 1)
    return hour.slots_per_rank * CAPACITY + parity


def _crash(world: World) -> None:
    """All ranks die. What they load next is at least as new as what they had heard to be staged."""
    launcher, heard = world.launchers[0], world.promises.of(KEY).staged
    session = launcher.current
    assert session is not None
    assert session.phase == "train", f"the job is to crash in {session.phase}"
    session.crash(session.procs)

    def loaded() -> None:
        then: Any = launcher.current
        assert then is not None
        assert then is not session
        assert then.phase == "train", f"{then.phase} a minute after the crash"
        found = next(iter(then.orders.values())).save
        assert heard is None or (found is not None and found >= heard), f"{heard} was staged, {found} was loaded"
        tiers = {proc.read.tier for proc in then.procs if proc.read is not None}
        assert {str(tier) for tier in tiers} <= {"arena"}, f"{found} was read from {tiers}"

    world.clock.after(55.0, loaded)


def _end(world: World, watch: _Watch, began: float) -> Report:
    """The job saves no more, what waits is drained, and the books are compared. Then it closes."""
    launcher = world.launchers[0]
    session: Session | None = launcher.current
    assert session is not None
    launcher.between_rounds = lambda _session: True  # type: ignore[method-assign]
    until = world.clock.now + _SETTLED_S
    while _open(world, session) and world.clock.now < until:
        world.run(1.0)
        session.since = world.clock.now  # it is at rest, and does not hang
    assert not _open(world, session), f"two hours later nothing was heard of the end of {_open(world, session)}"
    wrong = {entry: ends for entry, ends in world.book.of_session(session.name).items() if not is_one_end(ends)}
    assert not wrong, f"not one end: {wrong}"
    told, heard = _ends_in_the_status(world), world.book.totals()
    saves = heard.total()
    died = heard.pop("open", 0)  # with their ranks, which heard no end
    assert +(heard - told) == Counter(), f"the status tells of {told}, ranks heard of {heard}"
    assert saves - died <= told.total() <= saves, f"the status tells of {told}, {saves} saves were begun"
    newest = max((save for save, found in world.promises.of(KEY).saves.items() if found.ever_whole), default=None)
    launcher.goal = "rest"
    session.close()
    done = world.run_until(lambda: newest in {None, *world.store(KEY).ever} and launcher.current is None, _SETTLED_S)
    assert done, f"{newest} is not durable two hours after the job was closed"
    return Report(
        saves=saves,
        ends=told,
        peak=watch.peak,
        refused=world.counts["refused for the budget"],
        loads=world.counts["loads"],
        durable=tuple(sorted(world.store(KEY).committed)),
        cpu_s=time.process_time() - began,
    )


def _open(world: World, session: Session) -> list[str]:
    """Saves of which some rank has heard no end yet."""
    return [
        f"{save} at rank {rank}" for (_, rank, save), ends in world.book.of_session(session.name).items() if not ends
    ]


def _ends_in_the_status(world: World) -> Counter[str]:
    """What the daemon that coordinates says."""
    machine = next(iter(world.nodes.values()))
    assert machine.catalogue is not None
    (job,) = status.jobs(machine.catalogue.jobs, machine.now, {})
    return Counter(job.ends)


HOURS = {
    "three slots": Hour(),
    "two slots": Hour(slots_per_rank=2),
    "a tenth with drain=True": Hour(forced=0.1),
    "drain_every 10 minutes": Hour(cadence=Cadence(steps=0, seconds=600), keep_every=250),
    "silent for 15 minutes": Hour(trouble=(1200.0, 2100.0, "silent")),
    "failing for 45 minutes": Hour(trouble=(600.0, 3300.0, "failing")),
    "auto": Hour(cadence=Cadence(steps=0)),
    "auto, failing for 45 minutes": Hour(cadence=Cadence(steps=0), trouble=(600.0, 3300.0, "failing")),
    "auto, silent for 45 minutes": Hour(cadence=Cadence(steps=0), trouble=(600.0, 3300.0, "silent")),
    "ranks killed every 10 minutes": Hour(crashes=(600.0, 1200.0, 1800.0, 2400.0, 3000.0)),
    "killed while it is silent": Hour(trouble=(1200.0, 2400.0, "silent"), crashes=(1500.0, 2000.0)),
}


def main() -> int:
    """A line for each hour, of many seeds and numbers of nodes if asked for. The exit status is 1 when one fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--nodes", type=int, nargs="+", default=[4])
    args = parser.parse_args()
    failed = 0
    for name, hour in HOURS.items():
        for nodes in args.nodes:
            for seed in range(1, args.seeds + 1):
                try:
                    print(
                        f"{name}, {nodes} nodes, seed {seed}: {play(replace(hour, nodes=nodes, seed=seed))}", flush=True
                    )
                except AssertionError as error:
                    failed += 1
                    print(f"FAILED {name}, {nodes} nodes, seed {seed}: {error}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
