"""The bytes of a tensor as they would lie in order, a range of them at a time: for tensors that lie otherwise. Pure."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ckptd_client._state.tensors import copyable


@dataclass(frozen=True, slots=True)
class StridedBytes:
    """Bytes first to stop of a tensor, counted as if it were contiguous. Both between elements. Refers to the tensor.

    Its length is that of the range; nothing is copied before ``pieces`` is called.
    """

    tensor: torch.Tensor
    first: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.first

    def pieces(self, room: torch.Tensor) -> Iterator[memoryview]:
        """The bytes, end to end, copied into the host's memory, each piece over the one before. Blocks for the copies.

        room: bytes of the caller's, as many as the range has at least, aligned for any dtype.
        """
        size = self.tensor.itemsize
        for box in _boxes(copyable(self.tensor.detach()), self.first // size, self.stop // size):
            place = room[: box.nbytes]
            place.view(box.dtype).view(box.shape).copy_(box)
            yield place.numpy().data


def _boxes(tensor: torch.Tensor, first: int, stop: int) -> Iterator[torch.Tensor]:
    """Views that have the elements first to stop, in row-major order: at most two for each dimension, and one more."""
    if first >= stop:
        return
    if (first, stop) == (0, tensor.numel()):
        yield tensor
        return
    row = math.prod(tensor.shape[1:])
    begin, end = -(-first // row), stop // row  # rows that are whole
    if begin > end:  # inside of one row
        yield from _boxes(tensor[end], first - end * row, stop - end * row)
        return
    if first < begin * row:
        yield from _boxes(tensor[begin - 1], first - (begin - 1) * row, row)
    if begin < end:
        yield tensor[begin:end]
    if end * row < stop:
        yield from _boxes(tensor[end], 0, stop - end * row)
