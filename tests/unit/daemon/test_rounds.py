"""Work in rounds: what is begun when, with real threads."""

import select
import threading
import time

import pytest

from ckptd.daemon.background import Background, Rounds

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(name="background")
def fixture_background():
    background = Background(2, "test")
    yield background
    background.close()


def settle(background, done, timeout_s=10.0):
    """Delivers results until done says so."""
    deadline = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < deadline
        if select.select([background.fileno()], [], [], 0.05)[0]:
            background.deliver()


def test_the_first_of_each_goes_before_the_second_of_any(background):
    """As three ranks ask, one after the other, each for three slots."""
    rounds, begun, ended = Rounds(background), [], []
    for rank in range(3):
        for number in range(3):
            rounds.run(number, lambda what=(number, rank): begun.append(what) or what, ended.append)
    settle(background, lambda: not rounds.busy)
    assert sorted(begun[:3]) == [(0, 0), (0, 1), (0, 2)]
    assert sorted(begun[3:6]) == [(1, 0), (1, 1), (1, 2)]
    assert len(ended) == 9


def test_nothing_runs_beside_what_is_waited_for(background):
    rounds, go, begun = Rounds(background), threading.Event(), []
    rounds.run(0, lambda: begun.append(0) or go.wait(10), lambda _: None)
    rounds.run(1, lambda: begun.append(1), lambda _: None)
    time.sleep(0.1)
    assert begun == [0]
    go.set()
    settle(background, lambda: not rounds.busy)
    assert begun == [0, 1]


def test_who_comes_later_and_is_waited_for_does_not_wait_for_the_later_round(background):
    rounds, go, begun = Rounds(background), threading.Event(), []
    rounds.run(2, lambda: go.wait(10), lambda _: None)
    rounds.run(0, lambda: begun.append(0), lambda _: None)
    settle(background, lambda: begun)
    go.set()
    settle(background, lambda: not rounds.busy)


def test_work_that_fails_ends_its_round_too(background):
    rounds, told = Rounds(background), []

    def fail():
        raise OSError("full")

    rounds.run(0, fail, told.append)
    rounds.run(1, lambda: 1, told.append)
    settle(background, lambda: len(told) == 2)
    assert isinstance(told[0], OSError)
    assert told[1] == 1


def test_what_done_raises_holds_up_nothing(background):
    rounds, told = Rounds(background), []

    def fail(_):
        raise ValueError("a bug of the receiver's")

    rounds.run(0, lambda: 0, fail)
    rounds.run(1, lambda: 1, told.append)
    with pytest.raises(ValueError, match="a bug"):
        settle(background, lambda: told)
    settle(background, lambda: told)
