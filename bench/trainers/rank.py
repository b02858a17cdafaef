"""``python -m bench.trainers.rank TRAINING``: one rank of a training's rows; rank 0 writes its measurements as JSON."""

import argparse
import importlib
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.trainers import TRAININGS, Pair, Way


def _slowest(seconds: float) -> float:
    found = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found.item()


def _stall(way: Way, step: int) -> float:
    """Seconds of the slowest rank, after earlier saves have been written back."""
    os.sync()
    dist.barrier()
    blocked = way.save(step)
    blocked += way.settle()
    return _slowest(blocked)


def _row(pair: Pair, steps: Iterable[int]) -> dict[str, Any]:
    """Measures both in turns, without the first save of each, which also waits for memory."""
    taken = [(_stall(pair.own, step), _stall(pair.ours, step)) for step in steps][1:]
    own, ours = zip(*taken, strict=True)
    return {"framework": pair.framework, "own": [pair.own.name, own], "ours": [pair.ours.name, ours]}


def main() -> None:
    """Runs beside the other ranks, with the variables that torchrun sets."""
    parser = argparse.ArgumentParser(prog="python -m bench.trainers.rank", description=__doc__)
    parser.add_argument("training", choices=TRAININGS)
    parser.add_argument("--nbytes", type=int, required=True)
    parser.add_argument("--repeat", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--result", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows: list[dict[str, Any]] = []

    def measure(pair: Pair) -> None:
        first = 1000 * (len(rows) + 1)  # no step is saved twice
        rows.append(_row(pair, range(first, first + options.repeat + 1)))

    module, name = options.training.split(".")
    getattr(importlib.import_module(f"bench.trainers.{module}"), name)(options.nbytes, options.folder, measure)
    if os.environ["RANK"] == "0":  # trainers end the process group
        options.result.write_text(json.dumps(rows))
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort an interpreter that ends


if __name__ == "__main__":
    main()
