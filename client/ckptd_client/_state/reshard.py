"""Finds the saved bytes that fill a box of a tensor, for any saved boxes. Pure; boxes are contiguous, row-major."""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ckptd.shared.format.dtypes import itemsize
from ckptd.shared.format.layout import TensorEntry, contiguous_strides

Ints = tuple[int, ...]


class Box(NamedTuple):
    """A rectangular part of a tensor."""

    offsets: Ints
    sizes: Ints

    @property
    def empty(self) -> bool:
        """Whether it has no element."""
        return 0 in self.sizes


class Saved(NamedTuple):
    """A box in a rank's image."""

    rank: int
    entry: TensorEntry

    @property
    def box(self) -> Box:
        """Its position in the tensor."""
        return Box(self.entry.offsets, self.entry.sizes)


class Run(NamedTuple):
    """Bytes that are contiguous in the file of a rank and in the target."""

    rank: int
    source: int  # absolute in the file
    target: int  # in the target's bytes
    nbytes: int


def cover(target: Box, saved: Iterable[Saved], *, prefer: int | None) -> list[Run] | None:
    """The runs that fill target, each byte once; None if saved lacks some of it.

    If one box contains the target, the runs use that box alone, rank prefer's first: ranks may hold different values.
    prefer None: each element comes from the lowest rank that has it, for any target, so all readers get one tensor.
    """
    if target.empty:
        return []
    boxes = sorted(saved, key=lambda s: (s.rank != prefer, s.rank))
    fits = (s for s in boxes if intersection(s.box, target) == target)
    whole = next(fits, None) if prefer is not None else None
    remaining = [target]
    runs: list[Run] = []
    for source in [whole] if whole is not None else boxes:
        left: list[Box] = []
        for piece in remaining:
            common = intersection(source.box, piece)
            if common is None:
                left.append(piece)
            else:
                runs += _runs(common, source, target)
                left += subtract(piece, common)
        remaining = left
        if not remaining:
            return runs
    return None


def runs(source: Saved, box: Box) -> Iterator[Run]:
    """The runs that fill a box of a tensor from a saved box that contains it."""
    return _runs(box, source, box)


def intersection(a: Box, b: Box) -> Box | None:
    """The common part of two boxes, or None."""
    offsets = tuple(map(max, a.offsets, b.offsets))
    ends = [min(ao + an, bo + bn) for ao, an, bo, bn in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True)]
    sizes = tuple(end - start for start, end in zip(offsets, ends, strict=True))
    return Box(offsets, sizes) if all(size > 0 for size in sizes) else None


def subtract(box: Box, part: Box) -> list[Box]:
    """Boxes that together are box without part, which is inside it."""
    rest = []
    offsets, sizes = list(box.offsets), list(box.sizes)
    for d in range(len(sizes)):
        before = part.offsets[d] - offsets[d]
        after = offsets[d] + sizes[d] - part.offsets[d] - part.sizes[d]
        if before:
            rest.append(Box(tuple(offsets), (*sizes[:d], before, *sizes[d + 1 :])))
        if after:
            start = (*offsets[:d], part.offsets[d] + part.sizes[d], *offsets[d + 1 :])
            rest.append(Box(start, (*sizes[:d], after, *sizes[d + 1 :])))
        offsets[d], sizes[d] = part.offsets[d], part.sizes[d]
    return rest


def _runs(common: Box, source: Saved, target: Box) -> Iterator[Run]:
    """The runs of common: ranges that are contiguous both in the source's image and in the target."""
    size = itemsize(source.entry.dtype)
    from_strides, to_strides = contiguous_strides(source.box.sizes), contiguous_strides(target.sizes)
    looped = _looped_dims(common, source.box, target)
    nbytes = math.prod(common.sizes[looped:]) * size
    first_from = _position(common.offsets, source.box.offsets, from_strides)
    first_to = _position(common.offsets, target.offsets, to_strides)
    for index in itertools.product(*map(range, common.sizes[:looped])):
        at_from = first_from + _dot(index, from_strides)
        at_to = first_to + _dot(index, to_strides)
        yield Run(source.rank, source.entry.data_offset + at_from * size, at_to * size, nbytes)


def _looped_dims(common: Box, a: Box, b: Box) -> int:
    """The number of leading dims that break contiguity: all but the last ones that span both boxes, and one more."""
    dims = len(common.sizes)
    while dims and common.sizes[dims - 1] == a.sizes[dims - 1] == b.sizes[dims - 1]:
        dims -= 1
    return max(dims - 1, 0)


def _dot(index: Sequence[int], strides: Sequence[int]) -> int:
    """The dot product over the leading dims that index has."""
    return sum(i * s for i, s in zip(index, strides, strict=False))


def _position(point: Ints, origin: Ints, strides: Sequence[int]) -> int:
    return _dot([p - o for p, o in zip(point, origin, strict=True)], strides)
