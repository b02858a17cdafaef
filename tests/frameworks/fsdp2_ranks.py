"""One rank of a training under FSDP2 that never knew DeepSpeed: loads an export by plain DCP, and goes on from it."""

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.frameworks.zero_model import Model, groups


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def main(source, wanted, settings):
    dist.init_process_group("gloo")
    model = fully_shard(Model())
    optimizer = torch.optim.AdamW(groups(model), lr=0.1)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    planner = dcp.DefaultLoadPlanner(allow_partial_load=settings == "without")
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=source, planner=planner)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)

    model_state, optimizer_state = get_state_dict(model, optimizer)
    found = {f"model.{name}": whole(tensor) for name, tensor in model_state.items()}
    for name, states in optimizer_state["state"].items():
        found |= {f"optimizer.state.{name}.{state}": whole(tensor) for state, tensor in states.items()}
    expected = load_file(wanted)
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor.to(found[name].dtype)), name
    assert [group["lr"] for group in optimizer.param_groups] == ([0.002, 0.004] if settings == "with" else [0.1, 0.004])
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    model(torch.randint(13, (4, 5))).square().mean().backward()
    optimizer.step()
    print("equal:", len(expected), flush=True)
    dist.barrier()
    os._exit(0)  # gloo's threads sometimes abort an orderly end


if __name__ == "__main__":
    main(*sys.argv[1:])
