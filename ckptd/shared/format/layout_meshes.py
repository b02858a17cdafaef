"""What a layout says of the meshes that the tensors of its state lie on, without its boxes. Pure."""

import itertools
import math
from collections.abc import Container
from typing import NamedTuple

import msgspec

from ckptd.shared.base.errors import DamagedError
from ckptd.shared.format.columns import numbers_in, unsigned
from ckptd.shared.format.layout import MIN_HEADER_NBYTES, Path, Planned, check_paths
from ckptd.shared.format.packed_layout import Known, Own, Parts, Spread, meshes_of, own_in, placed_of
from ckptd.shared.format.placement import Mesh, MeshRanks, Placed

_encoder = msgspec.msgpack.Encoder()


class Lying(NamedTuple):
    """What a layout says of how all tensors of its state lie on meshes, whether or not its rank has boxes of them."""

    rank: int
    world_size: int
    meshes: list[Mesh]  # without their ranks, which the next ones say
    ranks: list[MeshRanks]
    tensors: dict[str, Planned]  # all of the state, by name
    placed: dict[str, Placed]  # of those that lie on a mesh
    paths: dict[str, Path]
    aliases: dict[str, str]
    held_alike: dict[str, list[str]]
    holders: dict[str, bytes]  # the ranks that hold a tensor together, of those that a part of the job holds


def lying(parts: Parts, *, where: str, known: Known) -> Lying:
    """Of the layout that the parts make; known: as of layout_in. Makes no box. Raises DamagedError, naming where."""
    plan = known.plan(parts.plan, where)
    form, columns = known.form(parts.form, where)
    own = own_in(parts, where)
    meshes = meshes_of(form, own, where)
    numbers = placed_of(plan, form, columns[-1], where)
    placed = {
        one.name: form.placements[number - 1] for one, number in zip(plan.tensors, numbers, strict=True) if number
    }
    if len(form.ranks) != len(meshes) or any(one.mesh >= len(meshes) for one in form.placements):
        raise DamagedError(f"{where}: layout: a placement on no mesh, or a mesh of no ranks")
    tensors = {one.name: one for one in plan.tensors}
    check_paths(plan.paths, where)
    return Lying(
        own.rank, own.world_size, meshes, form.ranks, tensors, placed, plan.paths, own.aliases, own.held_alike,
        known.holders(plan, own.holders, where),
    )  # fmt: skip


def spread_of(found: Lying, kept: Container[str], here: Container[str], where: str) -> Spread:
    """As the layout's writer gave it, of the kept tensors. here: those of which its rank has boxes."""
    meshes = [
        Mesh(mesh.shape, mesh.place, _ranks_in(mesh, ranks, found.rank, where))
        for mesh, ranks in zip(found.meshes, found.ranks, strict=True)
    ]
    absent = [one for name, one in found.tensors.items() if name in kept and name not in here]
    return Spread(absent, meshes, {name: placed for name, placed in found.placed.items() if name in kept})


def _ranks_in(mesh: Mesh, ranks: MeshRanks, rank: int, where: str) -> tuple[int, ...]:
    """All ranks of the mesh, in the order of places; empty: not known."""
    if math.prod(mesh.shape) == 1:
        return (rank,)
    if ranks.listed:
        return tuple(numbers_in(ranks.listed, math.prod(mesh.shape), where))
    if not ranks.strides:
        return ()
    found = [rank - sum(at * step for at, step in zip(mesh.place, ranks.strides, strict=True))]
    for extent, step in zip(mesh.shape, ranks.strides, strict=True):
        found = [one + at * step for one in found for at in range(extent)]
    return tuple(found)


def tensors_in(boxes: tuple[int, bytes], where: str) -> set[int]:
    """The numbers of the tensors, in the plan, of which a layout has boxes. boxes: their number, and their column."""
    return set(itertools.accumulate(unsigned(numbers_in(boxes[1], boxes[0], where)), initial=-1)) - {-1}


class WithoutBoxes(NamedTuple):
    """A layout without its boxes. alike: what ranks of one kind have alike of the own part."""

    parts: Parts
    alike: bytes
    tensors: tuple[int, bytes]  # how many boxes there were, and the column of their tensors
    meshes: list[tuple[int, int]]  # of each mesh of several known ranks its number, and its rank at the first place


def without_boxes(parts: Parts, *, where: str, known: Known) -> WithoutBoxes:
    """Of the layout that the parts make; likewise. Its image is empty, its form is that of all ranks of a kind."""
    form, columns = known.form(parts.form, where)
    own = own_in(parts, where)
    bare = Own(
        version=own.version, rank=own.rank, world_size=own.world_size, header_nbytes=MIN_HEADER_NBYTES,
        image_nbytes=MIN_HEADER_NBYTES, plan_id="", places=own.places, aliases=own.aliases, held_alike=own.held_alike,
        holders=own.holders,
    )  # fmt: skip
    starts = []
    for number, (ranks, mesh) in enumerate(zip(form.ranks, meshes_of(form, own, where), strict=True)):
        if math.prod(mesh.shape) > 1 and (ranks.strides or ranks.listed):
            steps = zip(mesh.place, ranks.strides, strict=False)  # none where its ranks are listed, in the form
            starts.append((number, own.rank - sum(at * step for at, step in steps) if ranks.strides else -1))
    alike = _encoder.encode((own.version, own.world_size, own.aliases, own.held_alike, own.holders))
    empty = known.squeezed_form(_encoder.encode(msgspec.structs.replace(form, count=0)), columns[-1])
    return WithoutBoxes(Parts(parts.plan, empty, _encoder.encode(bare)), alike, (form.count, columns[0]), starts)
