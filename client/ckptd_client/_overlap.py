"""Copies of one save that run while training goes on, in a thread of their own, and the proof that they are exact.

What is copied late must not be written before it is: who writes asks the Overlap first (``before_step``). That nobody
else did is proved before the save counts: by torch's own counts of writes, for the first saves by a comparison of every
byte, and by samples for writes that torch does not count (through .data, numpy, fused kernels).
"""

import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch

_GROUP_NBYTES = 64 << 20  # copied in one call, without the GIL; what follows may be broken off
_SAMPLED = 64  # tensors of a save whose samples are taken
_SAMPLE_ELEMENTS = 16


class Fate(Protocol):
    """What becomes of the save. Called once, from the overlap's thread."""

    def deliver(self) -> None:
        """Everything is copied."""

    def discard(self, reason: str, written: Sequence[int]) -> None:
        """It is not what was saved, or came too late. written: positions that somebody wrote to."""


class Overlap:
    """Pairs of (view in a slot, tensor) to be copied. Holds the tensors until it is over.

    compare: wait with the save until a thread that trains has compared every byte, in before_step or settle.
    turn: a count of saves, by which samples differ from save to save.
    """

    def __init__(
        self, views: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], fate: Fate, *, compare: bool, turn: int
    ) -> None:
        self._views, self._tensors, self._fate = list(views), list(tensors), fate
        self._versions = [tensor._version for tensor in tensors]  # noqa: SLF001 - torch has no other name for it
        self._samples = _Samples(tensors, turn)
        self._written: list[int] = []
        self._reason = ""
        self._copied = threading.Event()
        self._proved = threading.Event()
        if not compare:
            self._proved.set()
        self._proving = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="ckptd-overlap", daemon=True)

    def start(self) -> None:
        """Begins to copy."""
        self._thread.start()

    @property
    def over(self) -> bool:
        """Whether the save was delivered or discarded."""
        return not self._thread.is_alive()

    def before_step(self, deadline: float) -> None:
        """Blocks until the tensors may be written; at the deadline they may all the same, and the save is given up."""
        if not self._copied.wait(max(0.0, deadline - time.monotonic())):
            self.cancel("its copy was not done when the optimizer had waited save_timeout_s for it")
        else:
            self._prove()

    def settle(self, deadline: float) -> bool:
        """Blocks until it is over, whoever trains; False when it is not by the deadline."""
        if self._copied.wait(max(0.0, deadline - time.monotonic())):
            self._prove()
            self._thread.join(max(0.0, deadline - time.monotonic()))
        return self.over

    def cancel(self, reason: str) -> None:
        """Discards the save, unless it is delivered already."""
        self._reason = self._reason or reason
        self._proved.set()

    # --- the thread

    def _run(self) -> None:
        try:
            self._copy()
            if not self._reason:
                self._note(self._changed(), "")
        except Exception as error:  # noqa: BLE001 - whatever it is, training goes on
            self._reason = self._reason or f"{type(error).__name__}: {error}"
        if self._reason:
            self._proved.set()
        self._copied.set()
        self._proved.wait()
        try:
            if self._reason:
                self._fate.discard(self._reason, self._written)
            else:
                self._fate.deliver()
        finally:
            self._views, self._tensors, self._samples = [], [], _Samples([], 0)

    def _copy(self) -> None:
        start = nbytes = 0
        with torch.no_grad():
            for i, view in enumerate(self._views):
                nbytes += view.nbytes
                if nbytes >= _GROUP_NBYTES or i + 1 == len(self._views):
                    torch._foreach_copy_(self._views[start : i + 1], self._tensors[start : i + 1])
                    start, nbytes = i + 1, 0
                if self._reason:
                    return

    def _changed(self) -> list[int]:
        """Positions of tensors that were written since the save began."""
        counted = zip(self._tensors, self._versions, strict=True)
        changed = [i for i, (tensor, before) in enumerate(counted) if tensor._version != before]  # noqa: SLF001
        return changed or self._samples.changed()

    # --- the proof

    def _prove(self) -> None:
        """Compares every byte, if that is still to be done. From a thread that keeps the optimizer from stepping."""
        with self._proving:
            if self._proved.is_set():
                return
            try:
                pairs = zip(self._views, self._tensors, strict=True)
                differing = [i for i, (view, tensor) in enumerate(pairs) if not same_bits(view, tensor)]
                self._note(differing, " unseen by torch")
            except Exception as error:  # noqa: BLE001 - as above
                self._reason = self._reason or f"{type(error).__name__}: {error}"
            self._proved.set()

    def _note(self, positions: Sequence[int], how: str) -> None:
        if positions:
            self._written = list(positions)
            self._reason = f"it was written{how} between save and the optimizer's step"


class _Samples:
    """A few elements of some tensors as they are now."""

    def __init__(self, tensors: Sequence[torch.Tensor], turn: int) -> None:
        count = len(tensors)
        picked = range(count) if count <= _SAMPLED else [(turn * _SAMPLED + k) % count for k in range(_SAMPLED)]
        self._taken: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        for i in picked:
            tensor = tensors[i]
            if tensor.is_cpu and tensor.is_contiguous() and tensor.numel() and not tensor.is_conj():
                flat = tensor.detach().view(-1)
                first = turn * _SAMPLE_ELEMENTS % len(flat)
                part = flat[first : first + _SAMPLE_ELEMENTS]
                self._taken.append((i, part, part.clone()))

    def changed(self) -> list[int]:
        """Positions of tensors whose samples differ from what they were."""
        return [i for i, now, before in self._taken if not same_bits(now, before)]


def same_bits(left: Any, right: Any) -> bool:
    """Whether two tensors of one shape and dtype have the same bytes: NaNs too."""
    return torch.equal(_bytes(left), _bytes(right))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8)
