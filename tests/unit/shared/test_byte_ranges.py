"""Ranges of bytes: what they have together, what is missing, and their packed form."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from ckptd.shared.format.byte_ranges import RANGE_NBYTES, merged, packed, unpacked, without

PAIRS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)).map(lambda one: (min(one), max(one))), max_size=8)


def in_all(ranges):
    return {byte for start, stop in ranges for byte in range(start, stop)}


@given(PAIRS)
def test_merged_ranges_are_the_same_bytes_and_do_not_touch(ranges):
    found = merged(ranges)
    assert in_all(found) == in_all(ranges)
    assert all(start < stop for start, stop in found)
    assert all(before[1] < after[0] for before, after in pairwise(found))


@given(PAIRS, PAIRS)
def test_what_is_not_there(ranges, there):
    found = without(merged(ranges), merged(there))
    assert in_all(found) == in_all(ranges) - in_all(there)
    assert found == merged(found) or not any(a[1] == b[0] for a, b in pairwise(found))


@given(PAIRS)
def test_packed_ranges_come_back(ranges):
    data = packed(ranges)
    assert len(data) == RANGE_NBYTES * len(ranges)
    assert [*unpacked(data)] == ranges
