"""What the two ways in which buckets travel have in common: the tensors that are built, and buffers.

Both begin a bucket without waiting for it, and copy what has come into the tensors that are being built, while the next
buckets are on their way. Buffers are made once and used in turn.
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

LINE = 64  # what is packed begins at a multiple of it
Items = Sequence[tuple[Leaf, Piece]]


class Built(NamedTuple):
    """A tensor that is being built. The same memory three times."""

    tensor: torch.Tensor
    flat: torch.Tensor
    grid: torch.Tensor  # of the shape that boxes are of

    @classmethod
    def of(cls, leaf: Leaf, tensor: torch.Tensor) -> "Built":
        """For a leaf whose pieces come in."""
        flat = copyable(tensor).view(-1)
        return cls(tensor, flat, flat.view(leaf.box_shape))

    def at(self, region: Region) -> torch.Tensor:
        """Where a region belongs."""
        if region.run is not None:
            return self.flat[region.run[0] : region.run[1]].view(region.box.sizes)
        box = zip(region.box.offsets, region.box.sizes, strict=True)
        return self.grid[tuple(slice(offset, offset + size) for offset, size in box)]


Results = Mapping[Leaf, Built]  # empty on ranks that get nothing


class Flight(Protocol):
    """A bucket on its way."""

    def land(self) -> None:
        """Blocks until it is there and everything is in its place. Raises RuntimeError when a rank is gone."""


class Party(NamedTuple):
    """Who takes part."""

    groups: Groups
    rank: int  # this one
    to: frozenset[int]  # the ranks that get the tensors

    @property
    def wanted(self) -> bool:
        """Whether this rank gets the tensors."""
        return self.rank in self.to


class Lane(Protocol):
    """Takes buckets one after the other."""

    def begin(self, bucket: Bucket, results: Results, turn: int) -> Flight:
        """Has a bucket travel. turn: which of the buffers is free for it."""

    def beside(self) -> AbstractContextManager[Any]:
        """Where tensors for it are made."""

    def hand_over(self, tensor: torch.Tensor) -> None:
        """The caller may have a tensor that was built."""

    def end(self) -> None:
        """All has landed, and the caller may write to the state."""


def sources(items: Items, member: int) -> list[torch.Tensor]:
    """What this rank, one of the members, gives."""
    return [
        leaf.chunks[region.chunk] if region.local is None else leaf.chunks[region.chunk][region.local]
        for leaf, piece in items
        for region in piece.regions[member]
    ]


def targets(items: Items, member: int, results: Results) -> list[torch.Tensor]:
    """Where that of a member belongs."""
    return [results[leaf].at(region) for leaf, piece in items for region in piece.regions[member]]


def copy(into: Sequence[torch.Tensor], out_of: Sequence[torch.Tensor]) -> None:
    """Pairs of tensors of one shape."""
    if into:
        torch._foreach_copy_(list(into), list(out_of))  # one call instead of thousands


def split(buffer: torch.Tensor, items: Items, member: int) -> list[torch.Tensor]:
    """A flat buffer as the regions of a member lie in it, one behind the other."""
    regions = [region for _, piece in items for region in piece.regions[member]]
    parts = buffer.split_with_sizes([region.numel for region in regions])
    return [part.view(region.box.sizes) for part, region in zip(parts, regions, strict=True)]


class Buffers:
    """Flat memory, one buffer for each bucket that may be on its way."""

    def __init__(self, turns: int, **how: Any) -> None:
        self._how = how
        self._memory: list[torch.Tensor] = [torch.empty(0, dtype=torch.uint8)] * turns
        self._used = [0] * turns

    @property
    def nbytes(self) -> int:
        """Of all buffers."""
        return sum(memory.numel() for memory in self._memory)

    def clear(self, turn: int, nbytes: int) -> None:
        """A buffer is free again, and must have room for so much."""
        self._used[turn] = 0
        if self._memory[turn].numel() < nbytes:
            self._memory[turn] = torch.empty(0, dtype=torch.uint8)  # the old one goes first
            self._memory[turn] = torch.empty(nbytes, dtype=torch.uint8, **self._how)

    def take(self, turn: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Flat memory for so many elements, valid until the buffer is cleared."""
        start = self._used[turn]
        stop = start + count * dtype.itemsize
        self._used[turn] = -(-stop // LINE) * LINE
        return self._memory[turn][start:stop].view(dtype)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, flat, in a dtype that every backend knows. The tensor is contiguous."""
    return tensor.view(-1).view(torch.uint8)


def in_place(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The one part, if it can travel as it lies."""
    if len(parts) == 1 and parts[0].is_contiguous() and not parts[0].is_conj() and not parts[0].is_neg():
        return parts[0]
    return None
