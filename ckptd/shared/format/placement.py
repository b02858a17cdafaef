"""Boxes that follow from a mesh: which part of a tensor lies at a place of it, as torch's DTensor cuts it. Pure."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, NamedTuple

import msgspec

MAX_DIMS = 64
Shape = Annotated[tuple[Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)], ...], msgspec.Meta(max_length=MAX_DIMS)]
MAX_MESHES = 1024
_Extent = Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
MeshShape = Annotated[tuple[_Extent, ...], msgspec.Meta(min_length=1, max_length=MAX_DIMS)]
MeshPlace = Annotated[tuple[Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)], ...], msgspec.Meta(max_length=MAX_DIMS)]
REPLICATED = -1
# For each dimension of a mesh the dimension of the tensor that is cut along it, or REPLICATED.
Cuts = Annotated[
    tuple[Annotated[int, msgspec.Meta(ge=REPLICATED, lt=MAX_DIMS)], ...], msgspec.Meta(max_length=MAX_DIMS)
]


class Mesh(NamedTuple):
    """A mesh of ranks, and the place of this one in it. ranks: all, in the order of places; empty: not known."""

    shape: MeshShape
    place: MeshPlace
    ranks: tuple[int, ...] = ()


class Placed(msgspec.Struct, frozen=True, array_like=True):
    """How a tensor lies on a mesh. mesh: its index."""

    mesh: Annotated[int, msgspec.Meta(ge=0)]
    cuts: Cuts


class MeshRanks(msgspec.Struct, frozen=True, array_like=True):
    """The ranks of a mesh, the same said by each of them. Both empty: not known."""

    strides: Annotated[
        tuple[Annotated[int, msgspec.Meta(gt=-(1 << 31), lt=1 << 31)], ...], msgspec.Meta(max_length=MAX_DIMS)
    ] = ()  # what a step along each dimension adds to a rank's number
    listed: bytes = b""  # a column of all, in the order of places, where no strides give them


def strides_of(mesh: Mesh) -> tuple[int, ...] | None:
    """The strides that give the ranks of a mesh, which must be known; None where none do."""
    steps = [math.prod(mesh.shape[dim + 1 :]) for dim in range(len(mesh.shape))]
    strides = tuple(
        mesh.ranks[step] - mesh.ranks[0] if extent > 1 else 0 for step, extent in zip(steps, mesh.shape, strict=True)
    )
    found = [mesh.ranks[0]]
    for extent, stride in zip(mesh.shape, strides, strict=True):
        found = [rank + at * stride for rank in found for at in range(extent)]
    return strides if found == list(mesh.ranks) else None


def position(shape: Sequence[int], place: Sequence[int]) -> int:
    """Of a place of a mesh, in the order of places."""
    at = 0
    for extent, index in zip(shape, place, strict=True):
        at = at * extent + index
    return at


def box_at(global_shape: Shape, mesh: Mesh, cuts: Sequence[int]) -> tuple[Shape, Shape]:
    """Offsets and sizes of the part at the mesh's place: chunks of equal length, the last ones shorter or empty.

    As torch.chunk does it, along one dimension of the mesh after the other. Raises ValueError for what is no placement.
    """
    offsets, sizes = [0] * len(global_shape), list(global_shape)
    for extent, at, dim in zip(mesh.shape, mesh.place, cuts, strict=True):
        if at >= extent:
            raise ValueError("a place outside of its mesh")
        if dim == REPLICATED:
            continue
        if dim >= len(sizes):
            raise ValueError("a cut along no dimension")
        chunk = -(-sizes[dim] // extent)
        first = min(sizes[dim], chunk * at)
        offsets[dim] += first
        sizes[dim] = min(chunk, sizes[dim] - first)
    return tuple(offsets), tuple(sizes)


Part = tuple[MeshPlace, Shape, Shape]  # a place of a mesh, and offsets and sizes of its box


def parts_in(
    global_shape: Shape, mesh: Sequence[int], cuts: Sequence[int], offsets: Shape, sizes: Shape
) -> Iterator[Part]:
    """The parts of a tensor that lie at places of a mesh of this shape and have an element of a box, by place.

    Takes time by what it gives: no other place is looked at. Raises ValueError for what is no placement.
    """
    if len(mesh) != len(cuts) or max(cuts, default=REPLICATED) >= len(global_shape):
        raise ValueError("a cut along no dimension")
    if not len(offsets) == len(sizes) == len(global_shape):
        raise ValueError("a box of other dimensions than its tensor")
    if 0 in sizes:
        return
    found: Iterator[Part] = iter([((), (0,) * len(global_shape), global_shape)])
    for extent, cut in zip(mesh, cuts, strict=True):
        found = _cut(found, extent, cut, offsets, sizes)
    yield from found


def _cut(parts: Iterable[Part], extent: int, cut: int, offsets: Shape, sizes: Shape) -> Iterator[Part]:
    """What one more dimension of the mesh makes of parts that meet the box."""
    for place, start, lengths in parts:
        if cut == REPLICATED:
            yield from (((*place, at), start, lengths) for at in range(extent))
            continue
        length, base = lengths[cut], start[cut]
        chunk = -(-length // extent)
        low, high = max(0, offsets[cut] - base), min(length, offsets[cut] + sizes[cut] - base)
        for at in range(low // chunk, -(-high // chunk)):
            first = (*start[:cut], base + chunk * at, *start[cut + 1 :])
            yield (*place, at), first, (*lengths[:cut], min(chunk, length - chunk * at), *lengths[cut + 1 :])
