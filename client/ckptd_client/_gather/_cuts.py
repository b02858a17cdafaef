"""The boxes of a tensor on each rank, and the cuts of boxes into pieces that fit a bucket. Pure."""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

Shape = tuple[int, ...]


class Box(NamedTuple):
    """A rectangular part of a tensor."""

    offsets: Shape
    sizes: Shape


class Region(NamedTuple):
    """A box, or a part of a box, of one rank."""

    box: Box
    chunk: int  # index of the box among the rank's boxes
    local: tuple[slice, ...] | None  # position in the box; None: all of it
    run: tuple[int, int] | None  # first and last + 1 in the flattened tensor, if contiguous there

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.box.sizes)


class Piece(NamedTuple):
    """What ranks transfer of a tensor at once: for each member the regions that it sends, in order."""

    regions: tuple[tuple[Region, ...], ...]
    counts: tuple[int, ...]  # elements of each member


def placed(shape: Shape, mesh: Shape, dims: Sequence[int | None]) -> list[Box]:
    """The box at each coordinate of a mesh, the last dimension of the mesh fastest; includes empty boxes.

    dims: for each dimension of the mesh the dimension of the tensor that it cuts, or None. Cuts are those of
    torch.chunk: all shards as long as the first, the last ones shorter or empty.
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
    """Cuts the box into boxes of at most so many elements (one at least), in the order of its elements."""
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
    """The range of the box in the flattened tensor; None if it is not contiguous there."""
    cuts = [d for d, size in enumerate(box.sizes) if size != shape[d]]
    if cuts and any(size != 1 for size in box.sizes[: cuts[-1]]):
        return None
    start = 0
    for offset, size in zip(box.offsets, shape, strict=True):
        start = start * size + offset
    return start, start + math.prod(box.sizes)


def pieces_of(shape: Shape, boxes: Sequence[Sequence[Box]], most: int) -> list[Piece]:
    """Cuts a tensor into pieces of at most so many elements of each member (one at least). boxes: of each member."""
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
