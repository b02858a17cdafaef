"""Proofs that nobody wrote to a tensor: torch's counts of writes, samples of elements, every byte of a copy.

Counts miss what goes through .data, numpy or fused kernels; samples and bytes do not.
"""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ckptd_client._copy_engines import CopyEngine, divided, engine_of, flat_bytes

_SAMPLED = 64  # tensors of a save whose samples are taken
_SAMPLE_ELEMENTS = 16
_SAMPLE_NBYTES = _SAMPLE_ELEMENTS * 16  # of the largest dtype


class Probe:
    """Tensors that were copied before save returned, and would not have been if it had been known that they may.

    Between save and the optimizer's step nobody may write to them: torch's counts tell, and the copies in views.
    """

    def __init__(
        self,
        names: Sequence[str],
        views: Sequence[torch.Tensor],
        tensors: Sequence[torch.Tensor],
        counted: Sequence[torch.Tensor],
    ) -> None:
        self.names, self._views = list(names), list(views)
        self._tensors, self._counted = list(tensors), list(counted)
        self._versions = versions(counted, tensors)

    def written(self, deadline: float) -> list[str] | None:
        """Names of those that were; None when there was no time to look at all. To be asked before the step."""
        counts = zip(self.names, self._versions, versions(self._counted, self._tensors), strict=True)
        found = {name for name, before, now in counts if before != now}
        by_engine = divided(self._tensors)
        for engine, positions in by_engine.items():
            pairs = [self._views[i] for i in positions], [self._tensors[i] for i in positions]
            found.update(self.names[positions[k]] for k in engine.differing(*pairs))
        fetched = {i for positions in by_engine.values() for i in positions}
        for i in (i for i in range(len(self.names)) if i not in fetched):
            if time.monotonic() >= deadline:
                return sorted(found) or None
            if not same_bits(self._views[i], self._tensors[i]):
                found.add(self.names[i])
        return sorted(found)


def versions(counted: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> list[Any]:
    """Counts of writes. In-place operations on a DTensor count on it, and not on the part that lies here."""
    return [
        outer._version if outer is inner else (outer._version, inner._version)  # noqa: SLF001 - it has no other name
        for outer, inner in zip(counted, tensors, strict=True)
    ]


class _Sample(NamedTuple):
    position: int  # of the tensor
    before: torch.Tensor
    now: torch.Tensor  # elements of the tensor itself, or of a device's: where they are copied once more


class Samples:
    """A few elements of some tensors as they are now, after what this thread queued. Others at each turn.

    Elements on a device are copied twice to the host, without waiting: now, in the order of what this thread queues,
    and once more with the tensors, as the pairs that again and views name.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], turn: int) -> None:
        self.again: list[torch.Tensor] = []  # elements on devices
        self.views: list[torch.Tensor] = []  # where they are to be copied once more
        self._here: list[_Sample] = []
        self._there: list[_Sample] = []
        parts = _parts(tensors, turn)
        scratch: dict[CopyEngine, torch.Tensor] = {}
        with torch.no_grad():
            for i, part in parts:
                engine = engine_of(part.device)
                if engine is None:
                    self._here.append(_Sample(i, part.clone(), part))
                    continue
                if engine not in scratch:
                    scratch[engine] = engine.scratch(2 * len(parts) * _SAMPLE_NBYTES)
                before, now = _two_of(scratch[engine], len(self._there), part)
                before.copy_(part, non_blocking=True)
                self._there.append(_Sample(i, before, now))
                self.again.append(part)
                self.views.append(now)

    def changed_here(self) -> list[int]:
        """Positions of tensors in the host's memory whose samples are other now."""
        return [i for i, before, now in self._here if not same_bits(before, now)]

    def changed_there(self) -> list[int]:
        """The same of tensors on devices. Only once both copies are done."""
        return [i for i, before, now in self._there if not same_bits(before, now)]


def _parts(tensors: Sequence[torch.Tensor], turn: int) -> list[tuple[int, torch.Tensor]]:
    """Positions, and some elements, of the tensors whose turn it is. What lies strided has none."""
    count = len(tensors)
    picked = range(count) if count <= _SAMPLED else [(turn * _SAMPLED + k) % count for k in range(_SAMPLED)]
    found = []
    for i in picked:
        tensor = tensors[i]
        if tensor.is_contiguous() and tensor.numel() and not tensor.is_conj() and not tensor.is_neg():
            flat = tensor.detach().view(-1)
            first = turn * _SAMPLE_ELEMENTS % len(flat)
            found.append((i, flat[first : first + _SAMPLE_ELEMENTS]))
    return found


def _two_of(scratch: torch.Tensor, number: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The number-th two places of a sample."""
    first, second = (scratch[start : start + like.nbytes] for start in _starts(number))
    return first.view(like.dtype), second.view(like.dtype)


def _starts(number: int) -> tuple[int, int]:
    return 2 * number * _SAMPLE_NBYTES, (2 * number + 1) * _SAMPLE_NBYTES


def same_bits(left: Any, right: Any) -> bool:
    """Whether two tensors of one shape and dtype have the same bytes: NaNs too."""
    return torch.equal(flat_bytes(left.cpu()), flat_bytes(right.cpu()))
