"""The node group of a cooperative read: the schedule, blocks that fail, ranks that do not come or leave."""

import threading
import time

import pytest

from ckptd.shared.files.mapping import Mapping
from ckptd.shared.format.digest import BLOCK_NBYTES
from ckptd_client._load.shared_read import group_memory, node_group
from ckptd_client._load.shared_read.found import Found
from ckptd_client._load.shared_read.node_group import NodeGroup
from ckptd_client._load.shared_read.schedule import Blocks
from tests.unit.client.load.groups import SAVE, Reader, decline, joined, meet, opened, outcomes, read_all, readers_of


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(node_group, "_JOIN_S", 2.0)
    monkeypatch.setattr(node_group, "_PATIENCE_S", 2.0)
    monkeypatch.setattr(node_group, "_NODE_PATIENCE_S", 1.0)


def test_every_block_that_several_want_is_read_once_by_one_who_wants_it(tmp_path):
    wants = {0: set(range(40)), 3: set(range(10, 50)), 5: {0, 45, 49, 60}}
    got, readers = read_all(meet(tmp_path, wants, 64))
    for rank, blocks in wants.items():
        shared = {b for b in blocks if sum(b in other for other in wants.values()) > 1}
        assert got[rank] == {block: block % 251 for block in shared}
        assert all(block in wants[readers[block]] for block in shared)
    counts = [list(readers.values()).count(rank) for rank in wants]
    assert max(counts) - min(counts[:2]) <= 2, counts
    assert list(tmp_path.iterdir()) == []


def test_far_more_blocks_than_buffers_with_gaps(tmp_path):
    wants = {0: set(range(0, 600, 2)) | {599}, 1: set(range(0, 600, 3)) | {599}, 2: {599}}
    got, _ = read_all(meet(tmp_path, wants, 600))
    assert got[2] == {599: 599 % 251}
    assert set(got[0]) == set(range(0, 600, 6)) | {599}


def test_a_block_that_cannot_be_read_is_reported_to_those_who_want_it(tmp_path):
    got, _ = read_all(meet(tmp_path, {0: {0, 1, 2}, 1: {0, 1, 2}}, 3), fail={1})
    assert got == {rank: {0: 0, 1: None, 2: 2} for rank in (0, 1)}


def test_who_does_not_come_is_waited_for_and_then_not(tmp_path):
    began = time.monotonic()
    assert meet(tmp_path, {0: {1}}, 4, readers=(0, 1)) == {0: None}
    assert 1.5 < time.monotonic() - began < 10
    assert list(tmp_path.iterdir()) == []


def test_who_goes_away_leaves_the_others_to_read_alone(tmp_path):
    groups = meet(tmp_path, {0: set(range(30)), 1: set(range(30))}, 30)
    groups.pop(1)  # killed: reads nothing, takes nothing
    got, _ = read_all(groups)
    assert None in got[0].values()


def test_a_rank_alone_meets_none(tmp_path):
    assert readers_of(tmp_path, 0, (0,)).enter() is None
    assert readers_of(tmp_path, 0, ()).enter() is None


def test_who_wants_nothing_keeps_none_waiting(tmp_path):
    got, _ = read_all(meet(tmp_path, {0: {0, 1}, 1: set(), 2: {1}}, 2))
    assert got == {0: {1: 1}, 1: {}, 2: {1: 1}}


def test_without_memory_each_reads_alone(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(group_memory.os, "posix_fallocate", full)
    assert meet(tmp_path, {0: {1}, 1: {1}}, 2) == {0: None, 1: None}
    assert list(tmp_path.iterdir()) == []


def test_who_reads_too_late_writes_into_no_buffer_that_others_use(tmp_path):
    """A read hangs; all lose patience with it and go on; it ends while they are at a later block of its buffer."""
    groups = meet(tmp_path, {0: set(range(40)), 1: set(range(40))}, 40)
    hung, over = threading.Event(), threading.Event()
    first = groups[0].own_reads[0]
    later = first._replace(number=first.number + groups[1]._layout.buffers)  # the next one in its buffer

    def late(buffer):
        hung.set()
        over.wait(20)
        buffer.view[:8] = b"too late"

    thread = threading.Thread(target=groups[0].fill, args=(first, late))
    thread.start()
    assert hung.wait(10)
    for group in groups.values():
        group.release(first)
        group.release(later._replace(number=later.number - 1))
    groups[1].fill(later, lambda buffer: buffer.view.__setitem__(slice(0, 8), b"in order"))
    buffer = groups[1].take(later)
    over.set()
    thread.join()
    assert buffer is None or bytes(buffer.view[:8]) == b"in order"


def test_ranks_that_read_different_checkpoints_of_one_number_do_not_meet(tmp_path):
    found = {}

    def come(rank):
        group = opened(readers_of(tmp_path, rank, (0, 1)), 2, content=bytes([rank]))
        found[rank] = group.join({0, 1})

    threads = [threading.Thread(target=come, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {0: False, 1: False}
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_gives_up_ends_the_wait_of_those_that_came_later(tmp_path, monkeypatch):
    """Rank 2 does not come. Rank 1 waits only as long as rank 0 does, not for a time of its own."""
    monkeypatch.setattr(node_group, "_JOIN_S", 5.0)
    first, second = outcomes(joined(tmp_path, 0, (0, 1, 2)), joined(tmp_path, 1, (0, 1, 2), after_s=3.5))
    assert (first["joined"], second["joined"]) == (False, False)
    assert second["took"] < 4.0, second
    assert list(tmp_path.iterdir()) == []


def test_an_error_while_the_nodes_meet_ends_the_wait_of_the_node_for_the_plan(tmp_path):
    def fails(_wants):
        raise OSError("no plan")

    lead, other = outcomes(
        joined(tmp_path, 0, (0, 1), nodes=True, meet_nodes=fails), joined(tmp_path, 1, (0, 1), nodes=True)
    )
    assert (lead["joined"], other["joined"]) == (None, True)  # it shares with the ranks of its node all the same
    assert other["took"] < 20, other
    assert list(tmp_path.iterdir()) == []


def test_blocks_of_a_rank_that_leaves_are_read_at_once_and_others_are_still_shared(tmp_path):
    """Rank 1 fails after all have joined, with blocks that it was to read; rank 0 is not alone for that."""
    groups = meet(tmp_path, {rank: set(range(60)) for rank in range(3)}, 60)
    lost = {one.block for one in groups[1].own_reads}
    groups.pop(1).leave()
    got, _ = read_all(groups)
    assert lost
    for rank in (0, 2):
        assert got[rank] == {block: None if block in lost else block % 251 for block in range(60)}


@pytest.mark.parametrize("late_s", [0.0, 0.5])
def test_a_rank_that_does_not_take_part_says_so(tmp_path, late_s):
    """It failed before it knew which blocks it wants, or has all that it needs."""
    come = joined(tmp_path, 0, (0, 1, 2), after_s=0.5 - late_s)
    other = joined(tmp_path, 2, (0, 1, 2), after_s=0.5 - late_s)
    time.sleep(late_s)
    decline(readers_of(tmp_path, 1, (0, 1, 2)))
    first, second = outcomes(come, other)
    assert (first["joined"], second["joined"]) == (True, True)
    assert [one.wanted for one in first["group"].shared] == [(0, 2)] * 3
    assert list(tmp_path.iterdir()) == []


def test_ranks_that_all_do_not_take_part_leave_no_file(tmp_path):
    for rank in range(3):
        decline(readers_of(tmp_path, rank, (0, 1, 2)))
    assert list(tmp_path.iterdir()) == []


def test_a_rank_without_memory_for_the_group_says_so(tmp_path, monkeypatch):
    """The other one has mapped all of it already."""
    come = joined(tmp_path, 0, (0, 1))
    time.sleep(0.3)

    def full(*_):
        raise OSError(12, "Cannot allocate memory")

    entered = readers_of(tmp_path, 1, (0, 1)).enter()
    with monkeypatch.context() as patched:
        patched.setattr(
            group_memory, "Memory", lambda fd, nbytes: full() if nbytes > BLOCK_NBYTES else Mapping(fd, nbytes)
        )
        with pytest.raises(OSError, match="allocate"):
            NodeGroup(entered, Blocks([BLOCK_NBYTES] * 3), Found.of(1, SAVE, b"m", 0))
    entered.decline()
    (found,) = outcomes(come)
    assert found["joined"]
    assert found["group"].shared == []


def test_ranks_that_read_different_checkpoints_of_one_number_notice_it_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(node_group, "_JOIN_S", 20.0)
    first, second = outcomes(joined(tmp_path, 0, (0, 1), content=b"0"), joined(tmp_path, 1, (0, 1), content=b"1"))
    assert (first["joined"], second["joined"]) == (False, False)
    assert max(first["took"], second["took"]) < 10


def test_a_rank_may_take_its_time_while_others_advance(tmp_path, monkeypatch):
    """The next block that two ranks share may be far: the wait for it ends when no rank advances, not before."""
    monkeypatch.setattr(node_group, "_PATIENCE_S", 0.4)
    monkeypatch.setattr(node_group, "_NODE_PATIENCE_S", 0.4)
    groups = meet(tmp_path, {0: set(range(40)), 1: set(range(40)), 2: {39, 0}}, 40)
    real = Reader.into

    def slow(self, buffer, block):
        time.sleep(0.05)
        real(self, buffer, block)

    monkeypatch.setattr(Reader, "into", slow)
    got, _ = read_all(groups)
    assert got[2] == {0: 0, 39: 39}


def test_a_rank_that_left_hides_no_read_that_may_still_begin_in_the_same_buffer(tmp_path):
    """One rank is late with a block, the next one was to read the next block of the buffer and has left."""
    groups = meet(tmp_path, {rank: set(range(60)) for rank in range(3)}, 60)
    blocks, buffers = groups[0]._schedule, groups[0]._layout.buffers
    first, second, third = blocks[0 : 3 * buffers : buffers]
    assert {one.filler for one in (first, second, third)} == {0, 1, 2}
    groups[second.filler].leave()
    for one in (first, third):  # they have lost their patience with it
        groups[one.filler].release(third._replace(number=third.number - 1))
    written = []
    groups[third.filler].fill(third, written.append)
    assert written == []
    groups[first.filler].fill(first, lambda _: None)
