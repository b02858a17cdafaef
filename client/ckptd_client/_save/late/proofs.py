"""Signs of writes to a tensor: torch's counts of writes, and samples of elements.

They are no proof: counts miss writes through .data, numpy or fused kernels; samples miss writes to other elements. They
are for users who ask for them where no proof exists (see page_guard.py and checksums.py).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ckptd_client._local.copy_engines import CopyEngine, engine_of, flat_bytes

_SAMPLE_ELEMENTS = 16
_SAMPLE_NBYTES = _SAMPLE_ELEMENTS * 16  # of the largest dtype


def versions(counted: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> list[Any]:
    """Counts of writes. In-place operations on a DTensor count on it, not on its local tensor."""
    return [
        outer._version if outer is inner else (outer._version, inner._version)  # noqa: SLF001 - there is no public name
        for outer, inner in zip(counted, tensors, strict=True)
    ]


class _Sample(NamedTuple):
    position: int  # of the tensor
    first: int  # element, in the tensor's order
    before: torch.Tensor


class Samples:
    """Samples of elements of every tensor at the time of the constructor; other elements at each turn."""

    def __init__(self, tensors: Sequence[torch.Tensor], turn: int) -> None:
        self._samples: list[_Sample] = []
        scratch: dict[CopyEngine, torch.Tensor] = {}
        with torch.no_grad():
            for i, tensor in enumerate(tensors):
                if not tensor.numel():
                    continue
                first, part = _part(tensor, turn)
                engine = engine_of(tensor.device)
                if engine is None:
                    self._samples.append(_Sample(i, first, part.clone()))
                    continue
                if engine not in scratch:
                    scratch[engine] = engine.scratch(len(tensors) * _SAMPLE_NBYTES)
                place = scratch[engine][i * _SAMPLE_NBYTES :][: part.nbytes].view(part.dtype)
                place.copy_(part, non_blocking=True)
                self._samples.append(_Sample(i, first, place))

    def differing(self, views: Sequence[torch.Tensor]) -> list[int]:
        """Positions of contiguous views with other bytes. Call it once devices are done."""
        return [
            i
            for i, first, before in self._samples
            if not same_bits(before, views[i].reshape(-1)[first : first + len(before)])
        ]


def _part(tensor: torch.Tensor, turn: int) -> tuple[int, torch.Tensor]:
    """The index of the first sampled element, and consecutive elements; one element of a strided tensor."""
    first = turn * _SAMPLE_ELEMENTS % tensor.numel()
    if tensor.is_contiguous():
        flat = tensor.detach().resolve_conj().resolve_neg().view(-1)
        return first, flat[first : first + _SAMPLE_ELEMENTS]
    where = []
    rest = first
    for size in reversed(tensor.shape):
        rest, at = divmod(rest, size)
        where.append(at)
    return first, tensor.detach()[tuple(reversed(where))].resolve_conj().resolve_neg().reshape(1)


def same_bits(left: Any, right: Any) -> bool:
    """Whether two tensors of one shape and dtype have equal bytes, also of NaNs."""
    return torch.equal(flat_bytes(left.cpu()), flat_bytes(right.cpu()))
