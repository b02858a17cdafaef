"""How ranks of a node meet for a read, and agree: what any of them says at any time reaches no other read."""

import os
import subprocess
import sys
import time

import pytest

from ckptd.shared.base.ids import SaveId
from ckptd_client._load.shared_read import meeting, node_group
from ckptd_client._load.shared_read.node_group import NodeGroup
from tests.runs import RUN
from tests.unit.client.load.groups import SAVE, decline, joined, meet, opened, outcomes, read_all, readers_of


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(node_group, "_JOIN_S", 2.0)
    monkeypatch.setattr(node_group, "_PATIENCE_S", 2.0)
    monkeypatch.setattr(node_group, "_NODE_PATIENCE_S", 1.0)


def test_a_late_word_of_a_rank_reaches_no_later_read(tmp_path, monkeypatch):
    """It entered, and declines once the others have given it up; then all of them read the same again."""
    monkeypatch.setattr(node_group, "_JOIN_S", 0.5)
    late = readers_of(tmp_path, 1, (0, 1, 2)).enter()
    first, second = outcomes(joined(tmp_path, 0, (0, 1, 2)), joined(tmp_path, 2, (0, 1, 2)))
    assert (first["joined"], second["joined"]) == (False, False)
    late.decline()
    late.close()
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(node_group, "_JOIN_S", 5.0)
    found = outcomes(*(joined(tmp_path, rank, (0, 1, 2), after_s=rank / 10) for rank in range(3)))
    assert [one["joined"] for one in found] == [True] * 3
    assert [one["group"].shared[0].wanted for one in found] == [(0, 1, 2)] * 3


def test_words_of_an_earlier_read_of_the_same_name_never_mix_into_a_read(tmp_path):
    """A rank has declined, for all that the others know; whatever comes of the next read, no block is another."""
    wants = {0: set(range(24)), 1: set(range(12)), 2: set(range(12, 24))}
    for _ in range(8):
        decline(readers_of(tmp_path, 1, (0, 1, 2)))
        groups = {rank: group for rank, group in meet(tmp_path, wants, 24).items() if group is not None}
        got, _ = read_all(groups)
        for rank, blocks in got.items():
            assert {block: byte for block, byte in blocks.items() if byte is not None} == {
                block: block % 251 for block, byte in blocks.items() if byte is not None
            }, rank
        assert list(tmp_path.iterdir()) == []


def test_a_join_that_is_interrupted_leaves_nothing_to_a_later_read(tmp_path, monkeypatch):
    group = opened(readers_of(tmp_path, 0, (0, 1)), 8)

    def interrupted(_seconds):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(node_group.time, "sleep", interrupted)
        with pytest.raises(KeyboardInterrupt):
            group.join(range(8))
    assert list(tmp_path.iterdir()) == []
    got, _ = read_all(meet(tmp_path, {0: {4, 5}, 1: {0, 4, 5}}, 8))
    assert got == {rank: {4: 4, 5: 5} for rank in (0, 1)}


def test_ranks_that_compute_from_different_wants_share_nothing(tmp_path, monkeypatch, caplog):
    real = NodeGroup._is_agreed
    monkeypatch.setattr(NodeGroup, "_is_agreed", lambda self, said: real(self, said + bytes([self._index])))
    assert meet(tmp_path, {0: {0, 1}, 1: {0, 1}}, 3) == {0: None, 1: None}
    assert "announced different blocks" in caplog.text


def test_a_buffer_that_holds_another_block_is_not_taken(tmp_path):
    groups = meet(tmp_path, {0: {0, 1, 2}, 1: {0, 1, 2}}, 3)
    one = groups[0].own_reads[0]
    groups[0].fill(one, lambda _: None)
    assert groups[1].take(one) is not None
    assert groups[1].take(one._replace(block=one.block + 1)) is None


@pytest.mark.parametrize("declines", [0, 1])
@pytest.mark.parametrize("nodes", [False, True])
def test_a_rank_that_does_not_take_part_holds_up_no_buffer(tmp_path, monkeypatch, declines, nodes):
    """Nor does a first rank keep the others of its node from sharing."""
    monkeypatch.setattr(node_group, "_PATIENCE_S", 10.0)
    monkeypatch.setattr(node_group, "_NODE_PATIENCE_S", 10.0)
    ranks = {0, 1, 2} - {declines}
    come = [
        joined(
            tmp_path, rank, (0, 1, 2), wants=range(60), total=60, nodes=nodes, meet_nodes=lambda _: node_group.Plan()
        )
        for rank in ranks
    ]
    time.sleep(0.3)
    decline(readers_of(tmp_path, declines, (0, 1, 2), nodes=nodes))
    groups = {rank: found["group"] for rank, found in zip(ranks, outcomes(*come), strict=True)}
    began = time.monotonic()
    got, readers = read_all(groups)
    assert time.monotonic() - began < 8
    assert got == {rank: {block: block % 251 for block in range(60)} for rank in ranks}
    assert len(readers) == 60
    assert list(tmp_path.iterdir()) == []


ANOTHER = SaveId(1, 2, 7, RUN)


def test_ranks_that_found_different_steps_in_one_read_of_all_learn_it(tmp_path):
    come = (joined(tmp_path, rank, (0, 1), number=3, save=(SAVE, ANOTHER)[rank], total=3 + rank) for rank in (0, 1))
    texts = {str(found["error"]) for found in outcomes(*come)}
    assert len(texts) == 1
    assert "rank 0 found step 1, rank 1 step 7" in texts.pop()
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_is_late_for_an_earlier_read_shares_nothing_with_the_next(tmp_path, caplog):
    found = outcomes(*(joined(tmp_path, r, (0, 1), number=3 + r, save=(SAVE, ANOTHER)[r]) for r in (0, 1)))
    assert [one["joined"] for one in found] == [False, False]
    assert "which is at another read, of step 7" in caplog.text


def test_ranks_that_count_their_reads_differently_share_and_go_on_from_the_highest(tmp_path):
    """One of them raised before it counted a read."""
    found = outcomes(*(joined(tmp_path, rank, (0, 1), number=3 + rank) for rank in (0, 1)))
    assert [one["joined"] for one in found] == [True, True]
    assert {one["group"].found.read for one in found} == {4}
    assert len(found[0]["group"].shared) == 3


def test_what_killed_ranks_left_is_removed_by_the_next_read_and_what_is_in_use_is_not(tmp_path):
    code = f"""
import os
from ckptd_client._load.shared_read.meeting import NodeReaders
NodeReaders({str(tmp_path)!r}, "s", (0, 1), 0, "load.1.1").enter()
os._exit(0)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    (left,) = tmp_path.iterdir()
    here = readers_of(tmp_path, 0, (0, 1), "load.1.2").enter()
    (used,) = tmp_path.iterdir()
    assert used.name != left.name
    other = readers_of(tmp_path, 0, (0, 1), "load.1.3").enter()
    assert used in tmp_path.iterdir()
    for one in (here, other):
        one.end()
        one.close()
    assert list(tmp_path.iterdir()) == []


def test_a_read_that_others_did_not_enter_says_nothing_to_the_next_of_that_name(tmp_path):
    decline(readers_of(tmp_path, 0, (0, 1), number=1))
    second, first = (joined(tmp_path, rank, (0, 1), number=2, after_s=(1 - rank) / 5) for rank in (1, 0))
    assert [found["joined"] for found in outcomes(first, second)] == [True, True]
    assert len(first[1]["group"].shared) == 3


def test_a_rank_that_is_stopped_while_it_enters_keeps_no_other_waiting_for_long(tmp_path, monkeypatch):
    monkeypatch.setattr(meeting, "_TURN_S", 0.3)
    with meeting._turn(str(tmp_path)):
        assert readers_of(tmp_path, 0, (0, 1)).enter() is None
    assert readers_of(tmp_path, 0, (0, 1)).enter() is not None


def test_forked_processes_hold_no_lock_of_a_rank(tmp_path):
    """Workers of a data loader live as long as the training."""
    entered = readers_of(tmp_path, 0, (0, 1), "load.1.1").enter()
    over = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(over[0], 1)
        os._exit(0)
    entered.close()
    readers_of(tmp_path, 0, (0, 1), "load.1.2").enter()
    assert len([*tmp_path.iterdir()]) == 1
    os.write(over[1], b"x")
    os.waitpid(child, 0)
    for fd in over:
        os.close(fd)
