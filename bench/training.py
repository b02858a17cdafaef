"""A training step of steady length on one thread: small matmuls, sized once per run."""

import time
from collections.abc import Iterable

import torch

STEP_S = 0.040
_WIDTH = 256
_WRITTEN_SHARE = 16  # every 16th tensor changes in an optimizer's step


class Touching(torch.optim.Optimizer):
    """Owns tensors as an optimizer does, and writes a few kilobytes of them per step, in negligible time."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        super().__init__([{"params": list(tensors)}], {})
        self._steps = 0

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """Writes to some of the tensors."""
        self._steps += 1
        for tensor in self.param_groups[0]["params"][self._steps % _WRITTEN_SHARE :: _WRITTEN_SHARE]:
            if tensor.dtype != torch.uint8:
                tensor.view(-1)[:256].add_(1)


class Training:
    """Steps of about STEP_S on one thread, with equal work each time."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self._left = torch.randn(_WIDTH, _WIDTH, generator=generator)
        self._right = torch.randn(_WIDTH, _WIDTH, generator=generator) / _WIDTH
        self._rounds = 16
        for _ in range(3):
            self.step()
        while (step_s := min(self.step() for _ in range(3))) < STEP_S / 2:
            self._rounds *= 2
        self._rounds = max(1, round(self._rounds * STEP_S / step_s))

    def step(self) -> float:
        """Runs one step; its seconds."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        start = time.perf_counter()
        out = self._left
        for _ in range(self._rounds):
            out = torch.tanh(out @ self._right)
        taken_s = time.perf_counter() - start
        torch.set_num_threads(threads)
        return taken_s

    def steps(self, count: int) -> list[float]:
        """Seconds of count steps in a row."""
        return [self.step() for _ in range(count)]
