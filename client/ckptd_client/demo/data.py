"""Text that every machine has: the source of Python's standard library."""

import sysconfig
from pathlib import Path

import torch
from torch import Tensor

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
