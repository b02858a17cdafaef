"""``python -m tests.simulation.replay SEED --nodes N``: plays one seed again and prints its story if it fails."""

import argparse
import os
import sys

from tests.simulation.run import BrokenError, play


def main() -> int:
    """The exit status is 1 when a promise is broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--scheme", choices=["none", "xor", "double"])
    parser.add_argument("--set-size", type=int)
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--fault-every", type=float, default=12.0)
    parser.add_argument("--compound", type=float, default=0.0)
    parser.add_argument("--rare", type=float, default=0.0, help="seconds between two rare faults; 0: none")
    parser.add_argument("--slower", type=float, default=0.0, help="what daemons do takes time; 1: as on a machine")
    parser.add_argument("--relayed-from", type=int, default=0, help="so many nodes have leaders, with --slower")
    parser.add_argument("--all", action="store_true", help="the whole transcript, not its end")
    parser.add_argument("--traceback", action="store_true", help="also where it was noticed")
    args = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":  # sets of names must have the same order again
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.simulation.replay", *sys.argv[1:]])  # noqa: S606 - this very program
    try:
        outcome = play(
            args.seed,
            nodes=args.nodes,
            scheme=args.scheme,
            set_size=args.set_size,
            seconds=args.seconds,
            fault_every_s=args.fault_every,
            compound=args.compound,
            rare_every_s=args.rare,
            slower=args.slower,
            relayed_from=args.relayed_from,
            keep=args.all,
        )
    except BrokenError as error:
        print(error)
        if args.traceback:
            raise
        return 1
    print(outcome)
    print("faults:", outcome.faults)
    print("counts:", outcome.counts)
    print("messages:", outcome.messages)
    return 0


if __name__ == "__main__":
    sys.exit(main())
