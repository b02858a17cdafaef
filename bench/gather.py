"""``python -m bench.gather``: whole tensors from an FSDP2 model's shards: client.gather and torch's own ways.

Ranks on this machine, over gloo, on CPUs. Seconds are of the slowest rank, memory is the most that one rank had beyond
what it had before: with the whole tensors, where it gets them. The bars: no slower than the best of torch's ways.
"""

import argparse
import ctypes
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from bench import torchrun
from bench.__main__ import parse_size

_COLUMNS = 256
_LIMIT_S = 900
_OURS = "ckptd"
_CASES = {  # destination of the tensors: the ways to gather them
    "to all ranks": (_OURS, "full_tensor() of each", "get_model_state_dict(full_state_dict)"),
    "to rank 0": (_OURS, "get_model_state_dict(full_state_dict, cpu_offload)"),
    "to rank 0, one after the other": (_OURS, "full_tensor() of each, dropped"),
}


def _model(nbytes: int, tensors: int) -> nn.Module:
    """A model of that many fp32 matrices, whose rows all ranks share."""
    rows = max(1, nbytes // (4 * _COLUMNS * tensors))
    model = nn.Module()
    model.weights = nn.ParameterList(nn.Parameter(torch.full((rows, _COLUMNS), float(i))) for i in range(tensors))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def _ways(model: nn.Module) -> dict[tuple[str, str], Callable[[], Any]]:
    from ckptd_client._gather import Gathering, Groups, Order  # noqa: PLC0415 - what Client.gather calls

    groups, state = Groups(), model.state_dict()

    def one_after_the_other(found: Any) -> None:
        for _ in found:
            pass

    calls = (
        lambda: Gathering(state, Order(), groups).wait(),
        lambda: {name: value.full_tensor() for name, value in state.items()},
        lambda: get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)),
        lambda: Gathering(state, Order(to=0), groups).wait(),
        lambda: get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)),
        lambda: one_after_the_other(Gathering(state, Order(to=0), groups)),
        lambda: one_after_the_other(value.full_tensor() for value in state.values()),
    )
    names = [(case, way) for case, ways in _CASES.items() for way in ways]
    return dict(zip(names, calls, strict=True))


def _resident(key: str) -> int:
    """VmRSS, or VmHWM, the most that it was, of this process, in bytes."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status[key].split()[0]) << 10


def _measured(call: Callable[[], Any]) -> tuple[float, float, int]:
    """(seconds of the slowest rank, CPU seconds of all, the largest growth of a rank's memory in bytes)."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # else memory that an earlier call freed would hide growth
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before = _resident("VmRSS")
    dist.barrier()
    began, cpu = time.perf_counter(), time.process_time()
    found = call()
    mine = torch.tensor([time.perf_counter() - began, float(_resident("VmHWM") - before)], dtype=torch.float64)
    spent = torch.tensor(time.process_time() - cpu, dtype=torch.float64)
    del found
    dist.all_reduce(mine, dist.ReduceOp.MAX)
    dist.all_reduce(spent)
    return float(mine[0]), float(spent), int(mine[1])


def rank_main(options: argparse.Namespace) -> None:
    """Runs one rank; rank 0 prints a line of JSON for each measurement."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ways = _ways(_model(options.nbytes, options.rank_of))
    for turn in range(options.repeat + 1):
        for (case, way), call in ways.items():
            seconds, cpu, nbytes = _measured(call)
            if dist.get_rank() == 0 and turn:  # the first is a warm-up
                print(json.dumps([case, way, seconds, cpu, nbytes]), flush=True)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # FSDP2 with gloo now and then aborts at the end of the interpreter, when all is done


def _run(options: argparse.Namespace, tensors: int) -> dict[tuple[str, str], list[tuple[float, float, int]]]:
    command = [sys.executable, "-W", "ignore", "-m", "bench.gather", "--rank-of", str(tensors)]
    command += ["--nbytes", str(options.nbytes), "--repeat", str(options.repeat)]
    with tempfile.TemporaryDirectory(prefix="ckptd-bench-") as folder:
        problem = torchrun.run(command, options.ranks, Path(folder), _LIMIT_S, {})
        if problem:
            raise RuntimeError(problem)
        rows = [line for line in (Path(folder) / "log").read_text().splitlines() if line.startswith('["')]
    found: dict[tuple[str, str], list[tuple[float, float, int]]] = {}
    for case, way, *numbers in map(json.loads, rows):
        found.setdefault((case, way), []).append(tuple(numbers))
    return found


def main() -> None:
    """Prints a table; exit code 1 when a bar is missed."""
    parser = argparse.ArgumentParser(prog="python -m bench.gather", description=__doc__)
    parser.add_argument("--nbytes", type=parse_size, default=1 << 30, help="of the whole state (1G)")
    parser.add_argument("--tensors", type=int, nargs="+", default=[300, 10_000])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--rank-of", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        rank_main(options)
    table = Table("tensors", "", "way", "seconds", "CPU s, all ranks", "memory", "")
    missed = False
    for tensors in options.tensors:
        found = _run(options, tensors)
        for case, ways in _CASES.items():
            medians = {way: statistics.median(numbers[0] for numbers in found[case, way]) for way in ways}
            slower = medians[_OURS] > min(medians[way] for way in ways[1:])
            missed |= slower
            for way in ways:
                cpu = statistics.median(numbers[1] for numbers in found[case, way])
                most = max(numbers[2] for numbers in found[case, way])
                bar = ("missed" if slower else "met") if way == _OURS else ""
                table.add_row(
                    f"{tensors}", case, way, f"{medians[way]:.2f}", f"{cpu:.2f}", f"{most / 2**20:.0f} MiB", bar
                )
    Console(width=140).print(table)
    sys.exit(int(missed))


if __name__ == "__main__":
    main()
