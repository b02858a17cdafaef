"""``python -m tests.simulation.growth [--plot docs/scale.svg]``: what daemons say to each other as a job grows.

A quiet run: one rank a node, a save every minute, nothing goes wrong. Messages of the cores and their bytes, by the
codec that the daemons use, for each node and save; the coordinator's own share, which grows with the job, stands apart.
And the bytes that the job's journal gets for each save.
Links are made where messages go: to the coordinator and inside the sets.
"""

import argparse
import sys
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ckptd.core.redundancy_sets import redundancy_sets
from ckptd.shared.format.schemes import Scheme
from ckptd.shared.protocol.messages import Cadence, Milestone
from tests.simulation.shared import once_in_all
from tests.simulation.world import POLICY, World

SIZES = (4, 16, 64, 256, 1000)
SET_SIZES = (4, 8)
SAVES = 5
EVERY_S = 60.0
COORDINATOR = "n000"


@dataclass(frozen=True, slots=True)
class Share:
    """For one save: messages and bytes that a node sends, on average and at most; and those of the coordinator.

    journal_nbytes: of the journal's records, of the whole job.
    """

    nodes: int
    set_size: int
    messages: float
    most_messages: float
    nbytes: float
    most_nbytes: float
    coordinator_messages: float
    coordinator_nbytes: float
    journal_nbytes: float
    cpu_s: float

    def __str__(self) -> str:
        node = f"{self.messages:9.1f} {self.most_messages:9.1f} {self.nbytes:9.0f} {self.most_nbytes:9.0f}"
        coordinator = f"{self.coordinator_messages:12.1f} {self.coordinator_nbytes:12.0f}"
        return f"{self.nodes:6d} {self.set_size:4d} {node} {coordinator} {self.journal_nbytes:8.1f} {self.cpu_s:8.1f}"


def measure(nodes: int, scheme: Scheme = Scheme.XOR, set_size: int = 8) -> Share:
    """Plays the job of so many nodes. Every save must become protected and durable. One node has no redundancy."""
    began = time.process_time()
    policy = replace(POLICY, keep_last=2, connect_timeout_s=600, stage_timeout_s=600)
    scheme = scheme if nodes > 1 else Scheme.NONE
    quiet = {"fault_every_s": 0.0, "shared": 0.0, "think_s": EVERY_S}
    world = World(1, nodes, scheme=scheme, set_size=set_size, policy=policy, **quiet)
    world.thorough = False
    sets = redundancy_sets([m.peer for m in world.nodes.values()], set_size)
    of = {name: number for number, members in enumerate(sets) for name in members}
    network = world.network
    network.wanted = lambda a, b: COORDINATOR in {a, b} or of[a] == of[b]
    launcher = world.launchers[0]
    launcher._placement = lambda: list(world.nodes.values())  # type: ignore[method-assign]
    world.begin()
    session: Any = None

    def rounds(number: int) -> bool:
        nonlocal session
        session = launcher.current
        return session is not None and session.rounds >= number

    assert world.run_until(lambda: launcher.current is not None, 60)
    launcher.current.cadence = Cadence(steps=1)  # every save is drained
    assert world.run_until(lambda: rounds(2), 7200), "the job does not get to its second save"
    before, on_record = (Counter(network.sent), Counter(network.nbytes)), world.counts["record bytes"]
    assert world.run_until(lambda: rounds(2 + SAVES), 7200), "the job does not go on"
    sent, nbytes = (after - then for after, then in zip((network.sent, network.nbytes), before, strict=True))
    newest = max(save for save, handle in session.procs[0].saves.items() if Milestone.STAGED in handle.milestones)
    milestone = Milestone.PROTECTED if nodes > 1 else Milestone.STAGED
    assert session.heard_by_all(newest, milestone), f"{newest} is not {milestone} everywhere"
    others = [name for name in world.nodes if name != COORDINATOR] or [COORDINATOR]
    return Share(
        nodes,
        set_size,
        sum(sent[n] for n in others) / len(others) / SAVES,
        max(sent[n] for n in others) / SAVES,
        sum(nbytes[n] for n in others) / len(others) / SAVES,
        max(nbytes[n] for n in others) / SAVES,
        sent[COORDINATOR] / SAVES,
        nbytes[COORDINATOR] / SAVES,
        (world.counts["record bytes"] - on_record) / SAVES,
        time.process_time() - began,
    )


def plot(shares: list[Share], path: Path) -> None:
    """Messages and bytes over the number of nodes."""
    import matplotlib as mpl  # noqa: PLC0415 - only who draws needs it

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "ckptd"
    from matplotlib import pyplot as plt  # noqa: PLC0415

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    sizes = sorted({s.nodes for s in shares})
    for axis, title, what in zip(axes, ("messages per save", "bytes per save"), ("messages", "nbytes"), strict=True):
        for set_size in sorted({s.set_size for s in shares}):
            some = [s for s in shares if s.set_size == set_size]
            own = [getattr(s, what) for s in some]
            axis.loglog([s.nodes for s in some], own, "o-", label=f"a node, sets of {set_size}")
        largest = [s for s in shares if s.set_size == max(s.set_size for s in shares)]
        own = [getattr(s, f"coordinator_{what}") for s in largest]
        axis.loglog([s.nodes for s in largest], own, "s--", color="grey", label="the coordinator")
        axis.set(title=title, xlabel="nodes", xticks=sizes, xticklabels=[str(size) for size in sizes])
        axis.minorticks_off()
        axis.grid(visible=True, alpha=0.3)
        axis.legend()
    figure.savefig(path, metadata={"Date": None})


def main() -> int:
    """Prints a line for each size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sizes", nargs="*", type=int, default=list(SIZES))
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    print(" nodes  set  messages      most     bytes      most  coordinator        bytes  journal    CPU s")
    shares = []
    for size in args.sizes:
        for set_size in SET_SIZES if size > 1 else SET_SIZES[:1]:
            with once_in_all():
                shares.append(measure(size, set_size=set_size))
            print(shares[-1], flush=True)
    if args.plot:
        plot(shares, args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
