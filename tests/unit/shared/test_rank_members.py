"""The members of a set of ranks as bytes: few for those of meshes, right for any, refused where they are none."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.shared.base.ids import MAX_RANKS
from ckptd.shared.format.rank_members import MAX_MEMBERS_NBYTES, NOBODY, check_members, count_of, members_of, ranks_in

ranks = st.sets(st.integers(0, 300)).map(sorted)


@given(ranks)
def test_members_are_the_ranks(some):
    members = members_of(some)
    check_members(members)
    assert ranks_in(members) == tuple(some)
    assert count_of(members) == len(some)


@given(ranks, ranks)
def test_sets_are_equal_if_their_bytes_are(one, other):
    assert (members_of(one) == members_of(other)) is (one == other)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.data())
def test_any_slice_of_a_mesh_is_one_block(shape, data):
    """A mesh numbers its ranks row by row; a slice has some dimensions whole, and one place in each other."""
    steps = [1]
    for size in reversed(shape[1:]):
        steps.insert(0, steps[0] * size)
    places = [data.draw(st.one_of(st.none(), st.integers(0, size - 1))) for size in shape]
    extents = [range(size) if place is None else [place] for size, place in zip(shape, places, strict=True)]
    some = [sum(at * step for at, step in zip(point, steps, strict=True)) for point in itertools.product(*extents)]
    assert ranks_in(members_of(some)) == tuple(some)
    assert len(members_of(some)) <= 4 + 4 * len(shape)


@pytest.mark.parametrize("some", [range(80_000), range(7, 80_000, 8), range(512, 1024)])
def test_a_set_of_a_large_job_is_a_few_bytes(some):
    assert len(members_of(some)) <= 9


def test_an_outer_and_an_inner_dimension_of_a_large_mesh_are_a_few_bytes():
    """HSDP over tensor parallelism: what tensor parallel ranks and replicas hold alike, and shards do not."""
    some = [line * 8 * 64 + part for line in range(128) for part in range(8)]
    assert len(members_of(some)) <= 12


def test_three_hundred_ranks_without_any_order_have_a_place_in_a_seal():
    some = sorted({number * number * 7 % 79_999 for number in range(1, 250)})
    assert len(members_of(some)) <= MAX_MEMBERS_NBYTES


def test_a_set_of_no_rank_is_no_bytes():
    assert members_of([]) == NOBODY
    assert count_of(NOBODY) == 0
    assert ranks_in(NOBODY) == ()


@pytest.mark.parametrize(
    ("members", "why"),
    [
        (b"\x81", "end within"),
        (b"\xff\xff\xff\xff\xff\xff\x01\0", "beyond all"),
        (b"\0\1\1\1", "no ranks"),  # a dimension of one
        (b"\0\1\2\0", "no ranks"),  # steps of nothing
        (b"\0\1\2", "no ranks"),  # no step
        (b"\0", "no ranks"),  # no dimensions
        (b"\0\2\xff\xff\x3f\1\xff\xff\x3f\1", "no ranks"),
        (b"\0\1\xff\xff\x3f\1" * 2, "no ranks"),
    ],
)
def test_bytes_that_are_no_set_are_refused(members, why):
    with pytest.raises(ValueError, match=why):
        check_members(members)


@given(st.binary(max_size=12))
def test_any_bytes_are_refused_or_are_ranks_of_a_job(members):
    try:
        check_members(members)
    except ValueError:
        return
    assert 0 <= count_of(members) <= MAX_RANKS
