"""One seed played from start to end: a time of faults, then an examination in peace. A failing one tells its story."""

import dataclasses
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from ckptd.shared.format.schemes import Scheme
from tests.simulation.costs import Costs
from tests.simulation.shared import once_in_all
from tests.simulation.world import POLICY, World
from tests.states import reached

EXAM_S = 3000.0  # in which a job must reach everything, once nothing goes wrong any more
FREED_S = 300.0  # after its last rank closed


@dataclass(slots=True)
class Outcome:
    """What a play came to. Times in seconds, virtual ones but for ``cpu_s``."""

    seed: int
    nodes: int
    virtual_s: float
    cpu_s: float
    events: int
    fingerprint: str
    faults: dict[str, int] = field(default_factory=dict)
    told: dict[str, int] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    messages: dict[str, int] = field(default_factory=dict)  # by kind
    sent: dict[str, int] = field(default_factory=dict)  # messages by node
    nbytes: dict[str, int] = field(default_factory=dict)  # by node
    rows: dict[str, int] = field(default_factory=dict)  # of the core's tables that were taken

    def __str__(self) -> str:
        told = " ".join(f"{k}={v}" for k, v in sorted(self.told.items()))
        return (
            f"seed {self.seed}: {self.nodes} nodes, {self.events} events, {sum(self.faults.values())} faults, "
            f"{self.virtual_s:.0f} s played in {self.cpu_s:.2f} s, {told}"
        )


class BrokenError(AssertionError):
    """A promise was broken. The message has the end of the transcript, and how to play it again."""

    def __init__(self, seed: int, nodes: int, options: str, problem: str, lines: list[str]) -> None:
        self.seed, self.problem, self.lines = seed, problem, lines
        again = f"PYTHONHASHSEED=0 python -m tests.simulation.replay {seed} --nodes {nodes}{options}"
        super().__init__(f"seed {seed}, {nodes} nodes: {problem}\n" + "\n".join(lines) + f"\n{problem}\nagain: {again}")


def play(
    seed: int,
    *,
    nodes: int = 3,
    scheme: str | None = None,
    set_size: int | None = None,
    seconds: float = 150.0,
    fault_every_s: float = 12.0,
    keep: bool = False,
    slower: float = 0.0,
    relayed_from: int = 0,
    **more: Any,
) -> Outcome:
    """Plays a seed. Raises BrokenError. keep: the transcript of a failure has all lines.

    slower: what daemons do takes time, so many times what it takes on a machine; 0: none. relayed_from: so many nodes
    have leaders of groups, where daemons take time; 0: as the product has it.
    """
    began = time.process_time()
    drawn = Scheme(scheme) if scheme else [Scheme.XOR, Scheme.XOR, Scheme.DOUBLE, Scheme.NONE][seed % 4]
    size = set_size or [8, 4, 2, 3, 8][seed % 5]
    if "ranks_per_node" not in more:
        more["ranks_per_node"] = (1, 2, 3) if nodes <= 4 else (1,) if nodes > 16 else (1, 1, 2)
    costs = Costs().times(slower) if slower else None
    if relayed_from:
        more["policy"] = dataclasses.replace(POLICY, relayed_from=relayed_from)
    world = World(seed, nodes, scheme=drawn, set_size=size, fault_every_s=fault_every_s, costs=costs, **more)
    world.everything = [] if keep else None
    rows: Counter[str] = Counter()
    try:
        with reached(rows), once_in_all():
            world.begin()
            world.run(seconds)
            examine(world)
    except Exception as error:
        lines = [_line(line) for line in (world.everything if keep else world.lines) or ()]
        options = f" --scheme {scheme}" if scheme else ""
        options += f" --set-size {set_size}" if set_size else ""
        options += f" --seconds {seconds:g}" if seconds != 150.0 else ""
        options += f" --fault-every {fault_every_s:g}" if fault_every_s != 12.0 else ""
        options += f" --compound {more['compound']:g}" if more.get("compound") else ""
        options += f" --rare {more['rare_every_s']:g}" if more.get("rare_every_s") else ""
        options += f" --slower {slower:g}" if slower else ""
        options += f" --relayed-from {relayed_from}" if relayed_from else ""
        problem = str(error) if isinstance(error, AssertionError) else repr(error)
        raise BrokenError(seed, nodes, options, problem, lines) from error
    return Outcome(
        seed,
        nodes,
        world.clock.now,
        time.process_time() - began,
        world.events,
        world.fingerprint,
        dict(world.chaos.happened),
        dict(world.promises.told_of),
        dict(world.counts),
        dict(world.network.kinds),
        dict(world.network.sent),
        dict(world.network.nbytes),
        dict(rows),
    )


def examine(world: World) -> None:
    """Nothing goes wrong any more: each job saves, reaches every milestone, is killed, loads the newest, closes, and
    leaves nothing behind.
    """
    world.chaos.stop()
    world.rare.stop()
    world.scrubs.stop()
    world.network.heal()
    world.network.bad_weather = False
    for store in world.stores.values():
        store.mode = "ok"
    for machine in list(world.nodes.values()):
        machine.start()
    for launcher in world.launchers:
        launcher.goal = "save"
        if launcher.current is None:
            launcher.start()
    for launcher in world.launchers:
        done = world.run_until(lambda launcher=launcher: "save" in launcher.reached, EXAM_S)
        assert done, f"job {launcher.job.job} does not reach its milestones in peace: {_state(launcher)}"
        done = world.run_until(lambda launcher=launcher: "all" in launcher.reached, EXAM_S)
        assert done, f"job {launcher.job.job} does not load and go on in peace: {_state(launcher)}"
        world.promises.nothing_pulled(launcher.job, list(world.nodes.values()))
        world.run_until(lambda launcher=launcher: launcher.current is None, FREED_S)
        assert launcher.current is None, f"job {launcher.job.job} does not end: {_state(launcher)}"
    world.run(FREED_S)
    world.expired = True
    world.run(world.policy.orphan_ttl_s + FREED_S)
    world.promises.nothing_left(list(world.nodes.values()))
    world.journals.check()
    for machine in world.nodes.values():
        assert machine.catalogue is not None
        assert machine.catalogue.empty, f"{machine.name} is not empty: {list(machine.catalogue.jobs)}"


def _state(launcher: Any) -> str:
    session = launcher.current
    return f"no session, reached {launcher.reached}" if session is None else str(session.summary())


def _line(line: tuple[Any, ...]) -> str:
    now, node, *words = line
    return f"{now:10.4f} {node} " + " ".join(str(word) for word in words)
