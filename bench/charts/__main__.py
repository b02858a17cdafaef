"""``python -m bench.charts [--nodes N ...]``: measures constants, plays jobs, writes docs/charts.md and its charts.

``--draw`` writes page and charts again from the figures that lie beside them. ``--more N ...`` plays larger jobs with
the constants of these figures and adds them.
"""

import argparse
import datetime as dt
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path

import msgspec

from bench.charts.figures import FIGURES, Data, draw, read, write
from bench.charts.page import PAGE, markdown
from bench.charts.values import Constants, Stated
from ckptd.shared.format.schemes import Scheme
from tests.simulation.milestones import Job, Times

SIZES = (4, 16, 64, 256, 1000)
SCHEMES = (Scheme.NONE, Scheme.XOR, Scheme.DOUBLE)


def play(nodes: int, scheme: Scheme, constants: Constants, stated: Stated) -> Times:
    """One job in a process of its own. Raises CalledProcessError."""
    job = Job(nodes, scheme, constants.costs, constants.hardware(stated, nodes))
    command = [sys.executable, "-m", "tests.simulation.milestones"]
    done = subprocess.run(command, input=msgspec.json.encode(job), stdout=subprocess.PIPE, check=True)
    return msgspec.json.decode(done.stdout, type=Times)


def plays(sizes: Iterable[int], schemes: Iterable[Scheme], constants: Constants, stated: Stated) -> list[Times]:
    """All, one after the other, with a line for each."""
    schemes, found = list(schemes), []
    for nodes in sizes:
        for scheme in schemes:
            began = time.monotonic()
            found.append(play(nodes, scheme, constants, stated))
            one = found[-1]
            protected = f"{one.protected_s:8.2f}" if one.protected_s is not None else "       -"
            print(
                f"{nodes:6d} {scheme:8s} staged {one.staged_s:7.2f} protected {protected} durable {one.durable_s:7.2f}"
                f" restored {one.restored_s:7.2f} s  ({time.monotonic() - began:.0f} s)",
                flush=True,
            )
    return found


def more(data: Data, sizes: list[int], schemes: list[Scheme]) -> Data:
    """Larger jobs, with constants of the same run; only their commits are measured now."""
    from bench.charts.constants import commits  # noqa: PLC0415 - see main

    missing = [nodes for nodes in sizes if str(nodes) not in data.constants.commit]
    known = data.constants.commit | commits(missing, data.stated)
    constants = replace(data.constants, commit=known).rounded()
    found = plays(sizes, schemes, constants, data.stated)
    new = {(one.nodes, one.scheme) for one in found}
    kept = [one for one in data.plays if (one.nodes, one.scheme) not in new]
    ordered = sorted([*kept, *found], key=lambda one: (one.nodes, [str(s) for s in Scheme].index(one.scheme)))
    return Data(data.taken, data.machine, data.stated, constants, ordered)


def main() -> None:
    """Exit status 1 when a play does not come to its end."""
    parser = argparse.ArgumentParser(prog="python -m bench.charts", description=__doc__)
    parser.add_argument("--nodes", nargs="*", type=int, default=list(SIZES))
    parser.add_argument("--schemes", nargs="*", type=Scheme, default=list(SCHEMES))
    parser.add_argument("--docs", type=Path, default=Path("docs"), help="where page and charts are written (docs)")
    parser.add_argument("--more", nargs="+", type=int, default=[], metavar="N")
    parser.add_argument("--draw", action="store_true")
    options = parser.parse_args()
    folder = options.docs / "charts"
    folder.mkdir(parents=True, exist_ok=True)
    if options.more:
        data = more(read(folder), options.more, options.schemes)
    elif options.draw:
        data = read(folder)
    else:
        from bench.__main__ import machine  # noqa: PLC0415 - what only draws needs no torch
        from bench.charts.constants import measure  # noqa: PLC0415

        stated, about = Stated(), machine()
        constants = measure(options.nodes, stated).rounded()
        print(*(f"{name}: {value}" for name, value in asdict(constants).items()), sep="\n", flush=True)
        taken = dt.datetime.now(dt.UTC).date().isoformat()
        data = Data(taken, about, stated, constants, plays(options.nodes, options.schemes, constants, stated))
    write(folder, data)
    draw(folder, data)
    (options.docs / PAGE).write_text(markdown(data), encoding="utf-8")
    print(f"written: {options.docs / PAGE}, {', '.join(str(folder / name) for name in FIGURES)}")


if __name__ == "__main__":
    main()
