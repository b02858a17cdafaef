"""The schedule of a cooperative read on one node: which of its ranks fills each block that they share."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from ckptd.shared.format.digest import BLOCK_NBYTES
from ckptd_client._load.shared_read.schedule import Blocks, bits_of, schedule

TOTAL = 37
NONE = bytes(-(-TOTAL // 8))
blocks_of = st.frozensets(st.integers(0, TOTAL - 1))


def alike(_block):
    return 1


@given(st.lists(blocks_of, min_size=1, max_size=4), blocks_of, blocks_of)
def test_what_several_ranks_want_or_other_nodes_have_or_get_is_shared(ranks, comes, goes):
    bits = [bits_of(blocks, TOTAL) for blocks in ranks]
    found = schedule(bits, bits_of(comes, TOTAL), bits_of(goes, TOTAL), alike)
    everybody = Counter(block for blocks in ranks for block in blocks)
    assert [one.number for one in found] == list(range(len(found)))
    assert sorted(one.block for one in found) == [one.block for one in found]
    assert {one.block for one in found} == {b for b, n in everybody.items() if n > 1 or b in comes | goes}
    for one in found:
        assert one.wanted == tuple(m for m, blocks in enumerate(ranks) if one.block in blocks)
        assert one.comes == (one.block in comes)
        assert one.filler == 0 if one.comes else one.filler in one.wanted


@given(st.integers(2, 4), st.integers(0, TOTAL))
def test_ranks_read_equally_much(ranks, count):
    found = schedule([bits_of(range(count), TOTAL)] * ranks, NONE, NONE, alike)
    by_rank = [sum(one.filler == m for one in found) for m in range(ranks)]
    assert max(by_rank) - min(by_rank) <= 1


def test_long_and_short_blocks_in_turn_are_shared_out_by_their_bytes():
    everything = bits_of(set(range(20)), TOTAL)
    read = Counter()
    for one in schedule([everything] * 2, NONE, NONE, lambda block: 8 if block % 2 else 16):
        read[one.filler] += 8 if one.block % 2 else 16
    assert max(read.values()) - min(read.values()) <= 16


def test_many_blocks_are_scheduled_in_no_time():
    everything, none = bits_of(set(range(20_000)), 20_000), bytes(2_500)
    assert len(schedule([everything] * 2, everything, none, alike)) == 20_000


def test_blocks_are_numbered_one_image_after_the_other():
    blocks = Blocks([BLOCK_NBYTES + 1, 0, 5])
    assert blocks.total == 3
    assert [blocks.place(block) for block in range(3)] == [(0, 0), (0, 1), (2, 0)]
    assert [blocks.nbytes(block) for block in range(3)] == [BLOCK_NBYTES, 1, 5]
    assert blocks.at(0, BLOCK_NBYTES) == 1
    assert blocks.lengths == [BLOCK_NBYTES, 1, 5]
    assert blocks.offset(1) == BLOCK_NBYTES
    assert blocks.image_nbytes(2) == 5
    assert blocks.image_nbytes(9) == 0
