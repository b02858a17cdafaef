"""``python -m tests.simulation.scale [PLAY ...] [--nodes N ...]``: jobs of many nodes whose daemons take time.

8 ranks a node, the product's defaults, nothing goes wrong but what the play is about. A play fails when it does not
come to its end in time, when links are lost for no reason, or when the coordinator's loop is busy for longer than its
bar. What comes before the measured part is played at no cost.
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ckptd.core import events as ev
from ckptd.core.groups import RELAYED_FROM
from ckptd.core.policy import Policy
from ckptd.core.redundancy_sets import redundancy_sets
from ckptd.shared.base.ids import SaveId
from ckptd.shared.format.schemes import Scheme
from ckptd.shared.format.slot import Seal, SlotState
from ckptd.shared.protocol.messages import Cadence, Milestone
from ckptd.shared.protocol.topology import Topology
from tests.runs import STORE_ID
from tests.simulation.arena import content_of
from tests.simulation.busy import BusyMachine, Load
from tests.simulation.costs import Costs
from tests.simulation.machine import BEGAN
from tests.simulation.ranks import CAPACITY
from tests.simulation.session import Session
from tests.simulation.shared import once_in_all
from tests.simulation.store import run_of
from tests.simulation.world import KEY, World

RANKS = 8
SET_SIZE = 8
SIZES = (64, 256, 1000)
DRAIN_S = 10.0  # in which the store takes a node's share
_SETTLED_S = 20.0  # until each link of a new session goes its way
_READY_S = 3600.0  # for what comes before
_POLICY = Policy()
_NEVER = Cadence(steps=1 << 30)


@dataclass(frozen=True, slots=True)
class Bar:
    """What a play must keep: seconds of virtual time until its end, and of the coordinator's loop."""

    ends_s: float
    busy_s: float


BARS = {
    "connect": Bar(60.0, 3.0),  # as long as a client waits
    "load": Bar(60.0, 2.0),
    "save": Bar(30.0, 0.5),
    "drain": Bar(1.5 * DRAIN_S, 0.25 * DRAIN_S),
    "lost": Bar(60.0, 8.0),  # the loss, then connect and load
    "restart": Bar(60.0, 3.0),
}


@dataclass(slots=True)
class Figures:
    """Of one play. ``load``: of the coordinator's loop; ``links_lost``: by all daemons, those of a lost node apart."""

    play: str
    nodes: int
    took_s: float = 0.0
    ended: bool = False
    load: Load = field(default_factory=Load)
    other_busy_s: float = 0.0  # most of any other daemon
    links_lost: int = 0
    nbytes_in: int = 0  # of the coordinator, what was sent again too
    nbytes_out: int = 0  # that its core sent
    cpu_s: float = 0.0

    @property
    def problems(self) -> list[str]:
        """Which bars it does not keep."""
        bar, found = BARS[self.play], []
        if not self.ended:
            found.append(f"no end after {self.took_s:.0f} s")
        if self.load.busy_s > bar.busy_s:
            found.append(f"the coordinator was busy for {self.load.busy_s:.1f} s, {bar.busy_s:g} s are allowed")
        if self.links_lost:
            found.append(f"{self.links_lost} links lost")
        return found

    def __str__(self) -> str:
        load = self.load
        turns = f"{load.longest_s * 1000:9.0f} {load.long_turns:6d} {self.links_lost:6d}"
        nbytes = f"{self.nbytes_in / 1e6:8.1f} {self.nbytes_out / 1e6:8.1f} {load.packets:8d} {load.again:8d}"
        times = f"{self.took_s:8.2f} {load.busy_s:8.2f} {load.core_s:7.2f} {self.other_busy_s:7.2f}"
        said = "; ".join(self.problems) or "ok"
        return f"{self.play:8s} {self.nodes:6d} {times} {turns} {nbytes} {load.events:8d} {self.cpu_s:7.1f}  {said}"


HEAD = (
    "play      nodes     took     busy    core   other   longest  >50ms  links    MB in   MB out  packets    again"
    "   events     CPU\n"
    "                       s        s       s       s        ms           lost                                   "
    "                s"
)


class Crowd:
    """A job of so many nodes. ``measured`` gives the figures of what follows, until ``done``."""

    def __init__(
        self,
        play: str,
        nodes: int,
        costs: Costs,
        policy: Policy,
        *,
        filled: bool = False,
        scheme: Scheme = Scheme.XOR,
    ) -> None:
        self._began = time.process_time()
        self.play, self.nodes = play, nodes
        quiet = {"fault_every_s": 0.0, "shared": 0.0, "relaid": 0.0, "think_s": 1e7}
        self.world = world = World(
            1, nodes, scheme=scheme, set_size=SET_SIZE, policy=policy, costs=costs, jobs=1, **quiet
        )  # type: ignore[arg-type]
        world.thorough, world.clock.steady, world.charged = False, True, False
        world.forced, world.cadence = 0.0, _NEVER
        sets = redundancy_sets([m.peer for m in world.nodes.values()], SET_SIZE)
        of = {name: number for number, members in enumerate(sets) for name in members}
        self.chief = next(iter(world.nodes))
        self.linked = lambda a, b: self.chief in {a, b} or of[a] == of[b]
        self.launcher = world.launchers[0]
        self.launcher._placement = lambda: [m for m in world.nodes.values() for _ in range(RANKS)]  # type: ignore[method-assign]
        if filled:
            self._fill()
        world.begin()

    def _fill(self) -> None:
        """Arenas as a job leaves them of which all processes, daemons too, were killed once a save was staged."""
        world, homes = self.world, self.launcher._placement()
        machines = list(world.nodes.values())
        places = tuple(machines.index(machine) for machine in machines for _ in range(RANKS))
        topology = Topology(tuple(m.peer for m in machines), places, Scheme.XOR, SET_SIZE)
        number, session = world.store(KEY).take(1, BEGAN, "job.s0"), "job.s0"
        save = SaveId(number, 1, 10, run_of(session, 1))
        for machine in machines:
            machine.arena.numbers[KEY], machine.arena.stores[KEY] = number, STORE_ID
            machine.arena.job(KEY).kept = ev.TopologyKept(
                job=KEY, session=session, topology=topology, epoch=number, since=number
            )
        for rank, machine in enumerate(homes):
            content = content_of(save, rank, session)
            seal = Seal(
                state=SlotState.DIGESTED, job=KEY, save=save, rank=rank, world_size=len(homes), image_nbytes=10_000,
                leaves_digest=content, table_digest=content,
            )  # fmt: skip
            machine.arena.put_seal(KEY, machine.arena.allocate(KEY, rank, CAPACITY), seal)

    @property
    def session(self) -> Session:
        """The present one."""
        assert self.launcher.current is not None
        return self.launcher.current

    @property
    def coordinator(self) -> Any:
        """Its machine."""
        return self.world.nodes[self.chief]

    def reach(self, done: Callable[[], bool]) -> None:
        """What comes before."""
        assert self.world.run_until(done, _READY_S), f"{self.play} of {self.nodes} nodes cannot begin: {self.state}"

    def phase(self, name: str, after: Session | None = None) -> Callable[[], bool]:
        """Whether the session, or one after that, is in this phase."""
        return lambda: (one := self.launcher.current) is not None and one is not after and one.phase == name

    def told(self, save: SaveId, milestone: Milestone) -> bool:
        """Whether all ranks know that it has reached that."""
        return self.session.count(save, milestone) >= self.session.world_size

    def saved(self, milestone: Milestone) -> SaveId:
        """Plays up to the milestone of the first save."""
        self.reach(lambda: self.launcher.current is not None and self.launcher.current.newest is not None)
        newest = self.session.newest
        assert newest is not None
        self.reach(lambda: self.told(newest, milestone))
        return newest

    def measured(self, done: Callable[[], bool], *, begin: Callable[[], None] = lambda: None) -> Figures:
        """Plays until it is done, or for as long as the bar allows."""
        world, bar, network = self.world, BARS[self.play], self.world.network
        world.charged = True
        for machine in world.nodes.values():
            assert isinstance(machine, BusyMachine)
            machine.reset()
        network.nbytes.clear()
        network.nbytes_in.clear()
        began = world.clock.now
        begin()
        figures = Figures(self.play, self.nodes)
        figures.ended = world.run_until(done, bar.ends_s)
        figures.took_s = world.clock.now - began
        loads = {m.name: m.load for m in world.nodes.values() if isinstance(m, BusyMachine)}
        figures.load = loads.pop(self.chief)
        figures.other_busy_s = max(load.busy_s for load in loads.values())
        figures.links_lost = figures.load.links_lost + sum(load.links_lost for load in loads.values())
        figures.nbytes_in, figures.nbytes_out = network.nbytes_in[self.chief], network.nbytes[self.chief]
        figures.cpu_s = time.process_time() - self._began
        return figures

    @property
    def state(self) -> str:
        """For a play that hangs."""
        return str(self.launcher.current and (self.session.phase, len(self.session._waiting)))


def connect(nodes: int, costs: Costs, policy: Policy = _POLICY) -> Figures:
    """All ranks at once, until each is in."""
    crowd = Crowd("connect", nodes, costs, policy)
    crowd.reach(crowd.phase("connect"))
    return crowd.measured(crowd.phase("load"))


def load(nodes: int, costs: Costs, policy: Policy = _POLICY) -> Figures:
    """All ranks and daemons ended, every arena is whole; from when all are in again until all have read."""
    crowd = Crowd("load", nodes, costs, policy, filled=True)
    crowd.reach(crowd.phase("load"))
    figures = crowd.measured(crowd.phase("train"))
    tiers = {proc.read.tier for proc in crowd.session.procs if proc.read is not None}
    assert not figures.ended or [str(tier) for tier in tiers] == ["arena"], f"read from {tiers}"
    return figures


def save(nodes: int, costs: Costs, policy: Policy = _POLICY) -> Figures:
    """All ranks save at once, until each knows that it is protected. The second save: links have found their paths."""
    crowd = Crowd("save", nodes, costs, policy)
    crowd.world.think_s = _SETTLED_S
    first = crowd.saved(Milestone.PROTECTED)
    session = crowd.session
    crowd.reach(lambda: bool(session._waiting))
    return crowd.measured(
        lambda: session.newest not in (None, first) and crowd.told(session.newest, Milestone.PROTECTED)
    )


def drain(nodes: int, costs: Costs, policy: Policy = _POLICY) -> Figures:
    """From staged to durable, with a store that takes DRAIN_S."""
    crowd = Crowd("drain", nodes, costs, policy)
    crowd.world.cadence, crowd.world.drain_s = Cadence(steps=1), DRAIN_S
    save = crowd.saved(Milestone.STAGED)
    return crowd.measured(lambda: crowd.told(save, Milestone.DURABLE))


def lost(nodes: int, costs: Costs, policy: Policy = _POLICY) -> Figures:
    """A node is lost; its place is taken, all ranks start again, connect, and load what parity gives."""
    crowd = Crowd("lost", nodes, costs, policy)
    world = crowd.world
    crowd.saved(Milestone.PROTECTED)
    before, name = crowd.session, list(world.nodes)[-1]

    def begin() -> None:
        machine = world.nodes[name]
        machine.wipe()
        world.clock.after(1.0, before.end, "a node was lost")
        world.clock.after(0.5, lambda: world._add(name, machine.peer.domain).start())

    figures = crowd.measured(crowd.phase("train", before), begin=begin)
    broken = sum(crowd.chief in link or name in link for link in _links_of(crowd, name))
    figures.links_lost = max(0, figures.links_lost - 2 * broken)
    return figures


def _links_of(crowd: Crowd, name: str) -> list[tuple[str, str]]:
    return [(name, other) for other in crowd.world.nodes if other != name and crowd.linked(name, other)]


def restart(nodes: int, costs: Costs, policy: Policy = _POLICY) -> Figures:
    """The coordinator's daemon is killed and started again: until it has a link to each node and nothing to do."""
    crowd = Crowd("restart", nodes, costs, policy)
    crowd.saved(Milestone.PROTECTED)
    session, machine, began = crowd.session, crowd.coordinator, crowd.world.clock.now
    idle, events = [began], [0]

    def begin() -> None:
        machine.kill()
        crowd.world.clock.after(1.0, machine.start)

    def done() -> bool:
        now, plane = crowd.world.clock.now, machine.plane
        busy = plane is None or machine.load.events != events[0]  # signs of life are none
        if busy or any(proc.state != "in" for proc in session.procs[:RANKS]):
            idle[0], events[0] = now, machine.load.events
            return False
        return now - idle[0] > 1.0 and sum(view.up for view in plane.views()) == nodes - 1

    figures = crowd.measured(done, begin=begin)
    figures.took_s = idle[0] - began - 1.0 if figures.ended else figures.took_s
    return figures


PLAYS = {"connect": connect, "load": load, "save": save, "drain": drain, "lost": lost, "restart": restart}


def main() -> int:
    """The exit status is 1 when some bar is not kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plays", nargs="*", help=f"of {', '.join(PLAYS)}; none: all")
    parser.add_argument("--nodes", nargs="*", type=int, default=list(SIZES))
    parser.add_argument("--slower", type=float, default=1.0, help="as on a machine so many times slower")
    parser.add_argument("--relayed-from", type=int, default=RELAYED_FROM, help="so many nodes have leaders")
    args = parser.parse_args()
    print(HEAD)
    failed = False
    for play in args.plays or PLAYS:
        for nodes in args.nodes:
            with once_in_all():
                figures = PLAYS[play](nodes, Costs().times(args.slower), Policy(relayed_from=args.relayed_from))
            failed = failed or bool(figures.problems)
            print(figures, flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
