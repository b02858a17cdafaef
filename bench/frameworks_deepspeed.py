"""Stall of engine.save_checkpoint on two ranks: DeepSpeed's own saver, and ckptd attached to the same engine.

One rank of it: ``python -m bench.frameworks_deepspeed STORE`` prints a line of JSON on rank 0.
"""

import json
import os
import shutil
import statistics
import sys
import time

os.environ |= {"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"}

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

from ckptd_client.integrations import deepspeed as integration

SAVES, WIDTH, LAYERS = 5, 2048, 6


def main() -> None:
    """Saves by turns of the two ways would share an engine's hooks: first all of the one, then all of the other."""
    store = sys.argv[1]
    deepspeed.init_distributed("gloo")
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    step(engine)
    stock = [timed(engine, os.path.join(store, "stock")) for _ in range(SAVES)]
    with integration.attach(engine, job="bench", store=os.path.join(store, "ckptd")) as attached:
        ours = []
        for _ in range(SAVES):
            ours.append(timed(engine, os.path.join(store, "ours")))
            attached.client.wait("durable")
    if dist.get_rank() == 0:
        rows = {"default_s": statistics.median(stock[1:]), "ckptd_s": statistics.median(ours[1:])}
        print(json.dumps({"framework": "DeepSpeed, ZeRO-2", "nbytes": nbytes(os.path.join(store, "stock")), **rows}))
    dist.barrier()
    dist.destroy_process_group()


def step(engine: deepspeed.DeepSpeedEngine) -> None:
    """One of training."""
    engine.backward(engine(torch.randn(1, WIDTH).bfloat16()).float().square().mean())
    engine.step()


def timed(engine: deepspeed.DeepSpeedEngine, out: str) -> float:
    """Seconds for which the save kept training."""
    step(engine)
    if dist.get_rank() == 0:
        shutil.rmtree(out, ignore_errors=True)
    dist.barrier()
    began = time.perf_counter()
    engine.save_checkpoint(out)
    return time.perf_counter() - began


def nbytes(out: str) -> int:
    """Of the checkpoint that lies there."""
    return sum(os.path.getsize(os.path.join(base, name)) for base, _, names in os.walk(out) for name in names)


if __name__ == "__main__":
    main()
