"""``python -m tests.simulation.campaign COUNT NODES FIRST_SEED``: many seeds in processes; names each that fails."""

import argparse
import gc
import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from tests.simulation.run import BrokenError, Outcome, play
from tests.states import missed


def attempt(seed: int, nodes: int, options: dict[str, Any]) -> Outcome | tuple[int, str, str]:
    """What became of a seed: its outcome, or seed, problem and transcript."""
    gc.freeze()
    gc.set_threshold(100_000, 20, 50)  # worlds live as long as their play
    try:
        return play(seed, nodes=nodes, **options)
    except BrokenError as error:
        return (seed, error.problem, str(error))


def main() -> int:
    """The exit status is 1 when some seed fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int)
    parser.add_argument("nodes", type=int)
    parser.add_argument("first_seed", type=int, nargs="?", default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--scheme", choices=["none", "xor", "double"])
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--compound", type=float, default=0.0, help="chance that a fault is several, at a coordinator")
    parser.add_argument("--rare", type=float, default=60.0, help="seconds between two rare faults, on average; 0: none")
    parser.add_argument("--slower", type=float, default=0.0, help="what daemons do takes time; 1: as on a machine")
    parser.add_argument("--relayed-from", type=int, default=0, help="so many nodes have leaders, with --slower")
    parser.add_argument("--minutes", type=float, default=0.0, help="begin no seed after so long")
    parser.add_argument("--all-rows", action="store_true", help="fails when a row of the core's tables was never taken")
    parser.add_argument("--save", help="a directory for the transcripts of failing seeds")
    args = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":  # as replay has it
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.simulation.campaign", *sys.argv[1:]])  # noqa: S606 - this very program
    began, played, failed, events, slowest, cpu = time.monotonic(), 0, 0, 0, 0.0, 0.0
    totals: dict[str, Counter[str]] = {name: Counter() for name in ("faults", "told", "counts", "rows")}
    with ProcessPoolExecutor(args.jobs) as pool:
        seeds = range(args.first_seed, args.first_seed + args.count)
        options = {name: getattr(args, name) for name in ("scheme", "seconds", "compound", "slower", "relayed_from")}
        options["rare_every_s"] = args.rare
        futures = [pool.submit(attempt, seed, args.nodes, options) for seed in seeds]
        for future in futures:
            if args.minutes and time.monotonic() - began > 60 * args.minutes and future.cancel():
                continue
            result = future.result()
            played += 1
            if isinstance(result, Outcome):
                events += result.events
                slowest, cpu = max(slowest, result.cpu_s), cpu + result.cpu_s
                for name, total in totals.items():
                    total.update(getattr(result, name))
                continue
            failed += 1
            seed, problem, transcript = result
            print(f"FAILED seed {seed}: {problem[:300]}", flush=True)
            if args.save:
                Path(args.save).mkdir(parents=True, exist_ok=True)
                Path(args.save, f"seed-{seed}-nodes-{args.nodes}.txt").write_text(transcript)
    wall = time.monotonic() - began
    took = (
        f"{events} events, {wall:.1f} s; of CPU {cpu / max(played - failed, 1):.2f} s a seed, slowest {slowest:.2f} s"
    )
    print(f"{played} seeds x {args.nodes} nodes: {failed} failed; {took}")
    rows = totals.pop("rows")
    for name, total in totals.items():
        print(f"{name}:", ", ".join(f"{key} {number}" for key, number in sorted(total.items())))
    absent = missed(rows)
    print(f"{len(rows)} rows of the core's tables were taken; not taken: {len(absent)}", *absent, sep="\n  ")
    return 1 if failed or (args.all_rows and absent) else 0


if __name__ == "__main__":
    sys.exit(main())
