"""Ranks that can hold what a state wants, by one layout: all that it says, and None where it does not say."""

import msgspec
import torch

from ckptd.shared.base.ids import file_name
from ckptd.shared.format import layout as lay
from ckptd.shared.format.packed_layout import Spread, encode_layout, parted
from ckptd.shared.format.placement import Mesh, Placed, box_at
from ckptd_client._load.candidates import candidates

WORLD, SHAPE = 16, (32, 4)
NO_LEAVES = lay.Leaves(lay.VERSION, {})


def seed(rank=3, *, whole=(), aliases=None):
    """The layout of a rank that has its rows of `w`, and these names as a whole."""
    mesh = Mesh((WORLD,), (rank,), tuple(range(WORLD)))
    offsets, sizes = box_at(SHAPE, mesh, (0,))
    boxes = [("w", SHAPE, offsets, sizes), *((name, (5,), (0,), (5,)) for name in whole)]
    entries, at = [], 4096
    for name, shape, first, extent in boxes:
        entries.append(lay.TensorEntry(name, "F32", shape, first, extent, at, lay.box_nbytes("F32", extent)))
        at += entries[-1].nbytes
    names = {name: (("k", name),) for name in ("w", *whole, *(aliases or {}))}
    layout = lay.Layout(
        version=lay.VERSION, file=file_name(rank), rank=rank, world_size=WORLD, header_nbytes=4096,
        image_nbytes=at, plan_id="p", tensors=entries, paths=names, aliases=aliases or {},
    )  # fmt: skip
    return layout, parted(encode_layout(layout, Spread((), [mesh], {"w": Placed(0, (0,))})), "x")


def asked(state, leaves=NO_LEAVES, **words):
    layout, parts = seed(**words)
    return candidates(state, layout, leaves, parts, "x")


def test_a_whole_tensor_is_held_by_all_of_its_mesh():
    assert asked({"w": torch.empty(SHAPE)}) == set(range(WORLD))


def test_what_the_rank_has_itself_is_taken_from_it():
    assert asked({"step": torch.empty(5)}, whole=("step",)) == {3}


def test_a_tied_tensor_is_held_where_its_owner_is():
    assert asked({"tied": torch.empty(SHAPE)}, aliases={"tied": "w"}) == set(range(WORLD))


def test_names_that_the_layout_does_not_have_may_be_anywhere():
    assert asked({"other": torch.empty(2)}) is None


def test_plain_values_need_no_other_rank():
    leaves = lay.Leaves(lay.VERSION, {"lr": lay.Leaf("float", b"0.1")})
    assert asked({"lr": torch.tensor(0.1)}, leaves) == {3}


def test_a_tensor_that_lies_on_no_mesh_may_be_anywhere():
    layout, _ = seed()
    parts = parted(encode_layout(layout), "x")
    assert candidates({"w": torch.empty(SHAPE)}, layout, NO_LEAVES, parts, "x") is None


def test_an_empty_state_needs_no_other_rank():
    layout, parts = seed()
    empty = msgspec.structs.replace(layout, tensors=[])
    assert candidates({}, empty, NO_LEAVES, parts, "x") == {3}
