"""A plain FSDP2 loop: dcp.save, which is what such loops and torchtitan call by default, and client.save."""

from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ckptd_client
from bench.trainers import Measure, Pair, Way, at_once, timed

NEEDS = ""
_WIDTH = 1024


def loop(nbytes: int, folder: Path, measure: Measure) -> None:
    """nbytes: of parameters and moments, over all ranks."""
    layers = max(1, nbytes // (3 * 4 * _WIDTH * _WIDTH))
    model = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(layers)))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()

    def own(step: int) -> None:
        found = get_state_dict(model, optimizer)
        dcp.save({"model": found[0], "optimizer": found[1]}, checkpoint_id=folder / f"step-{step}")

    with ckptd_client.connect("bench-fsdp2") as client:
        state = {"model": model, "optimizer": optimizer}

        def settle() -> float:
            client.wait("durable")
            return 0.0

        stock = Way("dcp.save", lambda step: timed(lambda: own(step)), at_once)
        measure(Pair("FSDP2 loop", stock, Way("client.save", lambda step: client.save(state, step).stall_s, settle)))
