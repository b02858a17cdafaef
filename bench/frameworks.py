"""``python -m bench.frameworks``: how long a save delays training: each trainer's own saver, and ckptd.

Two ranks on this machine, the same state, saved by both in turn. Stall is of the slowest rank: the call, and what else
of the save training has to wait for. The first save of each is not counted. The bar: at most a third.
"""

import argparse
import contextlib
import importlib
import importlib.metadata
import json
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bench import pages, torchrun
from bench.__main__ import parse_size
from bench.measure import Series, markdown_table, text
from bench.node import OUT, Node, scratch
from bench.trainers import TRAININGS

COLUMNS = ("framework", "its own saver", "stall ms", "through", "stall ms", "ratio", "bar")
RANKS, BAR = 2, 1 / 3
_LIMIT_S = 600


@dataclass(frozen=True, slots=True)
class Result:
    """A row: the saver, and milliseconds of delay of training. why: the reason if it did not run."""

    framework: str
    savers: tuple[str, str] = ("", "")
    own: Series | None = None
    ours: Series | None = None
    why: str = ""

    @property
    def cells(self) -> list[str]:
        """The row under COLUMNS."""
        if self.own is None or self.ours is None:
            return [self.framework, self.why, *[""] * (len(COLUMNS) - 2)]
        ratio = self.ours.median / self.own.median
        own, ours = (text(series).removesuffix(" ms") for series in (self.own, self.ours))
        verdict = "met" if ratio <= BAR else "missed"
        return [self.framework, self.savers[0], own, self.savers[1], ours, f"{ratio:.2f}", verdict]


def measure(training: str, nbytes: int, repeat: int, store: Path) -> list[Result]:
    """The rows of a training, or the reason why there are none."""
    needs = importlib.import_module(f"bench.trainers.{training.partition('.')[0]}").NEEDS
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version(needs or "torch")
        return _run(training, nbytes, repeat, store)
    return [Result(training, why=f"{needs} is not installed: see make frameworks-test")]


def _run(training: str, nbytes: int, repeat: int, store: Path) -> list[Result]:
    with scratch(store) as (shm, disk), contextlib.closing(Node(shm, disk / "store")) as node:
        node.store.mkdir()
        node.start()
        result = disk / "result"
        command = [sys.executable, "-W", "ignore", "-m", "bench.trainers.rank", training]
        command += ["--nbytes", str(nbytes), "--repeat", str(repeat)]
        command += ["--folder", str(disk / "saved"), "--result", str(result)]
        places = {"CKPTD_ARENA": str(node.arena), "CKPTD_STORE": str(node.store), "CKPTD_NO_AUTOSTART": "1"}
        problem = torchrun.run(command, RANKS, disk, _LIMIT_S, places)
        if problem:
            shutil.copy(disk / "log", OUT / f"{training}.log")
            return [Result(training, why=f"{problem} ({OUT}/{training}.log)")]
        return [_result(row) for row in json.loads(result.read_text())]


def _result(row: dict[str, list[object]]) -> Result:
    (name, own), (other, ours) = row["own"], row["ours"]
    own, ours = (Series("s", tuple(values)).scaled(1e3, "ms") for values in (own, ours))
    return Result(row["framework"], (name, other), own, ours)


def _table(results: Iterable[Result], title: str) -> Table:
    table = Table(*COLUMNS, title=title, title_justify="left")
    for result in results:
        table.add_row(*map(escape, result.cells))
    return table


def _write(results: Sequence[Result], title: str, page: Path) -> None:
    pages.put(page, "trainers", f"{title}:\n\n" + markdown_table(COLUMNS, [result.cells for result in results]))


def main() -> None:
    """Measures all trainings, or the named ones."""
    parser = argparse.ArgumentParser(prog="python -m bench.frameworks", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=TRAININGS, default=TRAININGS)
    parser.add_argument("--nbytes", type=parse_size, default=512 << 20, help="of the state, over all ranks (512M)")
    parser.add_argument("--repeat", type=int, default=7, help="saves of each, after the first (7)")
    parser.add_argument("--store", type=Path, default=OUT, help=f"a directory on the disk ({OUT})")
    parser.add_argument("--docs", type=Path, help="directory of bench.md, whose table of trainers it replaces")
    options = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    results = [row for name in options.only for row in measure(name, options.nbytes, options.repeat, options.store)]
    title = f"{RANKS} ranks, a state of {options.nbytes >> 20} MiB, {options.repeat} saves of each"
    Console(width=140).print(_table(results, title))
    if options.docs:
        _write(results, title, options.docs / "bench.md")


if __name__ == "__main__":
    main()
