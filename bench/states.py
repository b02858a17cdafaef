"""Training states to save: a realistic one and one of many small tensors. The same bytes for the same arguments."""

from collections.abc import Iterator
from typing import Any

import torch
import xxhash

State = dict[str, Any]

_BLOCKS = 12
_BYTES_PER_PARAMETER = 2 + 4 + 4 + 4  # bf16 weight, fp32 master, two fp32 Adam moments
_NOISE_ELEMENTS = 1 << 20
_MUTATED_SHARE = 16  # every 16th tensor changes between two saves


def realistic(nbytes: int) -> State:
    """A GPT under mixed precision with Adam: about nbytes in about 370 tensors, and the plain leaves of a real loop.

    bf16 weights, fp32 masters and moments, 0-dim int64 step counters, RNG states, learning rate, epoch, scheduler.
    """
    shapes = _parameter_shapes(nbytes // _BYTES_PER_PARAMETER)
    noise = torch.randn(_NOISE_ELEMENTS, generator=torch.Generator().manual_seed(7))
    weights = {name: _noisy(shape, torch.bfloat16, noise) for name, shape in shapes.items()}
    masters = {name: _noisy(shape, torch.float32, noise) for name, shape in shapes.items()}
    adam = {
        index: {
            "step": torch.tensor(1000, dtype=torch.int64),
            "exp_avg": _noisy(shape, torch.float32, noise),
            "exp_avg_sq": _noisy(shape, torch.float32, noise),
        }
        for index, shape in enumerate(shapes.values())
    }
    return {
        "model": weights,
        "optimizer": {
            "masters": masters,
            "state": adam,
            "param_groups": [{"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1, "params": list(adam)}],
        },
        "scheduler": {"kind": "cosine", "last_epoch": 3, "warmup_steps": 2000, "base_lrs": [3e-4]},
        "rng": {
            "torch": torch.Generator().manual_seed(1).get_state(),
            "dataloader": torch.Generator().manual_seed(2).get_state(),
        },
        "samples_seen": torch.tensor([123_456_789], dtype=torch.int64),
        "lr": 3e-4,
        "epoch": 3,
    }


def many(count: int, each_nbytes: int) -> State:
    """A model of count fp32 tensors of each_nbytes, nothing else."""
    elements = each_nbytes // 4
    noise = torch.randn(_NOISE_ELEMENTS, generator=torch.Generator().manual_seed(11))
    return {
        "model": {f"experts.{index:05}.weight": _noisy((elements,), torch.float32, noise) for index in range(count)}
    }


def tensors(state: Any) -> Iterator[torch.Tensor]:
    """Every tensor in a nest of dicts, lists and tuples, in order."""
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, dict):
        for value in state.values():
            yield from tensors(value)
    elif isinstance(state, (list, tuple)):
        for value in state:
            yield from tensors(value)


def nbytes_of(state: State) -> int:
    """Bytes of all tensors of a state."""
    return sum(tensor.nbytes for tensor in tensors(state))


def mutate(state: State, step: int) -> None:
    """Changes a few tensors and leaves in place, as a step does: a few kilobytes."""
    for index, tensor in enumerate(tensors(state)):
        if index % _MUTATED_SHARE == step % _MUTATED_SHARE and tensor.dtype != torch.uint8:
            tensor.view(-1)[:256].add_(1)
    if "lr" in state:
        state["lr"] = 3e-4 / (1 + step)


def clear(state: State) -> None:
    """Overwrites every tensor, so that only a restore can bring the old bytes back."""
    for tensor in tensors(state):
        tensor.zero_()


def fingerprint(state: State) -> str:
    """Digest of the bytes of all tensors in order; equal states have equal fingerprints."""
    hasher = xxhash.xxh3_128()
    for tensor in tensors(state):
        hasher.update(memoryview(tensor.reshape(-1).view(torch.uint8).numpy()))
    return hasher.hexdigest()


def _parameter_shapes(parameters: int) -> dict[str, tuple[int, ...]]:
    """Shapes of a GPT of 12 blocks, with the other parameters in the embedding."""
    width = 8
    while _BLOCKS * 12 * (width + 8) ** 2 <= parameters * 7 // 8:
        width += 8
    block = {
        "attention.norm": (width,),
        "attention.qkv": (3 * width, width),
        "attention.out": (width, width),
        "mlp.norm": (width,),
        "mlp.up": (4 * width, width),
        "mlp.down": (width, 4 * width),
    }
    shapes = {f"blocks.{index}.{name}": shape for index in range(_BLOCKS) for name, shape in block.items()}
    rest = parameters - _BLOCKS * (12 * width * width + 2 * width)
    return {"embedding": (max(1, rest // width), width), **shapes}


def _noisy(shape: tuple[int, ...], dtype: torch.dtype, noise: torch.Tensor) -> torch.Tensor:
    tensor = torch.empty(shape, dtype=dtype)
    flat = tensor.view(-1)
    for start in range(0, flat.numel(), noise.numel()):
        part = flat[start : start + noise.numel()]
        part.copy_(noise[: part.numel()])
    return tensor
