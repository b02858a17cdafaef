"""Boxes of all ranks from placements alone, and their pieces: each element once, none too large, in one order."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd.shared.format.boxes import tile
from ckptd_client._gather._cuts import Box, cut, pieces_of, placed, run_of

SHAPES = st.lists(st.integers(0, 7), max_size=4).map(tuple)


@st.composite
def placements(draw):
    shape = draw(SHAPES)
    dims = st.one_of(st.none(), st.integers(0, len(shape) - 1)) if shape else st.none()
    cuts = draw(st.lists(st.tuples(st.integers(1, 4), dims), min_size=1, max_size=3))
    return shape, tuple(n for n, _ in cuts), [dim for _, dim in cuts]


def numbered(shape):
    return torch.arange(math.prod(shape)).view(shape)


def within(tensor, box):
    return tensor[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))]


@given(placements())
@settings(deadline=None)
def test_boxes_are_those_that_chunk_deals_out(given_):
    shape, mesh, dims = given_
    boxes = placed(shape, mesh, dims)
    for place, box in zip(itertools.product(*map(range, mesh)), boxes, strict=True):
        part = numbered(shape)
        for size, mine, dim in zip(mesh, place, dims, strict=True):
            if dim is not None:
                parts = part.chunk(size, dim)
                part = parts[mine] if mine < len(parts) else part.narrow(dim, 0, 0)
        assert within(numbered(shape), box).flatten().tolist() == part.flatten().tolist()
    copies = math.prod(n for n, dim in zip(mesh, dims, strict=True) if dim is None)
    assert sum(math.prod(box.sizes) for box in boxes) == copies * math.prod(shape)


@given(SHAPES, st.integers(1, 50))
def test_a_box_is_cut_in_the_order_of_its_elements(shape, most):
    box = Box((0,) * len(shape), shape)
    parts = list(cut(box, most))
    assert [n for part in parts for n in within(numbered(shape), part).flatten().tolist()] == list(
        range(math.prod(shape))
    )
    assert all(math.prod(part.sizes) <= most for part in parts)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4), st.integers(0, 3)), max_size=4))
def test_a_run_is_found_where_there_is_one(sides):
    shape, box = (
        tuple(sum(side) for side in sides),
        Box(tuple(side[0] for side in sides), tuple(side[1] for side in sides)),
    )
    inside = within(numbered(shape), box).flatten().tolist()
    run = run_of(box, shape)
    if run is not None:
        assert inside == list(range(*run))
    elif inside:
        assert inside != list(range(inside[0], inside[0] + len(inside)))


@given(placements(), st.integers(1, 40))
@settings(deadline=None)
def test_pieces_have_each_element_once(given_, most):
    shape, mesh, dims = given_
    own = [(box,) for box in placed(shape, mesh, dims)]
    if None in dims:
        own = own[:1]
        shape = own[0][0].sizes
        own = [(Box((0,) * len(shape), shape),)]
    pieces = pieces_of(shape, own, most)
    found = [region for piece in pieces for regions in piece.regions for region in regions]
    assert tile(shape, [region.box for region in found])
    assert all(count <= most for piece in pieces for count in piece.counts)
    for piece in pieces:
        for member, regions in enumerate(piece.regions):
            for region in regions:
                chunk = within(numbered(shape), own[member][region.chunk])
                local = chunk if region.local is None else chunk[region.local]
                assert torch.equal(local, within(numbered(shape), region.box))


def test_a_tensor_without_elements_is_one_piece_of_nothing():
    (piece,) = pieces_of((0, 3), [(Box((0, 0), (0, 3)),)] * 2, 10)
    assert piece.counts == (0, 0)


@pytest.mark.parametrize("most", [1, 2, 1000])
def test_no_dimension_is_one_element(most):
    (piece,) = pieces_of((), [(Box((), ()),)], most)
    assert piece.counts == (1,)
    assert piece.regions[0][0].run == (0, 1)
