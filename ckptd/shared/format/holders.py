"""Which ranks can hold elements of a box of a tensor: the placement that one layout has of it, turned around. Pure.

A layout says how every tensor of its state lies on which mesh, and which ranks the mesh has. So one of them answers for
all ranks of its meshes, in the time that the answer takes and not by their number or their boxes. What it answers is
to be held against their own layouts: replicas may have divided the rows of a box among them, a rank may hold less.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ckptd.shared.base.errors import DamagedError
from ckptd.shared.base.wording import shown
from ckptd.shared.format.columns import numbers_in
from ckptd.shared.format.layout_meshes import Lying, lying
from ckptd.shared.format.packed_layout import Known, Parts
from ckptd.shared.format.placement import MeshPlace, Placed, Shape, parts_in, position


class Holder(NamedTuple):
    """A rank, and the box that its place in the mesh gives it; replicas, whose boxes are one, may each hold rows of it.

    Outside of that box it holds nothing of the tensor, as far as the mesh says.
    """

    rank: int
    offsets: Shape
    sizes: Shape


class Holders:
    """What one rank's layout says of all ranks of its meshes. where names its source in errors."""

    def __init__(self, said: Lying, where: str) -> None:
        self._said, self._where = said, where
        self._ranks = [self._ranks_of(mesh) for mesh in range(len(said.meshes))]

    def of(self, name: str, offsets: Shape, sizes: Shape) -> list[Holder] | None:
        """All ranks of the tensor's mesh that can hold an element of the box, by place; none for an empty box.

        None where this layout does not say: the state has no tensor of this name, or it lies on no mesh of known ranks.
        Ranks of no mesh of this layout may hold it too: parts of a job, such as pipeline stages, have their own.
        Raises DamagedError for a layout that cannot be.
        """
        placed = self._said.placed.get(name)
        if placed is None or (ranks := self._ranks[placed.mesh]) is None:
            return None
        return list(self._found(name, placed, ranks, (offsets, sizes)))

    def is_alone(self, name: str) -> bool:
        """Whether the tensor lies on a mesh of this rank alone: each rank that says so may have one of its own."""
        placed = self._said.placed.get(name)
        return placed is not None and math.prod(self._said.meshes[placed.mesh].shape) == 1

    def _found(self, name: str, placed: Placed, ranks: "_MeshRanks", wanted: tuple[Shape, Shape]) -> Iterator[Holder]:
        mesh, shape = self._said.meshes[placed.mesh].shape, self._said.tensors[name].global_shape
        try:
            for place, offsets, sizes in parts_in(shape, mesh, placed.cuts, *wanted):
                yield Holder(ranks.at(place), offsets, sizes)
        except ValueError as error:
            text = f"{self._where}: layout: a placement of {shown(name)} that cannot be: {error}"
            raise DamagedError(text) from error

    def _ranks_of(self, number: int) -> "_MeshRanks | None":
        """Checked: each rank of the mesh is one of the job, and this one is where it says."""
        said, (shape, place, _) = self._said.ranks[number], self._said.meshes[number]
        if not said.strides and not said.listed:
            return None
        count = math.prod(shape)
        if count > self._said.world_size:
            raise DamagedError(f"{self._where}: layout: a mesh of {count} ranks in a job of {self._said.world_size}")
        if said.listed:
            found = _MeshRanks(shape, listed=list(numbers_in(said.listed, count, self._where)))
            ends = min(found.listed), max(found.listed)
        else:
            if len(said.strides) != len(shape):
                raise DamagedError(f"{self._where}: layout: a mesh of other dimensions than its strides")
            steps = [(extent - 1) * stride for extent, stride in zip(shape, said.strides, strict=True)]
            base = self._said.rank - sum(at * stride for at, stride in zip(place, said.strides, strict=True))
            found = _MeshRanks(shape, base, said.strides)
            ends = base + sum(min(0, step) for step in steps), base + sum(max(0, step) for step in steps)
        if not 0 <= ends[0] <= ends[1] < self._said.world_size or found.at(place) != self._said.rank:
            raise DamagedError(f"{self._where}: layout: a mesh of other ranks than the job's")
        return found


class _MeshRanks(NamedTuple):
    shape: tuple[int, ...]
    base: int = 0
    strides: tuple[int, ...] = ()
    listed: Sequence[int] = ()

    def at(self, place: MeshPlace) -> int:
        if self.listed:
            return self.listed[position(self.shape, place)]
        return self.base + sum(at * stride for at, stride in zip(place, self.strides, strict=True))


def holders_in(parts: Parts, *, where: str, known: Known) -> Holders:
    """Of an encoded layout. known: as of layout_in. Raises DamagedError, naming where."""
    return Holders(lying(parts, where=where, known=known), where)
