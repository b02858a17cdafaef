"""Boxes of a tensor: whether they tile it, each element in one of them, none in two; elements as boxes. Pure."""

import bisect
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

from ckptd.shared.format.layout import TensorEntry
from ckptd.shared.format.placement import Shape


class HasBox(Protocol):
    """A part of a tensor."""

    @property
    def offsets(self) -> tuple[int, ...]:
        """First index in each dimension."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """As many as offsets."""


B = TypeVar("B", bound=HasBox)


def overlap(boxes: Iterable[B]) -> tuple[B, B] | None:
    """Two boxes of one tensor that share an element, None when no two do. Empty boxes share nothing."""
    full = [box for box in boxes if 0 not in box.sizes]
    return None if not full or _is_grid(full) else _swept(full)


def tile(shape: Sequence[int], boxes: Iterable[HasBox]) -> bool:
    """Whether boxes inside a tensor of this shape have each of its elements once."""
    found = list(boxes)
    # Boxes that share nothing and have the volume of the whole leave no gap.
    return sum(math.prod(box.sizes) for box in found) == math.prod(shape) and overlap(found) is None


def is_whole(entries: Iterable[TensorEntry]) -> bool:
    """Whether the boxes, all of one tensor, are there and tile it."""
    found = list(entries)
    return bool(found) and tile(found[0].global_shape, found)


def _is_grid(boxes: Sequence[HasBox]) -> bool:
    """Whether each box ends before the next begins in every dimension, and no two overlap.

    So all the usual shardings are known for disjoint in one pass.
    """
    if len({box.offsets for box in boxes}) != len(boxes):
        return False
    for dim in range(len(boxes[0].sizes)):
        starts = sorted({box.offsets[dim] for box in boxes})
        for box in boxes:
            after = bisect.bisect_right(starts, box.offsets[dim])
            if after < len(starts) and box.offsets[dim] + box.sizes[dim] > starts[after]:
                return False
    return True


def _swept(boxes: Sequence[B]) -> tuple[B, B] | None:
    """By a sweep along the dimension that is cut most often."""
    dims = len(boxes[0].sizes)
    if not dims:
        return boxes[0], boxes[1]
    dim = max(range(dims), key=lambda d: len({box.offsets[d] for box in boxes}))
    active: list[B] = []
    for box in sorted(boxes, key=lambda b: b.offsets[dim]):
        active = [other for other in active if other.offsets[dim] + other.sizes[dim] > box.offsets[dim]]
        for other in active:
            if _meet(other, box):
                return other, box
        active.append(box)
    return None


def _meet(one: HasBox, other: HasBox) -> bool:
    sides = zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    return all(a < b + size_b and b < a + size_a for a, size_a, b, size_b in sides)


def boxes_of(shape: Shape, first: int, last: int) -> Iterator[tuple[Shape, Shape]]:
    """Offsets and sizes of boxes that hold elements first to last - 1, in their order; each is contiguous."""
    if first >= last:
        return
    if len(shape) <= 1:
        yield (first,) * len(shape), (last - first,) * len(shape)
        return
    row = math.prod(shape[1:])
    begin, end = -(-first // row), last // row  # of the rows that are whole
    if begin > end:
        yield from _in_row(shape, end, first, last)
        return
    yield from _in_row(shape, begin - 1, first, begin * row)
    if begin < end:
        yield (begin, *(0 for _ in shape[1:])), (end - begin, *shape[1:])
    yield from _in_row(shape, end, end * row, last)


def _in_row(shape: Shape, index: int, first: int, last: int) -> Iterator[tuple[Shape, Shape]]:
    """Boxes of a range within one row."""
    base = index * math.prod(shape[1:])
    for offsets, sizes in boxes_of(shape[1:], first - base, last - base):
        yield (index, *offsets), (1, *sizes)
