"""Incarnation numbers in the arena: kept until the clock has passed them."""

import os
import tempfile

import pytest

from ckptd.arena.arena import Arena
from ckptd.arena.incarnation_numbers import Kept, Numbers
from ckptd.shared.base.ids import JobKey, clocked_from, incarnation_at
from ckptd.shared.format import arena_paths

ONE, TWO = JobKey("/store", "one"), JobKey("/store", "two")
SHOWN = 8_000_000


class AClock:
    """Time in seconds since 1970."""

    def __init__(self) -> None:
        self.now = clocked_from(SHOWN)

    def __call__(self) -> float:
        return self.now


def test_the_time_of_a_number_is_when_the_clock_shows_it():
    assert incarnation_at(clocked_from(SHOWN)) == SHOWN
    assert incarnation_at(clocked_from(SHOWN) - 0.001) == SHOWN - 1


def test_the_next_daemon_of_the_arena_knows_the_numbers_until_the_clock_has_passed_them(tmp_path):
    clock = AClock()
    numbers = Numbers(str(tmp_path), clock)
    numbers.keep(ONE, SHOWN)
    numbers.keep(TWO, SHOWN + 1)
    assert Numbers(str(tmp_path), clock).ahead() == [Kept(ONE, SHOWN), Kept(TWO, SHOWN + 1)]
    clock.now = clocked_from(SHOWN + 1)
    assert Numbers(str(tmp_path), clock).ahead() == [Kept(TWO, SHOWN + 1)]
    assert numbers.needed_beyond_s(0) == pytest.approx(4)
    assert numbers.needed_beyond_s(3) == pytest.approx(1)
    assert numbers.needed_beyond_s(9) == 0
    clock.now += 4
    assert numbers.ahead() == []
    assert numbers.needed_beyond_s(0) == 0


def test_a_number_that_a_store_counted_is_not_written(tmp_path):
    Numbers(str(tmp_path), AClock()).keep(ONE, 57)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("raw", [b"", b"\xff", b"\x93\x01"])
def test_a_file_that_cannot_be_read_is_no_number(tmp_path, raw):
    (tmp_path / arena_paths.NUMBERS).write_bytes(raw)
    numbers = Numbers(str(tmp_path), AClock())
    assert numbers.ahead() == []
    numbers.keep(ONE, SHOWN)
    assert Numbers(str(tmp_path), AClock()).ahead() == [Kept(ONE, SHOWN)]


def test_a_clock_that_was_set_back_keeps_no_daemon(tmp_path):
    clock = AClock()
    numbers = Numbers(str(tmp_path), clock)
    numbers.keep(ONE, SHOWN)
    clock.now -= 365 * 86400
    assert numbers.needed_beyond_s(3) == 60


def test_the_file_goes_with_the_arena():
    with tempfile.TemporaryDirectory(prefix="ckptd-test-", dir="/dev/shm") as directory:
        an_arena_that_goes(os.path.join(directory, "arena"))


def an_arena_that_goes(path: str) -> None:
    arena = Arena(path)
    arena.open()
    Numbers(arena.path, AClock()).keep(ONE, SHOWN)
    assert os.path.exists(os.path.join(arena.path, arena_paths.NUMBERS))
    arena.close(remove=True)
    assert not os.path.exists(arena.path)
