"""``python -m bench.interruptions``: ``drain_every="auto"`` in weeks of the 405B shape with published failures.

In one run: measures what a core takes for a copy, digests, parity, a packet and a commit; plays one job of ``--nodes``
nodes, whose milestones are its costs; plays 54 days of that job with 419 failures, once left to itself and once for
each fixed interval; prints constants and figures. Exit status 1 when a bar is missed: an ETTR within 2 % of the best
fixed interval, at most 0.5 % of the time for checkpoints.
"""

import argparse
import sys
from dataclasses import asdict

from bench.charts.__main__ import play as played
from bench.charts.constants import measure
from bench.charts.values import Stated
from ckptd.history.intervals import Costs
from ckptd.shared.format.schemes import Scheme
from tests.simulation.interruptions import INTERRUPTIONS, RANK_NBYTES, START_S, STEP_S, STORE_SHARE, play


def measured(nodes: int) -> Costs:
    """Of a job of so many nodes whose ranks have as many bytes as those of the 405B shape. Prints what it measures."""
    stated = Stated(nbytes=RANK_NBYTES)
    constants = measure([nodes], stated).rounded()
    print("measured:", *(f"  {name}: {value}" for name, value in asdict(constants).items()), sep="\n")
    print("stated:", *(f"  {name}: {value}" for name, value in asdict(stated).items()), sep="\n", flush=True)
    times = played(nodes, Scheme.XOR, constants, stated)
    assert times.protected_s is not None  # noqa: S101 - xor protects
    print(
        f"{nodes} nodes: staged {times.staged_s:.3f} s, protected {times.protected_s:.2f} s, durable "
        f"{times.durable_s:.2f} s, restored {times.restored_s:.2f} s; of these the copy takes "
        f"{RANK_NBYTES / constants.copy_bytes_per_s:.4f} s, the stall",
        flush=True,
    )
    return Costs(
        step_s=STEP_S, stall_s=RANK_NBYTES / constants.copy_bytes_per_s, usable_s=times.protected_s,
        drain_s=times.durable_s, restart_s=START_S + times.restored_s, store_share=STORE_SHARE,
    )  # fmt: skip


def main() -> int:
    """See above."""
    parser = argparse.ArgumentParser(prog="python -m bench.interruptions", description=__doc__)
    parser.add_argument("--nodes", type=int, default=1000, help="of the job whose milestones are the costs (1000)")
    parser.add_argument("--failures", type=int, default=INTERRUPTIONS)
    options = parser.parse_args()
    found = play(measured(options.nodes), failures=options.failures)
    print(found)
    for bar in found.missed():
        print(f"MISSED: {bar}")
    return int(bool(found.missed()))


if __name__ == "__main__":
    sys.exit(main())
