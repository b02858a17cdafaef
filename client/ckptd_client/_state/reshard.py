"""Which saved bytes fill a box of a tensor, whatever boxes it was saved in. Pure; boxes are contiguous, row-major."""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ckptd.shared.format.layout import TensorEntry, contiguous_strides, itemsize

Ints = tuple[int, ...]


class Box(NamedTuple):
    """A part of a tensor."""

    offsets: Ints
    sizes: Ints

    @property
    def empty(self) -> bool:
        """Whether it has no element."""
        return 0 in self.sizes


class Saved(NamedTuple):
    """A box that a rank's image holds."""

    rank: int
    entry: TensorEntry

    @property
    def box(self) -> Box:
        """Where it lies in its tensor."""
        return Box(self.entry.offsets, self.entry.sizes)


class Run(NamedTuple):
    """Bytes that are contiguous in the file of a rank and in the target."""

    rank: int
    source: int  # absolute in the file
    target: int  # in the target's bytes
    nbytes: int


def cover(target: Box, saved: Iterable[Saved], *, prefer: int | None) -> list[Run] | None:
    """The runs that fill target, each byte once; None when saved does not hold all of it.

    A box that holds all of it is taken alone, the one of rank prefer first: what every rank holds may differ per rank.
    prefer None: each element is of the lowest rank that has it, whatever the target, so all readers get one tensor.
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
    """The runs that fill a box of a tensor from a saved box that holds all of it."""
    return _runs(box, source, box)


def intersection(a: Box, b: Box) -> Box | None:
    """What two boxes share, None when that is nothing."""
    offsets = tuple(map(max, a.offsets, b.offsets))
    ends = [min(ao + an, bo + bn) for ao, an, bo, bn in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True)]
    sizes = tuple(end - start for start, end in zip(offsets, ends, strict=True))
    return Box(offsets, sizes) if all(size > 0 for size in sizes) else None


def subtract(box: Box, part: Box) -> list[Box]:
    """Boxes that make up box without part, which lies inside it."""
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
    """The contiguous pieces of common, as they lie in the source's image and in the target."""
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
    """How many leading dims break contiguity: all but the last ones that span both boxes, and the one before those."""
    dims = len(common.sizes)
    while dims and common.sizes[dims - 1] == a.sizes[dims - 1] == b.sizes[dims - 1]:
        dims -= 1
    return max(dims - 1, 0)


def _dot(index: Sequence[int], strides: Sequence[int]) -> int:
    """Of the leading dims that index has."""
    return sum(i * s for i, s in zip(index, strides, strict=False))


def _position(point: Ints, origin: Ints, strides: Sequence[int]) -> int:
    return _dot([p - o for p, o in zip(point, origin, strict=True)], strides)
