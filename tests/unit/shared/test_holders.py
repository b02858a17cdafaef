"""Ranks by a placement turned around: how long it takes, what a layout does not say, what is refused."""

import msgspec
import pytest

from ckptd.shared.base.errors import DamagedError
from ckptd.shared.base.ids import file_name
from ckptd.shared.format import layout as lay
from ckptd.shared.format import placement
from ckptd.shared.format.columns import parts_in, squeezed
from ckptd.shared.format.holders import Holder, holders_in
from ckptd.shared.format.packed_layout import Known, Parts, Spread, encode_layout, layout_in, parted
from ckptd.shared.format.placement import REPLICATED, Mesh, MeshRanks, Placed, box_at, strides_of

SHAPE = (8192, 16)


def parts_of(rank, *, world=8192, mesh=None, cuts=(0,), boxes=None, shape=SHAPE, placed=True):
    """Of a layout of one tensor."""
    mesh = mesh or Mesh((world,), (rank,), tuple(range(world)))
    offsets, sizes = box_at(shape, mesh, cuts)
    boxes = ([] if 0 in sizes else [(offsets, sizes)]) if boxes is None else boxes
    entries = [lay.TensorEntry("w", "F32", shape, *box, 4096, lay.box_nbytes("F32", box[1])) for box in boxes]
    layout = lay.Layout(
        version=lay.VERSION, file=file_name(rank), rank=rank, world_size=world, header_nbytes=4096,
        image_nbytes=1 << 24, plan_id="p", tensors=entries, paths={"w": (("k", "w"),)}, aliases={},
    )  # fmt: skip
    absent = [lay.Planned("w", "F32", shape)]
    raw = encode_layout(layout, Spread(absent, [mesh], {"w": Placed(0, cuts)}) if placed else Spread(absent))
    return parted(raw, "x")


def holders(parts):
    return holders_in(parts, where="x", known=Known())


def test_the_time_is_that_of_the_answer(monkeypatch):
    """Of 8,192 ranks two are looked at."""
    seen, asked = [], holders(parts_of(5))
    monkeypatch.setattr(placement, "range", lambda *ends: seen.extend(range(*ends)) or range(*ends), raising=False)
    found = asked.of("w", (4096, 0), (2, 16))
    assert found == [Holder(4096, (4096, 0), (1, 16)), Holder(4097, (4097, 0), (1, 16))]
    assert seen == [4096, 4097]


def test_a_rank_without_a_box_answers_too():
    few = (3, 16)
    assert holders(parts_of(9, world=16, shape=few)).of("w", (2, 0), (1, 16)) == [Holder(2, (2, 0), (1, 16))]


def test_replicas_are_all_named_whichever_rows_each_has():
    mesh = Mesh((4, 2), (1, 0), tuple(range(8)))
    parts = parts_of(2, world=8, mesh=mesh, cuts=(REPLICATED, 0), boxes=[((5, 0), (7, 16))])
    assert [one.rank for one in holders(parts).of("w", (0, 0), (1, 1))] == [0, 2, 4, 6]


def test_the_ranks_of_a_mesh_are_the_same_bytes_on_all_of_its_ranks():
    """So that a vote has them once: strides, and a list only where there are none."""
    turned = tuple(reversed(range(16)))
    odd = (3, 1, 0, 2, *range(4, 16))
    for ranks, length in ((turned, 60), (odd, 120)):
        forms = {
            parts_of(rank, world=16, mesh=Mesh((16,), (ranks.index(rank),), ranks)).form for rank in range(16)
        }  # fmt: skip
        assert len(forms) == 1
        assert len(forms.pop()) < length + 60
    assert strides_of(Mesh((16,), (0,), turned)) == (-1,)
    assert strides_of(Mesh((2, 2), (0, 0), (1, 5, 3, 7))) == (2, 4)
    assert strides_of(Mesh((16,), (0,), odd)) is None
    assert strides_of(Mesh((1, 2), (0, 0), (1, 5))) == (0, 4)


def test_what_one_layout_does_not_say():
    assert holders(parts_of(1)).of("v", (0,), (1,)) is None, "no such tensor"
    assert holders(parts_of(1, placed=False)).of("w", (0, 0), (1, 1)) is None, "its box is written"
    assert holders(parts_of(1)).of("w", (0, 0), (0, 1)) == [], "nothing is wanted"


def test_a_mesh_that_numbers_ranks_otherwise_than_the_job_says_nothing():
    """Of a process group of torch whose ranks are not those of the job."""
    shifted = Mesh((4,), (1,), (4, 5, 6, 7))
    assert holders(parts_of(1, world=8, mesh=shifted)).of("w", (0, 0), (1, 1)) is None


def test_a_placement_around_which_the_rank_has_boxes_is_not_written():
    parts = parts_of(1, world=8, boxes=[((0, 0), (2, 16))])
    assert holders(parts).of("w", (0, 0), (1, 1)) is None


def forged(parts, **changes):
    head, *columns = parts_in(parts.form, 8, "x")
    return parts._replace(form=squeezed([msgspec.msgpack.encode(msgspec.msgpack.decode(head) | changes), *columns]))


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"ranks": [MeshRanks((2,))]}, "a mesh of other ranks than the job's"),
        ({"ranks": [MeshRanks((-1,))]}, "a mesh of other ranks than the job's"),
        ({"ranks": [MeshRanks((1, 1))]}, "a mesh of other dimensions than its strides"),
        ({"ranks": [MeshRanks((), b"\x01" + bytes(8))]}, "a mesh of other ranks than the job's"),
        ({"ranks": [MeshRanks((), b"\x01" + bytes(7))]}, "a column of 8 bytes, not of 8 numbers"),
        ({"ranks": []}, "a mesh of no ranks"),
        ({"placements": [[1, [0]]]}, "a placement on no mesh"),
        ({"placements": []}, "a placement that is none of its form's"),
        ({"placements": [[0, [0, 0]]]}, "a placement of 'w' that cannot be"),
        ({"placements": [[0, [7]]]}, "a placement of 'w' that cannot be"),
        ({"meshes": [[1 << 30]]}, "a mesh of 1073741824 ranks in a job of 8"),
    ],
)
def test_what_cannot_be_is_refused(changes, what):
    with pytest.raises(DamagedError, match=f"^x: .*{what}"):
        holders(forged(parts_of(1, world=8), **changes)).of("w", (0, 0), (8, 16))


def test_a_box_by_the_placement_of_a_tensor_that_has_none_is_refused():
    parts = parts_of(1, world=8)
    head, *columns = parts_in(parts.form, 8, "x")
    bare = Parts(parts.plan, squeezed([head, *columns[:-1], b"\x01\x00"]), parts.own)
    with pytest.raises(DamagedError, match="by the placement of a tensor that has none"):
        layout_in(bare, where="x", known=Known())
