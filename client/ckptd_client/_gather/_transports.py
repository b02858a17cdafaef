"""The common part of the two transports of buckets: the tensors that they build, and buffers.

Both start the transfer of a bucket without waiting for it, and copy its result into the new tensors during the transfer
of the next buckets. Buffers are allocated once and used in turn.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch

from ckptd_client._gather._buckets import Bucket
from ckptd_client._gather._cuts import Piece, Region
from ckptd_client._gather._groups import Groups
from ckptd_client._gather._leaves import Leaf
from ckptd_client._state.tensors import copyable

LINE = 64  # alignment of packed parts
Items = Sequence[tuple[Leaf, Piece]]


class Built(NamedTuple):
    """A tensor under construction: three views of the same memory."""

    tensor: torch.Tensor
    flat: torch.Tensor
    grid: torch.Tensor  # in the shape to which boxes refer

    @classmethod
    def of(cls, leaf: Leaf, tensor: torch.Tensor) -> "Built":
        """The views of a new tensor for a leaf."""
        flat = copyable(tensor).view(-1)
        return cls(tensor, flat, flat.view(leaf.box_shape))

    def at(self, region: Region) -> torch.Tensor:
        """The destination of a region."""
        if region.run is not None:
            return self.flat[region.run[0] : region.run[1]].view(region.box.sizes)
        box = zip(region.box.offsets, region.box.sizes, strict=True)
        return self.grid[tuple(slice(offset, offset + size) for offset, size in box)]


Results = Mapping[Leaf, Built]  # empty on ranks that receive nothing


class Transfer(Protocol):
    """The transfer of a bucket."""

    def finish(self) -> None:
        """Blocks until every part is at its destination. Raises RuntimeError when a rank has ended."""


class Recipients(NamedTuple):
    """The ranks that receive the tensors, and whether this rank is one of them."""

    groups: Groups
    rank: int  # this one
    to: frozenset[int]

    @property
    def receives(self) -> bool:
        """Whether this rank receives the tensors."""
        return self.rank in self.to


class Transport(Protocol):
    """Transfers buckets, one after the other."""

    def begin(self, bucket: Bucket, results: Results, turn: int) -> Transfer:
        """Starts the transfer of a bucket. turn: index of the buffer that is free for it."""

    def on_stream(self) -> AbstractContextManager[Any]:
        """A context in which tensors for it are created."""

    def hand_over(self, tensor: torch.Tensor) -> None:
        """Lets the caller use a tensor that was built."""

    def end(self) -> None:
        """Ends all transfers; the caller may write to the state."""


def sources(items: Items, member: int) -> list[torch.Tensor]:
    """The parts that this rank, one of the members, sends."""
    return [
        leaf.chunks[region.chunk] if region.local is None else leaf.chunks[region.chunk][region.local]
        for leaf, piece in items
        for region in piece.regions[member]
    ]


def targets(items: Items, member: int, results: Results) -> list[torch.Tensor]:
    """The destinations of the parts of a member."""
    return [results[leaf].at(region) for leaf, piece in items for region in piece.regions[member]]


def copy(into: Sequence[torch.Tensor], out_of: Sequence[torch.Tensor]) -> None:
    """Copies tensors to tensors of the same shapes."""
    if into:
        torch._foreach_copy_(list(into), list(out_of))  # one call instead of thousands


def split(buffer: torch.Tensor, items: Items, member: int) -> list[torch.Tensor]:
    """Views of a flat buffer, one for each region of a member, one after the other."""
    regions = [region for _, piece in items for region in piece.regions[member]]
    parts = buffer.split_with_sizes([region.numel for region in regions])
    return [part.view(region.box.sizes) for part, region in zip(parts, regions, strict=True)]


class Buffers:
    """Flat memory: one buffer for each bucket that may be in transfer."""

    def __init__(self, turns: int, **how: Any) -> None:
        self._how = how
        self._memory: list[torch.Tensor] = [torch.empty(0, dtype=torch.uint8)] * turns
        self._used = [0] * turns

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(memory.numel() for memory in self._memory)

    def clear(self, turn: int, nbytes: int) -> None:
        """Frees a buffer and makes room for so many bytes."""
        self._used[turn] = 0
        if self._memory[turn].numel() < nbytes:
            self._memory[turn] = torch.empty(0, dtype=torch.uint8)  # the old one goes first
            self._memory[turn] = torch.empty(nbytes, dtype=torch.uint8, **self._how)

    def take(self, turn: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Flat memory for so many elements, valid until clear."""
        start = self._used[turn]
        stop = start + count * dtype.itemsize
        self._used[turn] = -(-stop // LINE) * LINE
        return self._memory[turn][start:stop].view(dtype)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A flat view of a contiguous tensor, in a dtype that every backend supports."""
    return tensor.view(-1).view(torch.uint8)


def in_place(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The only part, if it can be sent without a copy."""
    if len(parts) == 1 and parts[0].is_contiguous() and not parts[0].is_conj() and not parts[0].is_neg():
        return parts[0]
    return None
