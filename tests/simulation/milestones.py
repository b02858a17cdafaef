"""``python -m tests.simulation.milestones``: one job of many nodes, its save up to each milestone, and its restore.

8 ranks a node. The save that counts is the second: slots are there. The restore is from memory, after all ranks
crashed. What is not measured is played at no cost. Every time comes from the play: the moment at which the last rank
knows. Reads a ``Job`` from stdin and writes its ``Times``, in JSON.
"""

import gc
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ckptd.core.policy import Policy
from ckptd.shared.base.ids import SaveId
from ckptd.shared.format.schemes import Scheme
from ckptd.shared.protocol.messages import Cadence, Milestone, Tier
from tests.simulation.costs import Costs
from tests.simulation.hardware import Hardware, Measured
from tests.simulation.scale import Crowd
from tests.simulation.shared import once_in_all

_PATIENCE_S = 3600.0
_QUIET_S = 5.0  # between the last milestone and the crash
_LAUNCHER_S = 10.0  # at least, from the crash to the start of other processes


@dataclass(slots=True)
class Times:
    """Seconds of virtual time, of ``nodes`` nodes. Of a save: from the call of all ranks until all know the milestone.

    ``connected_s``, ``restored_s``: from the start of the ranks' processes. ``busy_s``: of the coordinator's loop, for
    the save, for the end of all ranks, and for the restore; ``core_s``: its core's part of the save and the restore.
    ``packets``: that it took in the restore; ``again``: of these, with a message that had come before, because its
    acknowledgement took too long. ``cpu_s``, ``memory_nbytes``: of the simulator.
    """

    nodes: int
    scheme: str
    staged_s: float = 0.0
    protected_s: float | None = None
    durable_s: float = 0.0
    connected_s: float = 0.0
    restored_s: float = 0.0
    save_busy_s: float = 0.0
    crash_busy_s: float = 0.0
    restore_busy_s: float = 0.0
    core_s: float = 0.0
    packets: int = 0
    again: int = 0
    events: int = 0
    cpu_s: float = 0.0
    memory_nbytes: int = 0
    links_lost: int = 0


@dataclass(frozen=True, slots=True)
class Job:
    """What is played, for a process of its own."""

    nodes: int
    scheme: Scheme
    costs: Costs
    hardware: Measured


def play(nodes: int, scheme: Scheme, costs: Costs, hardware: Hardware) -> Times:
    """The whole job. Raises AssertionError when it does not come to its end."""
    began = time.process_time()
    crowd = Crowd("save", nodes, costs, Policy(), scheme=scheme)
    world, times = crowd.world, Times(nodes, str(scheme))
    world.cadence, world.checked = Cadence(steps=1), False  # every save is drained
    crowd.saved(Milestone.DURABLE)
    world.run(_QUIET_S)
    world.hardware = hardware
    gc.collect()
    gc.freeze()  # a collection would count as time of some core
    _save(crowd, times)
    world.charged = False
    world.run(_QUIET_S)
    _restore(crowd, times)
    gc.unfreeze()
    times.events = world.events
    times.cpu_s = time.process_time() - began
    times.memory_nbytes = _peak_nbytes()
    return times


def _peak_nbytes() -> int:
    """What getrusage tells has the parent's, too."""
    text = Path("/proc/self/status").read_text(encoding="ascii")
    return int(next(line.split()[1] for line in text.splitlines() if line.startswith("VmHWM"))) * 1024


def _count(crowd: Crowd) -> None:
    """Costs count from here on."""
    crowd.world.charged = True
    for machine in crowd.world.nodes.values():
        machine.reset()  # type: ignore[attr-defined]


def _lost(crowd: Crowd) -> int:
    return sum(machine.load.links_lost for machine in crowd.world.nodes.values())  # type: ignore[attr-defined]


def _save(crowd: Crowd, times: Times) -> None:
    world, session = crowd.world, crowd.session
    wanted = [Milestone.STAGED, Milestone.DURABLE] + [Milestone.PROTECTED] * (world.scheme is not Scheme.NONE)
    earlier, reached = session.newest, dict[Milestone, float]()
    _count(crowd)
    began = world.clock.now
    session._next_round()
    number = SaveId(
        session.procs[0].incarnation, session.procs[0].counter + 1, 10 * session.rounds, session.procs[0].run
    )

    def done() -> bool:
        for milestone in wanted:
            if milestone not in reached and crowd.told(number, milestone):
                reached[milestone] = world.clock.now - began
        return len(reached) == len(wanted)

    ended = world.run_until(done, _PATIENCE_S)
    assert ended, f"{times.nodes} nodes, {times.scheme}: of {wanted} only {reached}"
    assert session.newest not in {earlier, None}
    times.staged_s, times.durable_s = reached[Milestone.STAGED], reached[Milestone.DURABLE]
    times.protected_s = reached.get(Milestone.PROTECTED)
    load = crowd.coordinator.load
    times.save_busy_s, times.core_s, times.links_lost = load.busy_s, load.core_s, _lost(crowd)


def _restore(crowd: Crowd, times: Times) -> None:
    world, before = crowd.world, crowd.session
    _count(crowd)
    for proc in before.procs:
        proc.die()
    world.run(_LAUNCHER_S)
    times.crash_busy_s = crowd.coordinator.load.busy_s
    before.end("all ranks crashed")
    crowd.reach(crowd.phase("connect", before))
    _count(crowd)
    began = world.clock.now
    assert world.run_until(crowd.phase("load", before), _PATIENCE_S), f"{times.nodes} nodes do not connect"
    times.connected_s = world.clock.now - began
    assert world.run_until(crowd.phase("train", before), _PATIENCE_S), f"{times.nodes} nodes do not load"
    times.restored_s = world.clock.now - began
    tiers = {proc.read.tier for proc in crowd.session.procs if proc.read is not None}
    assert tiers == {Tier.ARENA}, f"read from {tiers}"
    load = crowd.coordinator.load
    times.restore_busy_s, times.links_lost = load.busy_s, times.links_lost + _lost(crowd)
    times.core_s += load.core_s
    times.packets, times.again = load.packets, load.again


def main() -> None:
    """Plays one."""
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=Job)
    with once_in_all():
        times = play(job.nodes, job.scheme, job.costs, job.hardware)
    sys.stdout.buffer.write(msgspec.json.encode(times))


if __name__ == "__main__":
    main()
