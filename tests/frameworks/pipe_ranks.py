"""One rank of a small training under DeepSpeed's pipeline engine: two stages, a layer that both have, ZeRO-1."""

import os
import sys

os.environ |= {"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"}

import deepspeed
import safetensors.torch
import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import nn

CONFIG = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "zero_optimization": {"stage": 1},
    "zero_allow_untested_optimizer": True,
}


def network() -> PipelineModule:
    """Uneven sizes, a buffer, a frozen parameter in the second stage, and a tied layer in both."""
    layers = [
        TiedLayerSpec("ends", nn.Linear, 6, 6),
        LayerSpec(nn.Linear, 6, 7),
        LayerSpec(nn.ReLU),
        LayerSpec(nn.BatchNorm1d, 7),
        LayerSpec(nn.Linear, 7, 6),
        TiedLayerSpec("ends", nn.Linear, 6, 6),
    ]
    made = PipelineModule(layers, num_stages=2, loss_fn=nn.functional.mse_loss, partition_method="uniform")
    for name, parameter in made.named_parameters():
        parameter.requires_grad_(name != "4.bias")
    return made


def expected(engine: deepspeed.PipelineEngine) -> dict[str, torch.Tensor]:
    """What an export should hold of this rank's stage, asked of the living engine. A collective of its ranks."""
    engine.optimizer._hp_optimizer_states_linked = False  # linked before AdamW had made them
    engine.optimizer._lazy_init_hp_params_optimizer_state()
    found = {f"model.{name}": buffer for name, buffer in engine.module.named_buffers()}
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad:
            found[f"model.{name}"] = parameter.detach()
            continue
        found[f"model.{name}"] = safe_get_full_fp32_param(parameter)
        for state in ("exp_avg", "exp_avg_sq"):
            found[f"optimizer.state.{name}.{state}"] = safe_get_full_optimizer_state(parameter, state)
        found[f"optimizer.state.{name}.step"] = torch.tensor(2.0)
    return found


def main(out: str) -> None:
    deepspeed.ops.__compatible_ops__.clear()  # compiles nothing: a process that is killed at it leaves a lock for ever
    deepspeed.init_distributed("gloo", verbose=False)
    torch.manual_seed(0)
    net = network()
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.003)
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=CONFIG)
    batches = ((torch.randn(2, 6), torch.randn(2, 6)) for _ in range(100))
    for _ in range(2):
        engine.train_batch(batches)
    engine.save_checkpoint(out)
    found = expected(engine)
    if engine.grid.get_data_parallel_rank() == 0:
        stage = "first" if engine.is_first_stage() else "last"
        safetensors.torch.save_file(found, os.path.join(out, f"expected-{stage}.safetensors"))
    torch.distributed.barrier()
    os._exit(0)  # gloo's threads sometimes abort an orderly end


if __name__ == "__main__":
    main(sys.argv[1])
