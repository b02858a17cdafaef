"""Layouts as bytes: each part once for all that have it alike, placements only where they reproduce the boxes."""

import os
import resource

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptd.shared.base.errors import DamagedError
from ckptd.shared.base.ids import file_name
from ckptd.shared.format import layout as lay
from ckptd.shared.format import packed_layout
from ckptd.shared.format.columns import column, most_nbytes, numbers_in, parts_in, signed, squeezed, unsigned
from ckptd.shared.format.packed_layout import (
    Known,
    Parts,
    Spread,
    decode_layout,
    encode_layout,
    glance,
    layout_in,
    parted,
)
from ckptd.shared.format.placement import REPLICATED, Mesh, Placed, box_at
from ckptd.shared.format.rank_members import members_of

RANKS, TENSORS = 16, 40


def a_layout(rank, *, ranks=RANKS, placed=True, shift=0):
    """Of tensors that are cut along rows, but for the last, which each rank has whole. shift: of every box."""
    mesh = Mesh((ranks,), (rank,), tuple(range(ranks)))
    entries, paths, at = [], {}, 4096
    for number in range(TENSORS):
        name = f"model.layers.{number}.weight"
        shape = (ranks * (1 + number % 3) - number % 2, 8)
        paths[name] = tuple(("k", step) for step in name.split("."))
        offsets, sizes = box_at(shape, mesh, (REPLICATED if number == TENSORS - 1 else 0,))
        if 0 in sizes:
            continue
        nbytes = lay.box_nbytes("F32", sizes)
        entries.append(lay.TensorEntry(name, "F32", shape, offsets, sizes, at + 64, nbytes, at, nbytes + 100))
        at += nbytes + 100
    present = {entry.name for entry in entries}
    shapes = {f"model.layers.{n}.weight": (ranks * (1 + n % 3) - n % 2, 8) for n in range(TENSORS)}
    cuts = {name: Placed(0, (REPLICATED if name.endswith(f".{TENSORS - 1}.weight") else 0,)) for name in shapes}
    layout = lay.Layout(
        version=lay.VERSION, file=file_name(rank), rank=rank, world_size=ranks, header_nbytes=4096, image_nbytes=at,
        plan_id="p", tensors=entries, paths=paths, aliases={},
    )  # fmt: skip
    absent = [lay.Planned(name, "F32", shape) for name, shape in shapes.items() if name not in present]
    return layout, Spread(absent, [mesh], cuts) if placed else Spread(absent)


@pytest.mark.parametrize("placed", [True, False])
@pytest.mark.parametrize("rank", [0, 1, RANKS - 1])
def test_a_layout_comes_back_with_what_it_has_no_boxes_of(rank, placed):
    layout, spread = a_layout(rank, placed=placed)
    raw = encode_layout(layout, spread)
    assert decode_layout(raw, where="x") == layout
    assert {one.name for one in Known().plan(parted(raw, "x").plan, "x").tensors} == layout.paths.keys()
    assert glance(parted(raw, "x"), "x") == (len(layout.tensors), True)


def test_ranks_of_one_state_have_one_plan_and_those_with_equal_boxes_one_form():
    parts = [parted(encode_layout(*a_layout(rank)), "x") for rank in range(RANKS)]
    assert len({part.plan for part in parts}) == 1
    assert len({part.form for part in parts}) == 2, "the last one has shorter boxes, and fewer"
    assert len({part.own for part in parts}) == RANKS
    assert max(len(part.own) for part in parts) < 200, "whatever the number of tensors"


def test_what_ranks_have_alike_is_read_once_for_an_owner_and_is_gone_with_it():
    known, (one, other) = Known(), (parted(encode_layout(*a_layout(rank)), "x") for rank in (1, 2))
    first = layout_in(one, where="x", known=known)
    assert layout_in(other, where="y", known=known).paths is first.paths
    assert layout_in(other, where="y", known=Known()).paths is not first.paths


def test_a_placement_that_does_not_reproduce_a_box_is_not_written():
    """The box stands there itself then: a reader takes what is written and infers nothing."""
    layout, spread = a_layout(3)
    first = msgspec.structs.replace(layout.tensors[1], offsets=(5, 0))
    moved = msgspec.structs.replace(layout, tensors=[layout.tensors[0], first, *layout.tensors[2:]])
    raw = encode_layout(moved, spread)
    assert decode_layout(raw, where="x").tensors == moved.tensors
    _, columns = Known().form(parted(raw, "x").form, "x")
    placements = zip(moved.tensors, numbers_in(columns[1], len(moved.tensors), "x"), strict=True)
    assert [entry.name for entry, how in placements if not how] == [first.name]


@given(st.integers(0, 40), st.integers(1, 9), st.data())
def test_a_mesh_cuts_as_torch_does(rows, extent, data):
    at = data.draw(st.integers(0, extent - 1))
    offsets, sizes = box_at((rows, 3), Mesh((extent,), (at,)), (0,))
    chunks = torch.arange(rows).chunk(extent) if rows else ()
    expected = chunks[at] if at < len(chunks) else torch.arange(0)
    assert sizes == (len(expected), 3)
    if len(expected):
        assert offsets == (int(expected[0]), 0)


def test_two_dimensions_of_a_mesh_cut_one_after_the_other():
    assert box_at((10, 4), Mesh((2, 3), (1, 1)), (0, 0)) == ((7, 0), (2, 4))
    assert box_at((10, 4), Mesh((2, 2), (1, 1)), (REPLICATED, 1)) == ((0, 2), (10, 2))


@pytest.mark.parametrize("cuts", [(7,), (0, 0)])
def test_what_is_no_placement(cuts):
    with pytest.raises(ValueError, match=r"."):
        box_at((4, 4), Mesh((2,), (0,)), cuts)
    with pytest.raises(ValueError, match="outside"):
        box_at((4, 4), Mesh((2,), (2,)), (0,))


@given(st.lists(st.integers(-(1 << 60), 1 << 60)))
def test_columns_come_back(numbers):
    raw = column(signed(numbers))
    assert unsigned(numbers_in(raw, len(numbers), "x")) == numbers
    assert parts_in(squeezed([raw, b""]), 2, "x") == [raw, b""]


def test_a_column_is_as_wide_as_its_largest_number():
    assert [len(column([1, largest])) for largest in (255, 256, 1 << 16, 1 << 32)] == [3, 5, 9, 17]


def test_what_swells_beyond_all_reason_is_stored_as_it_is():
    raw = bytes(64 << 20)
    data = squeezed([raw])
    assert parts_in(data, 1, "x") == [raw]
    assert most_nbytes(data) > len(raw)


def with_form(parts, count):
    """Of the first tensor as many boxes. pad: a field that no reader knows, so that the rest may swell so much."""
    zero, one = bytes([1]) + bytes(count), bytes([1]) + bytes([1]) * count
    steps = bytes([1, 2]) + bytes(count - 1)
    said = {"version": lay.VERSION, "count": count, "meshes": [[1]], "placements": [[0, [0]]]}
    head = msgspec.msgpack.encode(said | {"pad": os.urandom(780_000)})
    return parts._replace(form=squeezed([head, steps, one, b"\x01", zero, zero, zero, column([1] * TENSORS)]))


def test_a_form_of_more_boxes_than_its_tensors_can_have_is_refused_before_one_is_made():
    """Zeros deflate to nothing: a megabyte must not become gigabytes of boxes."""
    count = 10_000_000
    parts = with_form(parted(encode_layout(*a_layout(0)), "x"), count)
    assert sum(map(len, parts)) < 1 << 20
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DamagedError, match=f"x: layout: {count} boxes, and {TENSORS} tensors have at most {TENSORS}"):
        layout_in(parts, where="x", known=Known())
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10, "KiB"


def many_empty(count, dims, *, files, steps):
    """The parts of a layout of boxes without bytes, each of as many dimensions. steps: from tensor to tensor."""
    tensors = [[f"{number:x}", "U8", [0] * dims] for number in range(count // files)]
    paths = {name: [["k", name]] for name, *_ in tensors}
    plan = squeezed([msgspec.msgpack.encode({"version": lay.VERSION, "tensors": tensors, "paths": paths})])
    head = {"version": lay.VERSION, "count": count, "meshes": [[1]], "placements": [[0, [REPLICATED]]]}
    zero, one = column([0] * count), column([1] * count)
    lies = column([1] * len(tensors))
    form = squeezed([msgspec.msgpack.encode(head), column(signed(steps)), one, column([]), zero, zero, zero, lies])
    own = {
        "version": lay.VERSION, "rank": 0, "world_size": 1, "header_nbytes": 4096, "image_nbytes": 4096 * files,
        "plan_id": "", "places": [[0]], "parts": [[4096, 4096]] * files,
    }  # fmt: skip
    return Parts(plan, form, msgspec.msgpack.encode(own))


def made_before(parts, match, monkeypatch):
    """How many boxes are made before the layout is refused."""
    made = []

    def entry(*fields):
        made.append(None)
        return lay.TensorEntry(*fields)

    monkeypatch.setattr(packed_layout, "TensorEntry", entry)
    with pytest.raises(DamagedError, match=match):
        layout_in(parts, where="x", known=Known())
    return len(made)


def test_a_box_that_is_twice_in_a_file_is_refused_when_it_comes(monkeypatch):
    parts = many_empty(100_000, 4, files=10, steps=[1] + [0] * 99_999)
    assert made_before(parts, "x: layout: two tensors of one name in one file", monkeypatch) == 1


def test_a_box_beyond_the_image_is_refused_when_it_comes(monkeypatch):
    layout, spread = a_layout(0)
    beyond = msgspec.structs.replace(
        layout.tensors[0], data_offset=layout.image_nbytes, slice_offset=0, slice_nbytes=0
    )  # fmt: skip
    entries = [beyond, *layout.tensors[1:]]
    parts = parted(encode_layout(msgspec.structs.replace(layout, tensors=entries), spread), "x")
    assert made_before(parts, "lies outside its image", monkeypatch) == 0


def test_boxes_of_more_dimensions_than_any_state_has_are_refused_as_they_come(monkeypatch):
    monkeypatch.setattr(packed_layout, "_MOST_DIMS", 640)
    parts = many_empty(100, 64, files=1, steps=[1] * 100)
    assert made_before(parts, "more than 640 dimensions", monkeypatch) == 10


def test_of_forms_no_more_are_kept_than_a_bound_of_bytes(monkeypatch):
    monkeypatch.setattr(packed_layout, "_MOST_FORMS_NBYTES", 1 << 17)
    known = Known()
    first = many_empty(10, 1, files=1, steps=[1] * 10)
    kept = known.form(first.form, "x")
    assert known.form(first.form, "x") is kept
    plan = known.plan(first.plan, "x")
    for count in range(2_500, 2_520):
        known.form(many_empty(count, 0, files=1, steps=[1] * count).form, "x")
    assert known.form(first.form, "x") is not kept
    assert known.plan(first.plan, "x") is plan
    assert known._nbytes <= 1 << 17
    huge = many_empty(40_000, 0, files=1, steps=[1] * 40_000).form
    assert known.form(huge, "x") is not known.form(huge, "x")


@pytest.mark.parametrize("shape", [(RANKS, 8), (1,)])
def test_a_plan_that_names_a_tensor_twice_is_refused(shape):
    layout, _ = a_layout(0)
    twice = Spread([lay.Planned(layout.tensors[0].name, "F64", shape)])
    with pytest.raises(DamagedError, match=r"x: layout: two tensors of the name 'model.layers.0.weight'"):
        decode_layout(encode_layout(layout, twice), where="x")


# --- holders


def held(rank, stages=((0, 1), (2, 3))):
    """A layout of a rank whose stage holds all tensors but the last."""
    layout, spread = a_layout(rank)
    members = members_of(next(stage for stage in stages if rank in stage))
    names = [f"model.layers.{number}.weight" for number in range(TENSORS - 1)]
    return msgspec.structs.replace(layout, holders=dict.fromkeys(names, members)), spread


@pytest.mark.parametrize("rank", range(4))
def test_holders_come_back_of_tensors_without_boxes_too(rank):
    layout, spread = held(rank)
    assert decode_layout(encode_layout(layout, spread), where="here") == layout


def test_stages_of_the_same_names_have_one_plan_and_each_set_is_read_once():
    known = Known()
    found = []
    for rank in range(4):
        parts = parted(encode_layout(*held(rank)), "here")
        found.append((parts.plan, layout_in(parts, where="here", known=known)))
    assert len({plan for plan, _ in found}) == 1
    assert [id(layout.holders) == id(found[0][1].holders) for _, layout in found] == [True, True, False, False]


@pytest.mark.parametrize(
    ("part", "changed"),
    [
        ("own", {"holders": []}),
        ("own", {"holders": [b"\0\1\1\1"]}),
        ("plan", {"held_by": [1]}),
        ("plan", {"held_by": [2] * TENSORS}),
        ("plan", {"held_by": [-1] * TENSORS}),
    ],
)
def test_holders_that_are_none_are_refused(part, changed):
    parts = parted(encode_layout(*held(0)), "here")
    if part == "own":
        own = msgspec.msgpack.encode(msgspec.msgpack.decode(parts.own) | changed)
        parts = parts._replace(own=own)
    else:
        (raw,) = parts_in(parts.plan, 1, "here")
        parts = parts._replace(plan=squeezed([msgspec.msgpack.encode(msgspec.msgpack.decode(raw) | changed)]))
    with pytest.raises(DamagedError, match=r"holders|ranks of a job|not readable"):
        layout_in(parts, where="here", known=Known())
