"""Boxes that follow from a mesh: which part of a tensor lies at a place of it, as torch's DTensor cuts it. Pure."""

from collections.abc import Sequence
from typing import Annotated

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


class Mesh(msgspec.Struct, frozen=True, array_like=True):
    """A mesh of ranks, and the place of this one in it."""

    shape: MeshShape
    place: MeshPlace


class Placed(msgspec.Struct, frozen=True, array_like=True):
    """How a tensor lies on a mesh. mesh: its index."""

    mesh: Annotated[int, msgspec.Meta(ge=0)]
    cuts: Cuts


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
