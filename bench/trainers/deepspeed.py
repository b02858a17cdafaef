"""DeepSpeed's engine under ZeRO-2: its own save_checkpoint, and the same engine with ckptd attached."""

import os
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import ckptd_client
from bench.trainers import Measure, Pair, Way, timed

NEEDS = "deepspeed"
_WIDTH = 1024


def zero2(nbytes: int, folder: Path, measure: Measure) -> None:
    """nbytes: of weights in bfloat16, master weights and moments, over all ranks."""
    os.environ |= {"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"}
    import deepspeed  # noqa: PLC0415 - it looks at these

    from ckptd_client.integrations.deepspeed import attach  # noqa: PLC0415

    deepspeed.ops.__compatible_ops__.clear()  # compiles nothing: a process that is killed at it leaves a lock for ever
    layers = max(1, nbytes // ((2 + 3 * 4) * _WIDTH * _WIDTH))
    model = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(layers)))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    def save(step: int) -> float:
        engine.backward(engine(torch.randn(1, _WIDTH).bfloat16()).float().square().mean())
        engine.step()
        dist.barrier()
        return timed(lambda: engine.save_checkpoint(str(folder), tag=f"step{step}"))

    def forget() -> float:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
        return 0.0

    with ckptd_client.connect("bench-deepspeed", allow_pickle=["*.pt"]) as client:

        def ours(step: int) -> float:
            with attach(engine, client):
                return save(step)

        def settle() -> float:
            client.wait("durable")
            return forget()

        measure(Pair("DeepSpeed, ZeRO-2", Way("save_checkpoint", save, forget), Way("attach", ours, settle)))
