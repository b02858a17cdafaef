"""The board of a rank, by the rank's own code and the daemon's: no step goes by unseen by both."""

import os
import threading

import pytest

from ckptd.daemon.step_boards import hold
from ckptd.shared.format import step_board
from ckptd_client._preempt.step_board import StepBoard


@pytest.fixture(name="path")
def fixture_path(tmp_path):
    return str(tmp_path / "r00000-0123456789abcdef.steps")


@pytest.mark.parametrize("_try", range(40))
def test_no_step_is_past_what_the_daemon_read_without_having_seen_its_word(path, _try):
    board = StepBoard(path)
    unheld, first = [], threading.Event()

    def train():
        for step in range(10_000_000):
            if board.at(step) != step_board.NONE:
                return
            unheld.append(step)
            first.set()

    rank = threading.Thread(target=train)
    rank.start()
    first.wait(60)
    highest, fixed = hold([path])
    rank.join(10)
    assert fixed is None
    assert highest in {unheld[-1], unheld[-1] + 1}
    board.close()


def test_a_rank_that_first_asks_later_finds_the_word(path):
    assert hold([path]) == (-1, None)
    board = StepBoard(path)
    assert board.at(0) == step_board.HOLD
    assert hold([path]) == (0, None)
    board.close()


def test_a_step_that_was_announced_is_kept_and_reported_to_who_asks_again(path):
    board = StepBoard(path)
    board.at(4)
    assert hold([path]) == (4, None)
    with open(path, "r+b") as file:
        file.seek(step_board.WORD_OFFSET)
        file.write(step_board.encode_word(step_board.at(5)))
    assert hold([path]) == (4, 5)
    assert step_board.verdict(4, board.word()) is False
    assert step_board.verdict(5, board.at(5)) is True
    board.close()


def test_a_board_that_is_gone_is_seen(path):
    board = StepBoard(path)
    assert not board.lost
    os.unlink(path)
    assert board.lost
    board.close()


def test_a_board_that_was_cut_short_does_not_hurt_the_daemon(path):
    with open(path, "wb") as file:
        file.write(b"\1")
    assert hold([path]) == (0, None)


def test_a_link_in_its_place_is_not_followed(path, tmp_path):
    target = tmp_path / "elsewhere"
    target.write_bytes(bytes(step_board.NBYTES))
    os.symlink(target, path)
    failed = []
    assert hold([path], failed) == (-1, None)
    assert "symbolic" in failed[0]
    with pytest.raises(OSError, match="symbolic"):
        StepBoard(path)
    assert target.read_bytes() == bytes(step_board.NBYTES)


def test_a_board_that_cannot_be_keeps_no_other_from_being_held(path, tmp_path):
    board = StepBoard(path)
    board.at(7)
    os.mkdir(tmp_path / "r00001-0123456789abcdef.steps")
    failed = []
    assert hold([str(tmp_path / "r00001-0123456789abcdef.steps"), path], failed) == (7, None)
    assert board.word() == step_board.HOLD
    (text,) = failed
    assert text == "r00001-0123456789abcdef.steps: Is a directory"
    board.close()
