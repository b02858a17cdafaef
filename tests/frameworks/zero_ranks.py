"""One rank of a small training under DeepSpeed, which saves with the stock engine. For tests, and for golden files."""

import json
import os
import sys

os.environ |= {"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"}

import deepspeed
import safetensors.torch
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

from tests.frameworks.zero_model import Model, groups

STEPS = 3


def config(stage: int, dtype: str, more: dict) -> dict:
    made = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {
            "stage": stage,
            "sub_group_size": 60,
            "stage3_param_persistence_threshold": 0,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if dtype != "fp32":
        made[dtype] = {"enabled": True}
    made["zero_optimization"] |= more.pop("zero_optimization", {})
    return made | more


def expected(engine: deepspeed.DeepSpeedEngine) -> dict[str, torch.Tensor]:
    """What an export should hold, asked of the living engine. A collective."""
    if hasattr(engine.optimizer, "_hp_optimizer_states_linked"):  # ZeRO-1 and 2: linked before AdamW had made them
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    found = {}
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            found[f"model.{name}"] = safe_get_full_fp32_param(parameter)
            for state in ("exp_avg", "exp_avg_sq"):
                found[f"optimizer.state.{name}.{state}"] = safe_get_full_optimizer_state(parameter, state)
            found[f"optimizer.state.{name}.step"] = torch.tensor(float(STEPS))
        else:
            with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
                found[f"model.{name}"] = parameter.detach().clone()
    found["model.head.weight"] = found["model.embed.weight"].clone()
    found |= {f"model.{name}": buffer for name, buffer in engine.module.named_buffers() if name != "unsaved"}
    return found


def main(out: str, stage: int, dtype: str, more: dict) -> None:
    deepspeed.ops.__compatible_ops__.clear()  # compiles nothing: a process that is killed at it leaves a lock for ever
    deepspeed.init_distributed("gloo", verbose=False)
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(groups(model), lr=0.002)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config(stage, dtype, more))
    torch.manual_seed(1 + engine.global_rank)
    for _ in range(STEPS):
        scores = engine(torch.randint(13, (4, 5)))
        engine.backward(scores.float().square().mean())
        engine.step()
    engine.save_checkpoint(out, tag=f"global_step{STEPS}", client_state={"epoch": 2, "where": object})
    engine.save_16bit_model(out, "16bit.pt")
    found = expected(engine)
    if engine.global_rank == 0:
        safetensors.torch.save_file(found, os.path.join(out, "expected.safetensors"))
    torch.distributed.barrier()
    os._exit(0)  # gloo's threads sometimes abort an orderly end


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4]))
