"""``python -m bench.nodes``: a job of 64 real daemons on this machine: it saves, loses a node of each set, loads.

Exit status 1 when a bar is missed, 2 when a phase took too long or a rank read other bytes than it had saved.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.nodes.job import Shape
from bench.nodes.measure import Row, run
from tests.faults.campaigns import ended_by_signals


def main() -> int:
    """Measures, and prints each figure when it is there, and the table at the end."""
    parser = argparse.ArgumentParser(prog="python -m bench.nodes", description=__doc__)
    parser.add_argument("nodes", nargs="?", type=int, default=64)
    parser.add_argument("--set-size", type=int, default=8)
    parser.add_argument("--mib", type=int, default=8, help="of state of each rank (8)")
    parser.add_argument("--patience", type=float, default=120.0, help="seconds that a phase may take (120)")
    parser.add_argument("--idle", type=float, default=20.0, help="seconds without a message (20)")
    parser.add_argument("--memory", default="/dev/shm", help="a directory on tmpfs, for arenas")  # noqa: S108
    parser.add_argument("--store", help="a directory on a disk; by default that of temporary files")
    options = parser.parse_args()
    shape = Shape(options.nodes, options.set_size, options.mib << 20, options.patience)
    try:
        with (
            ended_by_signals(),
            tempfile.TemporaryDirectory(prefix="ckptd-nodes-", dir=options.memory) as base,
            tempfile.TemporaryDirectory(prefix="ckptd-nodes-", dir=options.store) as store,
        ):
            rows = run(Path(base), Path(store), shape, idle_s=options.idle, show=_show)
    except RuntimeError as error:
        print(f"failed: {error}", file=sys.stderr)
        return 2
    title = f"{shape.nodes} real nodes, a rank of {options.mib} MiB each"
    table = Table("what", "measured", "bar", "", "note", title=title)
    for row in rows:
        bar = "" if row.bar is None else f"<= {row.bar:g} {row.unit}"
        table.add_row(row.name, f"{row.value:.2f} {row.unit}", bar, _verdict(row), row.note)
    Console().print(table)
    return int(any(row.missed for row in rows))


def _show(row: Row) -> None:
    print(f"{row.name}: {row.value:.2f} {row.unit} {_verdict(row)}", flush=True)


def _verdict(row: Row) -> str:
    if row.bar is None:
        return ""
    return "missed" if row.missed else "kept"


if __name__ == "__main__":
    sys.exit(main())
