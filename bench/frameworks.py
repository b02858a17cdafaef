"""``python -m bench.frameworks``: how long a save holds up training: each trainer's own saver, and ckptd under it.

Two ranks on this machine, the same state, saved by both in turn. Stall is of the slowest rank: the call, and what else
of the save training has to wait for. The first save of each is not counted. The bar: at most a third.
"""

import argparse
import importlib
import importlib.metadata
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from bench.node import Node, scratch
from bench.trainers import Pair, Way

TRAINERS = ("deepspeed", "lightning", "megatron", "fsdp2")  # modules of bench.trainers
RANKS, BAR = 2, 1 / 3
_LIMIT_S = 600


def _slowest(seconds: float) -> float:
    found = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found.item()


def _timed(way: Way, step: int) -> float:
    dist.barrier()
    blocked = way.save(step)
    blocked += way.settle()
    return _slowest(blocked)


def _row(pair: Pair, steps: range) -> dict[str, Any]:
    taken = [(_timed(pair.own, step), _timed(pair.ours, step)) for step in steps][1:]
    own, ours = ([one[i] for one in taken] for i in (0, 1))
    return {"framework": pair.framework, "saver": pair.own.name, "own": own, "through": pair.ours.name, "ckptd": ours}


def measure(trainer: str, nbytes: int, repeat: int, folder: Path) -> None:
    """One rank: prints its rows, rank 0's, as JSON."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with importlib.import_module(f"bench.trainers.{trainer}").pairs(nbytes, folder) as found:
        rows = [_row(pair, range(i * 100, i * 100 + repeat + 1)) for i, pair in enumerate(found)]
    if dist.get_rank() == 0:
        print(json.dumps(rows), flush=True)
    dist.barrier()
    os._exit(0)  # gloo's threads may abort an interpreter that ends


def _absent(trainer: str) -> str:
    needs = importlib.import_module(f"bench.trainers.{trainer}").NEEDS
    try:
        importlib.metadata.version(needs or "torch")
    except importlib.metadata.PackageNotFoundError:
        return f"{needs} is not installed (make frameworks-test installs it)"
    return ""


def _run(trainer: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of a trainer, or why there are none."""
    problem = _absent(trainer)
    if problem:
        return [{"framework": trainer, "problem": problem}]
    with scratch(options.store) as (shm, disk):
        node = Node(shm, disk / "store")
        node.start()
        try:
            return _ranks(trainer, options, node, disk / "own")
        finally:
            node.close()
            shutil.rmtree(disk / "own", ignore_errors=True)


def _ranks(trainer: str, options: argparse.Namespace, node: Node, folder: Path) -> list[dict[str, Any]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    place = {"CKPTD_ARENA": str(node.arena), "CKPTD_STORE": str(node.store), "CKPTD_NO_AUTOSTART": "1"}
    shared = {"WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    command = [sys.executable, "-W", "ignore", "-m", "bench.frameworks", "--rank-of", trainer, "--folder", str(folder)]
    command += ["--mib", str(options.mib), "--repeat", str(options.repeat)]
    begun = [
        subprocess.Popen(
            command,
            env=os.environ | place | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        said = begun[0].communicate(timeout=_LIMIT_S)[0]
        rows: list[dict[str, Any]] = json.loads(said.splitlines()[-1])
    except (subprocess.TimeoutExpired, ValueError, IndexError) as error:
        return [{"framework": trainer, "problem": f"did not end well: {error}"}]
    finally:
        for process in begun:
            process.kill()
            process.wait()
    return rows


def _ms(values: list[float]) -> str:
    return f"{statistics.median(values) * 1e3:.0f} ({min(values) * 1e3:.0f}-{max(values) * 1e3:.0f})"


def _table(rows: list[dict[str, Any]], mib: int) -> Table:
    table = Table(title=f"stall of a save, ms; {RANKS} ranks, {mib / RANKS:.0f} MiB each")
    for column in ("framework", "its own saver", "stall", "through", "stall", "ratio", f"<= {BAR:.2f}"):
        table.add_column(column)
    for row in rows:
        if "problem" in row:
            table.add_row(row["framework"], row["problem"])
            continue
        ratio = statistics.median(row["ckptd"]) / statistics.median(row["own"])
        verdict = "met" if ratio <= BAR else "missed"
        table.add_row(
            row["framework"], row["saver"], _ms(row["own"]), row["through"], _ms(row["ckptd"]), f"{ratio:.2f}", verdict
        )
    return table


def main() -> None:
    """Measures all trainers, or those that are named."""
    parser = argparse.ArgumentParser(prog="python -m bench.frameworks", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=TRAINERS, default=TRAINERS)
    parser.add_argument("--mib", type=int, default=512, help="of the state, over all ranks (512)")
    parser.add_argument("--repeat", type=int, default=7, help="saves of each, after the first (7)")
    parser.add_argument("--store", type=Path, default=Path("bench/out"), help="a directory on the disk")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        measure(options.rank_of, options.mib << 20, options.repeat, options.folder)
    rows = [row for trainer in options.only for row in _run(trainer, options)]
    Console(width=140).print(_table(rows, options.mib))


if __name__ == "__main__":
    main()
