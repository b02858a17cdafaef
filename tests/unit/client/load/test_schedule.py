"""The schedule of a cooperative read: each block is read once in the job, and all nodes compute the same schedule."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from ckptd.shared.format.digest import BLOCK_NBYTES
from ckptd_client._load.shared_read.schedule import Blocks, bits_of, schedule, union

TOTAL = 37
wants = st.lists(
    st.lists(st.frozensets(st.integers(0, TOTAL - 1)), min_size=1, max_size=4), min_size=1, max_size=5
)  # of each rank of each node


def alike(_block):
    return 1


def schedules(job):
    """The schedule that each node computes."""
    bits = [[bits_of(blocks, TOTAL) for blocks in node] for node in job]
    unions = [union(node) for node in bits]
    return [
        schedule(own, [None if n == i else u for n, u in enumerate(unions)], i, alike) for i, own in enumerate(bits)
    ]


@given(wants)
def test_each_block_that_several_want_is_read_once_and_reaches_all(job):
    found = schedules(job)
    everybody = Counter(block for node in job for blocks in node for block in blocks)
    nodes = Counter(block for node in job for block in frozenset().union(*node))
    for i, (node, shared) in enumerate(zip(job, found, strict=True)):
        assert [one.number for one in shared] == list(range(len(shared)))
        assert sorted(one.block for one in shared) == [one.block for one in shared]
        here = frozenset().union(*node)
        assert {one.block for one in shared} == {block for block in here if everybody[block] > 1}
        for one in shared:
            assert one.wanted == tuple(m for m, blocks in enumerate(node) if one.block in blocks)
            assert one.reader in one.wanted if one.node == i else one.reader == 0
            if nodes[one.block] > 1:
                assert one.block in frozenset().union(*job[one.node])
    readers = {}
    for shared in found:
        for one in shared:
            assert readers.setdefault(one.block, one.node) == one.node  # all nodes agree


@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, TOTAL))
def test_replicas_read_equally_much(nodes, ranks, count):
    job = [[frozenset(range(count))] * ranks for _ in range(nodes)]
    if nodes * ranks > 1:
        found = schedules(job)
        by_node = [sum(one.node == i for one in shared) for i, shared in enumerate(found)]
        assert max(by_node) - min(by_node) <= 1
        for i, shared in enumerate(found):
            by_rank = [sum((one.node, one.reader) == (i, m) for one in shared) for m in range(ranks)]
            assert max(by_rank) - min(by_rank) <= 1


def test_long_and_short_blocks_in_turn_are_shared_out_by_their_bytes():
    everything = bits_of(set(range(20)), TOTAL)
    for found in (
        schedule([everything] * 2, [None], 0, lambda block: 8 if block % 2 else 16),
        schedule([everything], [None, everything], 0, lambda block: 8 if block % 2 else 16),
    ):
        read = Counter()
        for one in found:
            read[one.node, one.reader if one.node == 0 else 0] += 8 if one.block % 2 else 16
        assert max(read.values()) - min(read.values()) <= 16


def test_a_node_that_takes_no_part_counts_for_nothing():
    both = bits_of({1, 2}, TOTAL)
    assert schedule([both], [None, None], 0, alike) == []
    assert [one.node for one in schedule([both], [None, both], 0, alike)] == [0, 1]


def test_many_blocks_are_scheduled_in_no_time():
    everything = bits_of(set(range(20_000)), 20_000)
    assert len(schedule([everything] * 2, [None, *[everything] * 7], 0, alike)) == 20_000


def test_blocks_are_numbered_one_image_after_the_other():
    blocks = Blocks([BLOCK_NBYTES + 1, 0, 5])
    assert blocks.total == 3
    assert [blocks.place(block) for block in range(3)] == [(0, 0), (0, 1), (2, 0)]
    assert [blocks.nbytes(block) for block in range(3)] == [BLOCK_NBYTES, 1, 5]
    assert blocks.at(0, BLOCK_NBYTES) == 1
    assert blocks.offset(1) == BLOCK_NBYTES
    assert blocks.image_nbytes(2) == 5
    assert blocks.image_nbytes(9) == 0
