"""The index of records: what it says of ranks of several kinds, how large it is, and what is refused of it."""

import msgspec
import pytest

from ckptd.shared.base.errors import DamagedError
from ckptd.shared.format.columns import column, parts_in, squeezed
from ckptd.shared.format.layout import VERSION, Leaf, Leaves, encode_leaves
from ckptd.shared.format.placement import REPLICATED, Mesh
from ckptd.shared.format.record_index import Group, Record, decode_index, encode_index
from tests.unit.shared.test_holders import SHAPE, parts_of

RANKS = 8


def leaves_of(rank):
    return encode_leaves(Leaves(VERSION, {"epoch": Leaf("safe/1", b"3"), "rng": Leaf("safe/1", rank.to_bytes(2))}))


def records(parts=parts_of, ranks=RANKS, **options):
    return [Record(rank, 1000 + rank, parts(rank, world=ranks, **options), leaves_of(rank)) for rank in range(ranks)]


def index_of(found, ranks=RANKS):
    return decode_index(encode_index(found), ranks, where="x")


def groups(index, offsets, sizes):
    return [group for kind in index.kinds for group in kind.groups("w", offsets, sizes)]


def test_ranks_of_one_mesh_are_one_kind_of_few_bytes_whatever_their_number():
    raw = [encode_index(records(ranks=ranks, shape=(5, 16))) for ranks in (16, 512)]
    assert len(raw[1]) < len(raw[0]) + 1200, "2 bytes of a rank, for the sizes of the images"
    index = decode_index(raw[1], 512, where="x")
    assert len(index.kinds) == 1
    assert index.kinds[0].ranks == list(range(512))
    assert list(index.sizes) == list(range(1000, 1512))
    assert index.differing == {"rng": list(range(512))}
    assert groups(index, (3, 0), (2, 16)) == [
        Group([3], ((3, 0), (1, 16))), Group([4], ((4, 0), (1, 16))),
    ]  # fmt: skip


def test_each_part_of_the_job_with_a_mesh_of_its_own_is_named():
    def stage(rank, world):
        first = rank // 4 * 4
        return parts_of(rank, world=world, mesh=Mesh((4,), (rank - first,), tuple(range(first, first + 4))))

    index = index_of(records(stage))
    assert len(index.kinds) == 1
    assert [group.ranks for group in groups(index, (0, 0), (1, 16))] == [[0], [4]]


def test_ranks_with_the_same_box_are_one_group_without_those_that_have_no_box_of_it():
    def replica(rank, world):
        mesh = Mesh((4, 2), (rank // 2, rank % 2), tuple(range(8)))
        boxes = [] if rank in {2, 3} else None
        return parts_of(rank, world=world, mesh=mesh, cuts=(REPLICATED, 0), boxes=boxes)

    half = SHAPE[0] // 2
    assert groups(index_of(records(replica)), (0, 0), SHAPE) == [
        Group([0, 4, 6], ((0, 0), (half, 16))), Group([1, 5, 7], ((half, 0), (half, 16))),
    ]  # fmt: skip


def test_boxes_that_no_mesh_gives_may_be_of_any_rank_that_has_one():
    index = index_of(records(placed=False, shape=(3, 16)))
    assert groups(index, (2, 0), (1, 16)) == [Group([0, 1, 2], None)]


def test_records_of_one_state_make_one_index_in_whatever_votes_they_lie():
    assert encode_index(records()) == encode_index(records())


def forged(change, sizes=None):
    """Of ranks of which five have a box."""
    head, column_of_sizes = parts_in(encode_index(records(shape=(5, 16))), 2, "x")
    raw = msgspec.msgpack.decode(head)
    change(raw)
    return squeezed([msgspec.msgpack.encode(raw), column_of_sizes if sizes is None else sizes])


def kind(number, value):
    return lambda raw: raw["kinds"][0].__setitem__(number, value)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda raw: raw.update(version=9), "version 9, this program reads 1"),
        (kind(0, 7), "a part that no kind of it has"),
        (kind(1, 0), "layout"),
        (kind(2, [0, 7]), "do not have each of 8 ranks once"),
        (kind(2, [0, 5, 4, 8]), "runs of ranks that are none"),
        (kind(2, [0, 1 << 20]), "runs of ranks that are none"),
        (kind(2, [0]), "runs of ranks that are none"),
        (kind(3, []), "not readable"),
        (kind(3, [b"\x90"]), "not readable"),
        (kind(4, {1: [0, 1]}), "ranks with boxes of no tensor"),
        (kind(4, {0: [0, 1 << 20]}), "runs of ranks that are none"),
        (lambda raw: raw.update(differing={"rng": [0, 1 << 20]}), "runs of ranks that are none"),
        (lambda raw: raw.update(differing={"rng": [3, 3]}), "runs of ranks that are none"),
        (lambda raw: raw.update(differing={"rng": []}), "not readable"),
        (lambda raw: raw.update(kinds=[]), "do not have each of 8 ranks once"),
        (lambda raw: raw.update(kinds=7), "not readable"),
    ],
)
def test_what_cannot_be_is_refused(change, what):
    with pytest.raises(DamagedError, match=f"^x: .*{what}"):
        decode_index(forged(change), RANKS, where="x")


def test_sizes_of_other_ranks_are_refused():
    with pytest.raises(DamagedError, match="not of 8 numbers"):
        decode_index(forged(lambda raw: None, column([1] * 7)), RANKS, where="x")
    with pytest.raises(DamagedError, match="not readable"):
        decode_index(b"", RANKS, where="x")
