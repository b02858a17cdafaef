"""The training: model, optimizer, schedule, data and randomness, one step at a time. Independent of checkpoints.

The text is one that every machine has: the source of Python's standard library.
"""

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn

from ckptd_client.demo.model import GPT, Shape
from ckptd_client.demo.plan import Work

SEED = 1234
LEARNING_RATE = 2e-3
CLIP_NORM = 1.0
MAX_CORPUS_NBYTES = 4 << 20


def corpus() -> Tensor:
    """The library's top-level modules in the order of their names, as bytes, at most MAX_CORPUS_NBYTES of them."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= MAX_CORPUS_NBYTES:
            break
    return torch.frombuffer(text[:MAX_CORPUS_NBYTES], dtype=torch.uint8).long()


class Batches:
    """Random windows of the corpus. Each rank has its own generator, which is part of the checkpoint."""

    def __init__(self, text: Tensor, *, batch: int, context: int, seed: int) -> None:
        self._text = text
        self._batch = batch
        self._window = torch.arange(context + 1)
        self._generator = torch.Generator().manual_seed(seed)

    def draw(self) -> tuple[Tensor, Tensor]:
        """The next (tokens, targets); targets are one byte later."""
        last = len(self._text) - len(self._window)
        starts = torch.randint(last + 1, (self._batch, 1), generator=self._generator)
        windows = self._text[starts + self._window]
        return windows[:, :-1], windows[:, 1:]

    def state_dict(self) -> dict[str, Tensor]:
        """The generator's state."""
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Sets the generator to the state."""
        self._generator.set_state(state["generator"])


class Randomness:
    """torch's default generator, which dropout uses, as an object with a state_dict."""

    def state_dict(self) -> dict[str, Tensor]:
        """The generator's state."""
        return {"torch": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Sets the generator to the state."""
        torch.set_rng_state(state["torch"])


class Training:
    """A data-parallel training that repeats bit for bit: one thread, fixed seeds, gradients summed in one bucket."""

    def __init__(self, *, rank: int, world_size: int, steps: int, work: Work) -> None:
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(mode=True)
        shape = Shape(context=work.context)
        torch.manual_seed(SEED)
        self.model = GPT(shape)
        torch.manual_seed(SEED + 1 + rank)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, fused=True)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, max_lr=LEARNING_RATE, total_steps=steps, cycle_momentum=False
        )
        self.batches = Batches(corpus(), batch=work.batch, context=shape.context, seed=SEED + rank)
        self._world_size = world_size

    def state(self) -> dict[str, object]:
        """Everything that the next step depends on."""
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "batches": self.batches,
            "randomness": Randomness(),
        }

    def step(self) -> float:
        """Trains one step; returns its loss, averaged over the ranks."""
        loss: Tensor = self.model(*self.batches.draw())
        self.optimizer.zero_grad()
        torch.autograd.backward(loss)
        mean = self._average(loss.detach())
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
        self.optimizer.step()
        self.scheduler.step()
        return mean

    def _average(self, loss: Tensor) -> float:
        """Replaces each gradient by its mean over the ranks; returns the mean of loss.

        One bucket of fixed order, where DDP would rearrange its own after the first step of every start.
        """
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        bucket = torch.cat([loss.view(1), *(grad.flatten() for grad in grads)])
        dist.all_reduce(bucket)
        bucket /= self._world_size
        parts = torch.split(bucket[1:], [grad.numel() for grad in grads])
        for grad, part in zip(grads, parts, strict=True):
            grad.copy_(part.view_as(grad))
        return bucket[0].item()

    def digest(self) -> str:
        """XXH3-128 of the parameters and the optimizer's tensors."""
        hasher = xxhash.xxh3_128()
        for tensor in self._tensors():
            hasher.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
        return hasher.hexdigest()

    def _tensors(self) -> Iterator[Tensor]:
        for parameter in self.model.parameters():
            yield parameter
            state = self.optimizer.state[parameter]
            yield from (state[key] for key in sorted(state))
