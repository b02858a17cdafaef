"""The ranks that one layout names for a box: every rank that has an element of it is among them, for any mesh."""

import math

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from ckptd.shared.base.ids import file_name
from ckptd.shared.format import layout as lay
from ckptd.shared.format.holders import holders_in
from ckptd.shared.format.packed_layout import Known, Spread, decode_layout, encode_layout, parted
from ckptd.shared.format.placement import REPLICATED, Mesh, Placed, box_at
from ckptd_client._state.reshard import Box, intersection

NAME = "model.weight"
SHAPES = st.lists(st.integers(1, 9), min_size=0, max_size=3).map(tuple)


def a_layout(rank, job, mesh, boxes):
    """Of one tensor, of which the rank has no box or one: all of its part, or a slice of it."""
    world_size, _, _, shape, cuts = job
    entries = [lay.TensorEntry(NAME, "F32", shape, *box, 4096, lay.box_nbytes("F32", box[1])) for box in boxes]
    layout = lay.Layout(
        version=lay.VERSION, file=file_name(rank), rank=rank, world_size=world_size, header_nbytes=4096,
        image_nbytes=8192, plan_id="p", tensors=entries, paths={NAME: (("k", "model"), ("k", "weight"))},
        aliases={},
    )  # fmt: skip
    return encode_layout(layout, Spread([lay.Planned(NAME, "F32", shape)], [mesh], {NAME: Placed(0, cuts)}))


@st.composite
def jobs(draw):
    """Meshes of a world: (world size, shape of the mesh, its ranks in the order of places, a tensor, its cuts)."""
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    count = math.prod(mesh)
    world = count + draw(st.integers(0, 3))
    first = draw(st.integers(0, world - count))
    regular = tuple(range(first, first + count))
    ranks = regular if draw(st.booleans()) else tuple(draw(st.permutations(range(world)))[:count])
    shape = draw(SHAPES)
    cuts = tuple(draw(st.sampled_from([REPLICATED, *range(len(shape))])) for _ in mesh)
    return world, mesh, ranks, shape, cuts


@st.composite
def wanted_of(draw, shape):
    offsets = tuple(draw(st.integers(0, size - 1)) for size in shape)
    return Box(offsets, tuple(draw(st.integers(1, size - at)) for size, at in zip(shape, offsets, strict=True)))


def places_of(mesh):
    found = [()]
    for extent in mesh:
        found = [(*place, at) for place in found for at in range(extent)]
    return found


def slices(shape, offsets, sizes, index, count):
    """The index-th of count slices of a box, in rows, if there is one."""
    rows = sizes[0] if sizes else 1
    first, stop = index * rows // count, (index + 1) * rows // count
    if not sizes:
        return [((), ())] if index == 0 else []
    return [((offsets[0] + first, *offsets[1:]), (stop - first, *sizes[1:]))] if stop > first else []


@given(st.data(), jobs(), st.booleans())
def test_every_rank_that_has_an_element_is_named_by_any_layout_of_the_mesh(data, job, sliced):
    """sliced: replicas divide the rows of their box among them."""
    _, shape_of_mesh, ranks, shape, cuts = job
    alike = [dim for dim, cut in enumerate(cuts) if cut == REPLICATED]
    replicas = math.prod(shape_of_mesh[dim] for dim in alike)
    layouts = {}
    for rank, place in zip(ranks, places_of(shape_of_mesh), strict=True):
        offsets, sizes = box_at(shape, Mesh(shape_of_mesh, place), cuts)
        boxes = [] if 0 in sizes else [(offsets, sizes)]
        if sliced and boxes:
            index = 0
            for dim in alike:
                index = index * shape_of_mesh[dim] + place[dim]
            boxes = slices(shape, offsets, sizes, index, replicas)
        layouts[rank] = parted(a_layout(rank, job, Mesh(shape_of_mesh, place, ranks), boxes), f"rank {rank}")
    wanted = data.draw(wanted_of(shape))
    asked = data.draw(st.sampled_from(sorted(layouts)))
    found = holders_in(layouts[asked], where="asked", known=Known()).of(NAME, *wanted)
    named = {one.rank: Box(one.offsets, one.sizes) for one in found}
    assert len(named) == len(found), "each once"
    for rank, parts in layouts.items():
        for entry in decode_layout(msgspec.msgpack.encode(tuple(parts)), where="x").tensors:
            box = Box(entry.offsets, entry.sizes)
            if not shape or intersection(box, wanted) is not None:
                assert rank in named
                assert not shape or intersection(box, named[rank]) == box, "nothing outside of what the mesh says"
    if shape and not sliced:
        assert named.keys() == {
            rank
            for rank, parts in layouts.items()
            for entry in decode_layout(msgspec.msgpack.encode(tuple(parts)), where="x").tensors
            if intersection(Box(entry.offsets, entry.sizes), wanted) is not None
        }, "and no other"
