"""The bytes of a non-contiguous tensor in contiguous order, a range at a time. Pure."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ckptd_client._state.tensors import copyable


@dataclass(frozen=True, slots=True)
class StridedBytes:
    """Bytes first to stop of a tensor in contiguous order, both at boundaries of elements. Refers to the tensor.

    Its length is that of the range; it copies nothing until ``pieces`` is called.
    """

    tensor: torch.Tensor
    first: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.first

    def pieces(self, room: torch.Tensor) -> Iterator[memoryview]:
        """Copies the bytes into the host's memory, piece by piece, each over the one before. Blocks for the copies.

        room: memory of the caller, at least as large as the range, aligned for any dtype.
        """
        size = self.tensor.itemsize
        for box in _boxes(copyable(self.tensor.detach()), self.first // size, self.stop // size):
            place = room[: box.nbytes]
            place.view(box.dtype).view(box.shape).copy_(box)
            yield place.numpy().data


def _boxes(tensor: torch.Tensor, first: int, stop: int) -> Iterator[torch.Tensor]:
    """Views of the elements first to stop, in row-major order: at most two for each dimension, and one more."""
    if first >= stop:
        return
    if (first, stop) == (0, tensor.numel()):
        yield tensor
        return
    row = math.prod(tensor.shape[1:])
    begin, end = -(-first // row), stop // row  # complete rows
    if begin > end:  # inside one row
        yield from _boxes(tensor[end], first - end * row, stop - end * row)
        return
    if first < begin * row:
        yield from _boxes(tensor[begin - 1], first - (begin - 1) * row, row)
    if begin < end:
        yield tensor[begin:end]
    if end * row < stop:
        yield from _boxes(tensor[end], 0, stop - end * row)
