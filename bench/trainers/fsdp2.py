"""A plain FSDP2 loop: dcp.save, which is what such loops and torchtitan call by default, and client.save."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ckptd_client
from bench.trainers import Pair, Way

NEEDS = ""
_WIDTH = 1024


@contextlib.contextmanager
def pairs(nbytes: int, folder: Path) -> Iterator[list[Pair]]:
    """nbytes: of parameters and moments, over all ranks."""
    layers = max(1, nbytes // (3 * 4 * _WIDTH * _WIDTH))
    model = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(layers)))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()

    def own(step: int) -> float:
        began = time.perf_counter()
        found = get_state_dict(model, optimizer)
        dcp.save({"model": found[0], "optimizer": found[1]}, checkpoint_id=folder / f"step-{step}")
        return time.perf_counter() - began

    with ckptd_client.connect("bench-fsdp2") as client:
        state = {"model": model, "optimizer": optimizer}

        def ours(step: int) -> float:
            return client.save(state, step).stall_s

        def settle() -> float:
            client.wait("durable")
            return 0.0

        yield [Pair("FSDP2 loop", Way("dcp.save", own, lambda: 0.0), Way("client.save", ours, settle))]
