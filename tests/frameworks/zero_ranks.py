"""One rank of a small training under DeepSpeed, which saves with the stock engine. For tests, and for golden files.

Uneven sizes, two groups of parameters, a tied and a frozen parameter, buffers.
"""

import json
import os
import sys

os.environ |= {"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"}

import deepspeed
import safetensors.torch
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import nn

STEPS = 3


class Model(nn.Module):
    """13 words in, 13 out: the last layer's weight is the first one's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.first = nn.Linear(6, 7)
        self.norm = nn.LayerNorm(7)
        self.frozen = nn.Linear(7, 5)
        self.second = nn.Linear(5, 6, bias=False)
        self.scale = nn.Parameter(torch.tensor([1.5]))
        self.head = nn.Linear(6, 13, bias=False)
        self.head.weight = self.embed.weight
        self.frozen.requires_grad_(False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(7))
        self.register_buffer("unsaved", torch.zeros(3), persistent=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Scores of the words, averaged over a sentence."""
        mixed = self.norm(self.first(self.embed(words).mean(1)))
        self.seen += 1
        self.mean.lerp_(mixed.detach().to(self.mean.dtype).mean(0), 0.1)
        return self.head(self.second(self.frozen(mixed).relu()) * self.scale)


def groups(model: nn.Module) -> list[dict]:
    """Weights, and what is not decayed."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0, "lr": 0.004},
    ]


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
