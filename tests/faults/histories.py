"""``python -m tests.faults.histories COUNT SEED``: histories of one job on real daemons; no load may mix two runs."""

import argparse
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

from tests.faults.campaigns import OverdueError, ended_by_signals, no_longer_than
from tests.faults.history_plan import Event, History, history
from tests.faults.history_world import Run, World
from tests.faults.nodes.clusters import Zygote, a_cluster

_HISTORY_S = 300
_LINGER_S = 5.0


@dataclass
class Outcome:
    """What became of a history."""

    history: History
    runs: list[Run] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def __str__(self) -> str:
        """One line for the events, one for each load, one for each finding."""
        lines = [f"seed {self.history.seed} ({self.seconds:.1f} s) {self.history}"]
        lines += [f"  run {run.number} on {run.homes}: {str(run.verdict)[:300]}" for run in self.runs]
        return "\n".join([*lines, *(f"  FINDING {text}" for text in self.findings)])


def play(seed: int, zygote: Zygote) -> Outcome:
    """The history of this seed on daemons of its own."""
    outcome, began = Outcome(history(seed)), time.monotonic()
    with a_cluster(zygote, CKPTD_REDUNDANCY=outcome.history.scheme) as cluster:
        world = World(cluster)
        outcome.runs, outcome.findings = world.runs, world.findings
        try:
            with no_longer_than(_HISTORY_S):
                for event in outcome.history.events:
                    happen(world, event)
                world.end()
        except (OverdueError, AssertionError, OSError) as error:
            outcome.findings.append(f"stuck: {type(error).__name__}: {error}")
    outcome.seconds = time.monotonic() - began
    return outcome


def happen(world: World, event: Event) -> None:
    """One event of a history."""
    match event.name:
        case "start":
            world.start(event.nodes, steps=event.steps, until=event.until, takeover=event.takeover)
        case "linger":
            for run in [run for run in world.runs if run.alive and run.homes == event.nodes][:1]:
                world.save(run, event.steps, "durable", _LINGER_S)
        case "end" | "start-over" | "unmount" | "remount":
            getattr(world, event.name.replace("-", "_"))()
        case _:
            getattr(world, event.name)(event.nodes)


def summary(outcomes: list[Outcome]) -> str:
    """Counts over all histories."""
    verdicts = [run.verdict for outcome in outcomes for run in outcome.runs]
    kinds = Counter(verdict.kind for verdict in verdicts)
    errors = Counter(kind for verdict in verdicts for kind in set(verdict.errors))
    findings = Counter(text.removeprefix("run ").lstrip("0123456789: ").partition(":")[0] for text in all_of(outcomes))
    lines = [f"{len(outcomes)} histories, {len(verdicts)} loads, {kinds['mixed']} mixed"]
    for name, counts in (("loads", kinds), ("errors", errors), ("findings", findings)):
        lines.append(f"{name}: " + (", ".join(f"{kind} {count}" for kind, count in sorted(counts.items())) or "none"))
    return "\n".join(lines)


def all_of(outcomes: list[Outcome]) -> list[str]:
    """Every finding."""
    return [text for outcome in outcomes for text in outcome.findings]


def main() -> int:
    """The exit status is 1 when there is a finding."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int)
    parser.add_argument("first_seed", type=int, nargs="?", default=0)
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no history after so long")
    args = parser.parse_args()
    outcomes: list[Outcome] = []
    began = time.monotonic()
    with ended_by_signals():
        zygote = Zygote()
        try:
            for seed in range(args.first_seed, args.first_seed + args.count):
                if time.monotonic() - began > 60 * args.minutes:
                    print(f"stopped after {args.minutes:g} minutes, before seed {seed}")
                    break
                outcomes.append(play(seed, zygote))
                print(outcomes[-1], flush=True)
        finally:
            zygote.close()
            print(summary(outcomes), f"\n{time.monotonic() - began:.0f} s", flush=True)
    return 1 if all_of(outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
