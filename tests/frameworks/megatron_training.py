"""A small GPT of Megatron core, trained on the CPU by two tensor-parallel ranks.

core asks CUDA for a device in places where the CPU would do: for those it is told so here.
"""

import contextlib
import os

import numpy as np
import torch
import torch.distributed as dist

torch.cuda.current_device = lambda: "cpu"
torch.cuda.synchronize = lambda: None
vars(np).setdefault("product", np.prod)  # numpy 2 has it no more, and core 0.15 asks for it

from megatron.core import parallel_state  # noqa: E402
from megatron.core.dist_checkpointing.optimizer import (  # noqa: E402
    get_param_id_to_sharded_param_map,
    optim_state_to_sharding_state,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

CudaRNGStatesTracker.fork = lambda self, name="": contextlib.nullcontext()
LENGTH, VOCABULARY = 16, 64


def begin():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())


def end():
    dist.barrier()
    print(f"rank {dist.get_rank()} did it", flush=True)
    os._exit(0)  # gloo's threads may abort an interpreter that ends


class Training:
    """Steps are numbered from 1; each has batches of its own."""

    def __init__(self, hidden=32, layers=2):
        torch.manual_seed(0)  # core makes the whole weights and keeps this rank's part
        config = TransformerConfig(
            num_layers=layers,
            hidden_size=hidden,
            num_attention_heads=4,
            use_cpu_initialization=True,
            gradient_accumulation_fusion=False,
            masked_softmax_fusion=False,
            bias_dropout_fusion=False,
            bias_activation_fusion=False,
            hidden_dropout=0.0,
            attention_dropout=0.0,
        )
        spec = get_gpt_layer_local_spec()
        self.model = GPTModel(config, spec, vocab_size=VOCABULARY, max_sequence_length=LENGTH)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        torch.manual_seed(dist.get_rank())

    def step(self, number):
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(0, VOCABULARY, (2, LENGTH), generator=generator)
        positions = torch.arange(LENGTH).expand(2, LENGTH)
        mask = torch.triu(torch.ones(LENGTH, LENGTH, dtype=torch.bool), 1)[None, None]
        self.model(tokens, positions, mask, labels=tokens).mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def sharded(self, step=0, *, loading=False):
        """The sharded state dict of model, optimizer and generator. loading: the optimizer has made no state yet."""
        if loading and not self.optimizer.state:
            for parameter in self.model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            self.optimizer.step()
            self.optimizer.zero_grad()
        model = self.model.sharded_state_dict()
        optimizer = self.optimizer.state_dict()
        steps = {number: state["step"] for number, state in optimizer["state"].items()}
        known = get_param_id_to_sharded_param_map(model, self.optimizer.param_groups[0]["params"])
        optim_state_to_sharding_state(optimizer, known, exclude_keys=("step",))
        return {
            "model": model,
            "optimizer": optimizer,
            "optimizer_steps": steps,  # no sharded tensors: core leaves them to the common state
            "rng": self._generator(),
            "iteration": step,
        }

    def _generator(self):
        from megatron.core.dist_checkpointing import ShardedObject  # noqa: PLC0415

        rank, size = dist.get_rank(), dist.get_world_size()
        return ShardedObject("rng", {"torch": torch.get_rng_state(), "rank": rank}, (size,), (rank,))

    def take(self, loaded):
        self.model.load_state_dict(loaded["model"])
        for number, steps in loaded["optimizer_steps"].items():
            loaded["optimizer"]["state"][number]["step"] = steps
        self.optimizer.load_state_dict(loaded["optimizer"])
        torch.set_rng_state(loaded["rng"]["torch"])
        assert loaded["rng"]["rank"] == dist.get_rank()
        return loaded["iteration"]

    def plain(self):
        """All of it, of this rank, copied."""
        tensors = dict(self.model.named_parameters())
        state = {f"{i}.{name}": v for i, s in self.optimizer.state_dict()["state"].items() for name, v in s.items()}
        return {name: value.detach().clone() for name, value in (tensors | state).items()} | {
            "generator": torch.get_rng_state()
        }


def difference(one, other):
    """Names of the tensors that are not the same to the bit."""
    assert one.keys() == other.keys()
    return [name for name in one if one[name].dtype != other[name].dtype or not torch.equal(one[name], other[name])]
