"""``python -m bench.large [NODES ...]``: a line for each phase and size."""

import argparse
import sys
import tempfile
from pathlib import Path

from bench.large.measure import run

_SIZES = (100, 250, 500, 1000)


def main() -> int:
    """Measures the sizes one after the other."""
    parser = argparse.ArgumentParser(prog="python -m bench.large", description=__doc__)
    parser.add_argument("nodes", nargs="*", type=int, default=list(_SIZES))
    parser.add_argument("--patience", type=float, default=300.0, help="seconds that a phase may take (300)")
    parser.add_argument("--idle", type=float, default=10.0, help="seconds without a message (10)")
    parser.add_argument("--real", type=int, default=2, help="daemons that are not played (2)")
    options = parser.parse_args()
    failed = 0
    for nodes in options.nodes:
        with tempfile.TemporaryDirectory(prefix="ckptd-large-", dir="/dev/shm") as base:
            try:
                run(Path(base), nodes, patience_s=options.patience, idle_s=options.idle, real=options.real)
                long = [line for log in Path(base).glob("*.log") for line in log.read_text().splitlines()]
                print(*(line for line in long if " long turn " in line), sep="\n", flush=True)
            except RuntimeError as error:
                failed += 1
                print(f"failed: {error}", flush=True)
                for log in sorted(Path(base).glob("*.log")):
                    print(log.name, *log.read_text().splitlines()[-8:], sep="\n  ", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
