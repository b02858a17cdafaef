"""``python -m bench``: yardsticks, ckptd's speed budget and its peers in one run; tables, JSON and a picture."""

import argparse
import contextlib
import os
import platform
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from bench import mesh_report, pages, peer_report, report
from bench.launch import Job
from bench.node import OUT, Node, scratch
from bench.peers import KINDS
from bench.report import Report
from bench.run import SECTIONS, STATE_NBYTES, Run

_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def main() -> None:
    """Runs the chosen sections, prints and writes their results, and removes all other files."""
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    torch.set_num_threads(options.threads)
    console = Console(width=None if sys.stdout.isatty() else 160)
    found = Report(machine(), {name: str(value) for name, value in vars(options).items()})
    run = Run(found, options.nbytes, options.repeat, frozenset(options.only), console)
    with scratch(options.store) as (shm_dir, disk_dir):
        with contextlib.closing(Node(shm_dir, disk_dir / "store")) as node:
            if run.only - {"peers", "mesh", "status", "large"}:
                run.rows(node, shm_dir, disk_dir)
            if "mesh" in run.only:
                run.mesh(node)
        if "status" in run.only:
            run.status(shm_dir)
        if "large" in run.only:
            run.large(shm_dir)
        if "peers" in run.only:
            kinds = [kind for kind in KINDS if not options.peers or kind.name in options.peers]
            run.peers(Job(options.nbytes, options.repeat, options.threads, shm_dir, disk_dir), kinds, options.ranks)
    report.show(found, options.nbytes, console)
    OUT.mkdir(parents=True, exist_ok=True)
    report.write_json(found, OUT / "results.json")
    report.draw(found, OUT / "budget.svg")
    for directory in filter(None, (OUT, options.docs)):
        peer_report.draw(found.peers, directory / "bench-peers.svg")
        mesh_report.draw(found.mesh, directory / "bench-mesh.svg")
    if options.docs:
        pages.write(found, options.docs / "bench.md")
    console.print(f"written: {OUT}/results.json, {OUT}/*.svg")


def parse_size(text: str) -> int:
    """Bytes of "256M", "2G" or a plain number. Raises ValueError otherwise."""
    unit = _UNITS.get(text[-1:].upper())
    return int(text) if unit is None else int(text[:-1]) * unit


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--nbytes", type=parse_size, default=STATE_NBYTES, help="size of the realistic state (2G)")
    parser.add_argument("--repeat", type=int, default=5, help="measurements of each thing (5)")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of copies and yardsticks (1)")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS, help="sections to run (all)")
    parser.add_argument("--store", type=Path, default=OUT, help=f"directory on the disk to measure ({OUT})")
    parser.add_argument("--peers", nargs="+", choices=[kind.name for kind in KINDS], help="ways of saving to run (all)")
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2], help="numbers of ranks that save (1 2)")
    parser.add_argument("--docs", type=Path, help="directory of bench.md, whose tables and pictures it replaces")
    return parser.parse_args()


def machine() -> dict[str, Any]:
    """The machine of the measurements."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cores": os.cpu_count(),
        "memory_gib": round(pages / 2**30, 1),
        "kernel": platform.release().partition("-")[0],
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "load": round(os.getloadavg()[0], 1),
    }


if __name__ == "__main__":
    main()
