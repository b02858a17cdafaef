"""The plan of a cooperative read: each block is read from the store once, at any number of nodes; sends are bounded."""

import os
from itertools import accumulate

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.shared.protocol.read_tree import FANOUT, ExchangeAddress, Place
from ckptd_client._load.shared_read import plan as plan_module
from ckptd_client._load.shared_read.plan import NONE, SENDS, Edges, Orders, Summary, column_of, join
from ckptd_client._load.shared_read.schedule import bits_of

FULL = 16 << 20
SIZES = (2, 8, 32, 1024, 1025, *([10_000] if os.environ.get("FAULTS") == "long" else []))


def address(node):
    return ExchangeAddress("10.0.0.1", 1 + node, bytes(32))


def plan(wants, sizes):
    """The reader of each block and all edges, as the nodes of a tree find them out. wants: blocks by node."""
    count, total = len(wants), len(sizes)
    columns = [column_of(node, bits_of(blocks, total), total) for node, blocks in enumerate(wants)]
    edges = []
    for node in sorted(range(count), key=lambda node: len(Place(node, count).levels)):
        for level in Place(node, count).levels:
            columns[node], some = join([columns[node], *(columns[below.start] for below in level)], sizes)
            edges.append(some)
    return columns[0], Edges.of(edges)


def check(wants, sizes):
    """Each block is read by one of those that want it, and comes to all others, from one that has it before."""
    readers, edges = plan(wants, sizes)
    wanted = {(node, block) for node, blocks in enumerate(wants) for block in blocks}
    read = {(int(node), block) for block, node in enumerate(readers) if node != NONE}
    pairs = list(zip(edges.target.tolist(), edges.block.tolist(), strict=True))
    assert len(set(pairs)) == len(pairs)
    assert set(pairs) | read == wanted
    assert not set(pairs) & read
    sources = dict(zip(pairs, edges.source.tolist(), strict=True))
    for target, block in pairs:
        at, hops = target, 0
        while (at, block) in sources:
            at, hops = sources[at, block], hops + 1
            assert hops <= len(wants)
        assert at == readers[block]
    return readers, edges


@given(
    st.lists(st.frozensets(st.integers(0, 19)), min_size=1, max_size=70),
    st.lists(st.sampled_from([5, FULL]), min_size=20, max_size=20),
)
def test_each_block_is_read_once_and_comes_to_all_that_want_it(wants, lengths):
    check(wants, np.array(lengths, np.int32))


@pytest.mark.parametrize("nodes", SIZES)
def test_what_all_nodes_want_is_read_once_and_sent_by_all_alike(nodes):
    """One checkpoint of 640 blocks: what a node sends does not grow with the job."""
    total = 640
    sizes = np.full(total, FULL, np.int32)
    readers, edges = plan([range(total)] * nodes, sizes)
    received, sent = (np.bincount(ends, minlength=nodes) for ends in (edges.target, edges.source))
    reads = np.bincount(readers, minlength=nodes)
    assert reads.sum() == total
    assert (received + reads == total).all()
    assert sent.max() <= 1.15 * total
    of_a_block = np.unique(edges.source.astype(np.int64) * total + edges.block, return_counts=True)[1]
    assert of_a_block.max() <= SENDS * len(Place(0, nodes).levels)
    assert reads.max() <= total // min(nodes, FANOUT) + 1 or nodes == 1025  # whose last node is a group of its own


@pytest.mark.parametrize("nodes", SIZES[2:])
def test_replicas_of_shards_are_read_once(nodes):
    """Three nodes hold a state, all others replicas of it: each shard is read once, and sent to those that hold it."""
    total, shards = 96, 3
    wants = [range(node % shards * 32, (node % shards + 1) * 32) for node in range(nodes)]
    readers, edges = plan(wants, np.full(total, FULL, np.int32))
    assert (readers != NONE).all()
    received = np.bincount(edges.target, minlength=nodes) + np.bincount(readers, minlength=nodes)
    assert (received == 32).all()
    assert (edges.source % shards == edges.block // 32).all()
    assert np.bincount(edges.source, minlength=nodes).max() <= 3 * 32


def test_what_one_node_wants_goes_nowhere_else():
    wants = [range(10 * node, 10 * node + 11) for node in range(100)]  # one block in common with the next
    readers, edges = plan(wants, np.full(1001, FULL, np.int32))
    assert len(edges.block) == 99
    assert (readers != NONE).all()


def test_long_and_short_blocks_in_turn_are_shared_out_by_their_bytes():
    sizes = np.array([FULL if block % 2 else 5 for block in range(20)], np.int32)
    readers, _ = plan([range(20)] * 2, sizes)
    read = [int(sizes[readers == node].sum()) for node in range(2)]
    assert abs(read[0] - read[1]) <= FULL


def test_subtrees_receive_what_touches_them_alone():
    sizes = np.full(6, FULL, np.int32)
    _, edges = plan([range(6)] * 40, sizes)
    addresses = {node: address(node) for node in range(40)}
    below = range(32, 40)
    raw = Orders(edges, addresses).pack_for(below)
    told = Orders.unpack(raw, 6, below)
    ends = set(zip(edges.block.tolist(), edges.source.tolist(), edges.target.tolist(), strict=True))
    wanted = {(b, s, t) for b, s, t in ends if s in below or t in below}
    assert set(zip(*(column.tolist() for column in told.edges), strict=True)) == wanted
    assert told.addresses.keys() == {s for _, s, t in wanted if t in below}
    for node in below:
        mine = told.edges.by_source(node)
        assert mine == {s: sorted(b for b, x, t in ends if (x, t) == (s, node)) for s in mine}


def test_a_plan_of_a_large_checkpoint_is_made_in_no_time():
    """4 TB in 250,000 blocks, 32 nodes that each want 1/16."""
    total = 250_000
    part = total // 16
    wants = [range(node % 16 * part, (node % 16 + 1) * part) for node in range(32)]
    readers, edges = plan(wants, np.full(total, FULL, np.int32))
    assert len(edges.block) == total
    assert (readers != NONE).all()
    summary = Summary(readers, {node: address(node) for node in range(32)})
    assert len(summary.pack()) < 300_000


@pytest.mark.parametrize("raw", [b"", b"junk", msgspec.msgpack.encode([b"junk", {}])])
def test_bytes_that_are_no_plan_are_refused(raw):
    with pytest.raises((ValueError, msgspec.DecodeError)):
        Summary.unpack(raw, 4, range(1))
    with pytest.raises((ValueError, msgspec.DecodeError)):
        Orders.unpack(raw, 4, range(1))


def test_summaries_of_other_blocks_or_nodes_are_refused():
    column = column_of(3, b"\x0f", 4)
    raw = Summary(column, {3: address(3)}).pack()
    assert (Summary.unpack(raw, 4, range(3, 4)).column == column).all()
    for total, nodes in ((5, range(3, 4)), (3, range(3, 4)), (4, range(4, 8))):
        with pytest.raises(ValueError, match="other"):
            Summary.unpack(raw, total, nodes)


def test_orders_for_blocks_that_are_none_are_refused():
    one = np.array([7], np.int32)
    raw = Orders(Edges(one, one, one), {7: address(7)}).pack_for(range(8))
    with pytest.raises(ValueError, match="other blocks"):
        Orders.unpack(raw, 7, range(8))


@pytest.mark.parametrize("count", [1, 2, 31, 32, 33, 1024, 1025, 10_000])
def test_the_tree_reaches_every_node_once(count):
    """A node has its parent's address alone, and at most 31 children on each of three levels."""
    children = [[below.start for level in Place(n, count).levels for below in level] for n in range(count)]
    assert sorted(child for some in children for child in some) == list(range(1, count))
    assert all(Place(child, count).parent == n for n, some in enumerate(children) for child in some)
    assert Place(0, count).parent is None
    assert max(map(len, children)) <= (FANOUT - 1) * len(Place(0, count).levels)
    sizes = list(accumulate(len(below) for level in Place(0, count).levels for below in level))
    assert (sizes[-1] if sizes else 0) == count - 1


@pytest.mark.parametrize("nodes", [2, 40, 1100])
def test_no_summary_and_no_orders_are_longer_than_the_other_side_takes(nodes):
    """Numbers that cannot be compressed, and hosts as long as they may be."""
    total, random = 400, np.random.default_rng(nodes)
    wants = [set(random.permutation(total)[: total * 9 // 10].tolist()) for _ in range(nodes)]
    columns = [column_of(node, bits_of(blocks, total), total) for node, blocks in enumerate(wants)]
    sizes, place = np.full(total, FULL, np.int32), Place(0, nodes)
    addresses = {node: ExchangeAddress("h" * 255, 65535, bytes(32)) for node in range(nodes)}
    _, edges = plan(wants, sizes)
    for subtree in (one for level in place.levels for one in level):
        column = join([columns[node] for node in subtree[:32]], sizes)[0]
        assert len(Summary(column, addresses).pack()) <= Summary.most_nbytes(total, len(subtree))
        inner = (edges.source >= subtree.start) & (edges.source < subtree.stop)
        inner &= (edges.target >= subtree.start) & (edges.target < subtree.stop)
        above = Orders(Edges(*(column[~inner] for column in edges)), addresses)
        assert len(above.edges.touching(subtree).block) <= plan_module._MAX_EDGES * total
        assert len(above.pack_for(subtree)) <= Orders.most_nbytes(total, nodes)


def test_a_summary_has_no_say_on_addresses_outside_its_subtree():
    raw = Summary(column_of(3, b"\x01", 2), {node: address(node) for node in (3, 7)})
    packed = msgspec.msgpack.encode(
        plan_module._Packed(plan_module.zlib.compress(raw.column.astype("<i4").tobytes()), raw.addresses)
    )
    assert Summary.unpack(packed, 2, range(3, 4)).addresses == {3: address(3)}


@pytest.mark.parametrize(("target", "known"), [(3, {}), (9, {7: None})])
def test_orders_of_a_source_without_an_address_or_of_other_nodes_are_refused(target, known):
    numbers = np.array([0, 7, target], "<i4").tobytes()
    packed = msgspec.msgpack.encode(
        plan_module._Packed(plan_module.zlib.compress(numbers), {node: address(node) for node in known})
    )
    with pytest.raises(ValueError, match="without an address"):
        Orders.unpack(packed, 2, range(3, 4))
