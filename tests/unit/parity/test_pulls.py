"""Parts of segments from other nodes: real servers, real arenas, partial segments that a client opens."""

import os
import tempfile
import threading

import pytest

from ckptd.arena.partial_segments import PartialSegments
from ckptd.parity.pulls import Part, pull
from ckptd.shared.base.errors import BudgetError, PeerError
from ckptd.shared.bulk.sockets import Cancel
from ckptd.shared.format.byte_ranges import packed
from ckptd.shared.format.digest import BLOCK_NBYTES
from ckptd.shared.format.slot import SEALS_NBYTES, SlotState, decode_seals
from tests.nodes import KEY, content, noise, start_set

SIZE = BLOCK_NBYTES + (1 << 20)
OTHERS = (1, 2)


@pytest.fixture(name="nodes")
def fixture_nodes():
    with tempfile.TemporaryDirectory(prefix="ckptd-test-", dir="/dev/shm") as directory:
        made = start_set(directory, 3)
        made.stage([[noise(i, SIZE)] for i in range(3)])
        yield made
        made.stop()


def pulled(nodes, ranges, *, into=None, cancel=None, ranks=OTHERS):
    """Node 0 pulls these ranges of the segments of the other nodes' ranks."""
    own = nodes.nodes[0]
    partials = into or PartialSegments(own.arena, KEY)
    parts = {nodes.nodes[rank].name: [Part(nodes.columns[rank].seals[0], packed(ranges))] for rank in ranks}
    return partials, pull(partials, KEY, parts, nodes.sources(own, cancel))


def bytes_of(nodes, name):
    with open(nodes.nodes[0].arena.slot_path(KEY, name), "rb") as file:
        return file.read()


def test_what_was_asked_for_is_there_with_the_tail_and_the_seal(nodes):
    ranges = [(7, 1000), (BLOCK_NBYTES - 5, BLOCK_NBYTES + 9), (SIZE - 1, SIZE)]
    partials, found = pulled(nodes, ranges)
    assert sorted(found.files) == [1, 2]
    assert not found.lacks
    for rank, name in found.files.items():
        data, seal, image = bytes_of(nodes, name), nodes.columns[rank].seals[0], noise(rank, SIZE)
        assert decode_seals(data[-SEALS_NBYTES:])[2] == seal
        assert seal.state is SlotState.DIGESTED
        assert data[seal.table_offset : seal.content_nbytes] == content(nodes.nodes[rank].arena, rank)[SIZE:]
        for start, stop in ranges:
            assert data[start:stop] == image[start:stop]
        assert not any(data[2 << 20 : 3 << 20])
    partials.give_back()


def test_nothing_comes_twice_and_little_comes_beside_it(nodes):
    wanted = [(1 << 20, 3 << 20)]
    partials, first = pulled(nodes, wanted)
    needed = len(OTHERS) * (2 << 20)
    assert needed <= first.nbytes <= 1.05 * needed
    assert pulled(nodes, wanted, into=partials)[1].nbytes == 0
    more = pulled(nodes, [(2 << 20, (3 << 20) + 100)], into=partials)[1]
    assert more.nbytes == len(OTHERS) * 100
    assert more.files == first.files
    partials.give_back()


def test_two_ranks_at_once_share_what_comes(nodes):
    partials = PartialSegments(nodes.nodes[0].arena, KEY)
    found = []

    def one(first):
        found.append(pulled(nodes, [(first, first + (8 << 20))], into=partials)[1])

    threads = [threading.Thread(target=one, args=(first,)) for first in (0, 4 << 20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tails = sum(nodes.columns[rank].seals[0].objects_offset - SIZE for rank in OTHERS)
    assert sum(one.nbytes for one in found) <= len(OTHERS) * (12 << 20) + tails
    assert bytes_of(nodes, found[0].files[1])[: 12 << 20] == noise(1, SIZE)[: 12 << 20]
    partials.give_back()


def test_memory_counts_by_the_page_and_is_given_back(nodes):
    arena = nodes.nodes[0].arena
    before = arena.used_nbytes
    partials, found = pulled(nodes, [(0, 4096), (1 << 20, (1 << 20) + 1)])
    used = arena.used_nbytes - before
    assert used <= len(OTHERS) * (2 * 4096 + 4096 + SEALS_NBYTES + 4096)
    on_disk = sum(os.stat(arena.slot_path(KEY, name)).st_blocks * 512 for name in found.files.values())
    assert on_disk <= used
    partials.give_back()
    assert arena.used_nbytes == before
    assert not any(os.path.exists(arena.slot_path(KEY, name)) for name in found.files.values())


def test_a_damaged_block_is_named_and_the_rest_comes(nodes):
    damaged = nodes.nodes[1].arena
    name = damaged.slot_of(KEY, 1, nodes.columns[1].seals[0].save)
    damaged.view(KEY, name)[BLOCK_NBYTES + 7] ^= 1
    partials, found = pulled(nodes, [(0, 100)])
    assert sorted(found.files) == [1, 2], "its other block is sound"
    _, found = pulled(nodes, [(SIZE - 9, SIZE)], into=partials)
    assert sorted(found.files) == [2]
    assert f"node {nodes.nodes[1].name}: slot {name} block 1 does not match its digest" in found.lacks[1]
    partials.give_back()


def test_a_node_that_cannot_be_reached_lacks_only_its_own(nodes):
    nodes.down = {nodes.nodes[1].name}
    partials, found = pulled(nodes, [(0, 100)])
    assert sorted(found.files) == [2]
    assert "cannot be reached" in found.lacks[1]
    partials.give_back()


def test_no_room_is_this_nodes_own_fault(nodes):
    arena = nodes.nodes[0].arena
    arena._limit_nbytes = arena.used_nbytes + (1 << 20)
    partials = PartialSegments(arena, KEY)
    with pytest.raises(BudgetError, match=r"what ranks of this node need of rank [12]'s segment"):
        pulled(nodes, [(0, 2 << 20)], into=partials)
    partials.give_back()
    assert arena.used_nbytes <= arena._limit_nbytes


def test_bytes_beyond_the_image_are_refused(nodes):
    partials, found = pulled(nodes, [(SIZE - 1, SIZE + 1)], ranks=(1,))
    assert "of an image of" in found.lacks[1]
    partials.give_back()


def test_nothing_is_made_once_the_load_is_over(nodes):
    partials = PartialSegments(nodes.nodes[0].arena, KEY)
    partials.give_back()
    with pytest.raises(PeerError, match="the load is over"):
        partials.of(nodes.columns[1].seals[0])
    found = pulled(nodes, [(0, 9)], into=partials)[1]
    assert set(found.lacks) == {1, 2}


def test_what_an_earlier_daemon_pulled_is_removed_at_start(nodes):
    arena = nodes.nodes[0].arena
    path = arena.slot_path(KEY, "r00001-000007.part")
    with open(path, "xb") as file:
        file.truncate(1 << 30)
    partials, found = pulled(nodes, [(0, 9)])
    arena.scan()
    assert not os.path.exists(path)
    assert os.path.exists(arena.slot_path(KEY, found.files[1])), "of this daemon's own load"
    partials.give_back()


def test_a_pull_that_is_broken_off_lacks_what_had_not_come(nodes):
    cancel = Cancel()
    cancel.cancel()
    partials, found = pulled(nodes, [(0, 9)], cancel=cancel)
    assert set(found.lacks) == {1, 2}
    partials.give_back()
