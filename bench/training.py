"""A training step of steady length on one thread: small matmuls, sized once per run."""

import time

import torch

STEP_S = 0.040
_WIDTH = 256


class Training:
    """Steps of about STEP_S on one thread, whatever torch uses elsewhere; the same work each time."""

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
