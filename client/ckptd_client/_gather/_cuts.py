"""Which box of a tensor lies on which rank, and how boxes are cut into pieces that fit a bucket. Pure."""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

Shape = tuple[int, ...]


class Box(NamedTuple):
    """A part of a tensor."""

    offsets: Shape
    sizes: Shape


class Region(NamedTuple):
    """A box, or what was cut of one, that one rank has."""

    box: Box
    chunk: int  # which of the rank's boxes it is of
    local: tuple[slice, ...] | None  # where in that; None: all of it
    run: tuple[int, int] | None  # first and last + 1 in the flattened tensor, where it is one run of that

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.box.sizes)


class Piece(NamedTuple):
    """What travels of a tensor at once: of each member what it gives, in the order in which it gives it."""

    regions: tuple[tuple[Region, ...], ...]
    counts: tuple[int, ...]  # elements of each member


def placed(shape: Shape, mesh: Shape, dims: Sequence[int | None]) -> list[Box]:
    """The box of each place of a mesh, the last dimension of the mesh fastest; empty ones too.

    dims: which dimension of the tensor each of the mesh cuts, None where it does not. Cut as torch.chunk does: all
    shards as long as the first, the last ones shorter or empty.
    """
    found = []
    for place in itertools.product(*map(range, mesh)):
        offsets, sizes = [0] * len(shape), list(shape)
        for ranks, mine, dim in zip(mesh, place, dims, strict=True):
            if dim is not None:
                long = -(-sizes[dim] // ranks)
                first = min(mine * long, sizes[dim])
                offsets[dim] += first
                sizes[dim] = min(long, sizes[dim] - first)
        found.append(Box(tuple(offsets), tuple(sizes)))
    return found


def cut(box: Box, most: int) -> Iterator[Box]:
    """The box in boxes of at most so many elements (one at least), in the order of its elements."""
    dim = next((d for d, size in enumerate(box.sizes) if size > 1), None)
    if dim is None or math.prod(box.sizes) <= most:
        yield box
        return
    row = math.prod(box.sizes[dim + 1 :])
    rows = max(1, most // row)
    for first in range(0, box.sizes[dim], rows):
        offsets, sizes = list(box.offsets), list(box.sizes)
        offsets[dim] += first
        sizes[dim] = min(rows, box.sizes[dim] - first)
        yield from cut(Box(tuple(offsets), tuple(sizes)), max(1, most))


def run_of(box: Box, shape: Shape) -> tuple[int, int] | None:
    """Where the box lies in the flattened tensor, None when it is not one run of that."""
    cuts = [d for d, size in enumerate(box.sizes) if size != shape[d]]
    if cuts and any(size != 1 for size in box.sizes[: cuts[-1]]):
        return None
    start = 0
    for offset, size in zip(box.offsets, shape, strict=True):
        start = start * size + offset
    return start, start + math.prod(box.sizes)


def pieces_of(shape: Shape, boxes: Sequence[Sequence[Box]], most: int) -> list[Piece]:
    """A tensor in pieces of at most so many elements of each member (one at least). boxes: of each member."""
    whole = max(sum(math.prod(box.sizes) for box in own) for own in boxes) <= most
    lists = [[_region(shape, own, k, part) for k, part in _parts(own, None if whole else most)] for own in boxes]
    if whole:
        return [_piece([tuple(own) for own in lists])]
    return [_piece([(region,) if region else () for region in row]) for row in itertools.zip_longest(*lists)]


def _parts(own: Sequence[Box], most: int | None) -> Iterator[tuple[int, Box]]:
    for k, box in enumerate(own):
        if 0 not in box.sizes:
            yield from ((k, part) for part in ([box] if most is None else cut(box, most)))


def _region(shape: Shape, own: Sequence[Box], chunk: int, part: Box) -> Region:
    around = own[chunk]
    local = None
    if part != around:
        ends = zip(part.offsets, around.offsets, part.sizes, strict=True)
        local = tuple(slice(a - b, a - b + size) for a, b, size in ends)
    return Region(part, chunk, local, run_of(part, shape))


def _piece(regions: list[tuple[Region, ...]]) -> Piece:
    return Piece(tuple(regions), tuple(sum(region.numel for region in own) for own in regions))
