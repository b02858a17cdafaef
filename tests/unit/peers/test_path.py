"""Which path a link takes, by numbers and times alone."""

import math

import pytest

from ckptd.peers.path import Path, Via
from ckptd.shared.base.ids import JobKey

TIMEOUT_S = 10.0
VIA = Via(JobKey("/store", "job"), "leader", "key")
OTHER = VIA._replace(node="second")


@pytest.fixture
def path():
    made = Path(TIMEOUT_S)
    made.begin(100.0)
    return made


def test_a_connection_begins_directly_and_nothing_is_due(path):
    assert (path.number, path.relayed, path.next_relayed, path.next_deadline()) == (0, False, 1, math.inf)


def test_a_relayed_path_is_in_force_once_a_packet_has_come_on_it(path):
    path.try_soon(100.0, 0.5)
    assert not path.is_to_try(100.0)
    assert path.is_to_try(100.1)
    assert path.heard(1, VIA, 100.2)
    assert (path.via, path.next_relayed, path.is_to_try(1e9)) == (VIA, 3, False)
    assert not path.heard(1, VIA, 100.3), "it is no news"


def test_an_older_number_moves_nothing_and_is_no_sign_of_the_path(path):
    path.heard(3, VIA, 100.0)
    for number, via in ((1, OTHER), (2, None), (0, None)):
        assert not path.heard(number, via, 104.9)
    assert (path.number, path.via) == (3, VIA)
    assert path.is_silent(105.0)


@pytest.mark.parametrize(("number", "via"), [(2, VIA), (1, None)])
def test_a_number_of_the_other_kind_counts_nothing(path, number, via):
    assert not path.heard(number, via, 101.0)
    assert path.number == 0


def test_a_relayed_path_is_silent_after_half_the_timeout_and_a_direct_one_never(path):
    assert not path.is_silent(1e9)
    path.heard(1, VIA, 100.0)
    assert path.next_deadline() == 105.0
    assert not path.is_silent(104.9)
    path.heard(1, VIA, 104.0)
    assert not path.is_silent(108.9)
    assert path.is_silent(109.0)
    assert not path.is_silent(-math.inf), "what has arrived was not read"


def test_both_ends_agree_when_both_go_back(path):
    other = Path(TIMEOUT_S)
    other.begin(100.0)
    for end in (path, other):
        end.heard(1, VIA, 101.0)
        end.go_direct(107.0)
    assert (path.number, other.number) == (2, 2)
    assert not path.heard(2, None, 107.1)
    assert path.number == 2
    assert path.next_relayed == 3


def test_a_new_direct_path_has_signs_of_life_until_the_other_end_answers(path):
    path.heard(1, VIA, 100.0)
    path.go_direct(105.0)
    assert path.is_to_nudge(105.0)
    path.nudged(105.0)
    assert not path.is_to_nudge(105.1)
    assert path.is_to_nudge(105.25)
    path.heard(2, None, 105.3)
    assert not path.is_to_nudge(1e9)


def test_signs_on_a_new_direct_path_end_without_an_answer(path):
    path.heard(1, VIA, 100.0)
    path.go_direct(105.0)
    sent = 0
    while path.is_to_nudge(1e9):
        path.nudged(105.0)
        sent += 1
    assert sent == 8


def test_an_end_that_follows_to_a_direct_path_answers_a_few_times(path):
    path.heard(1, VIA, 100.0)
    assert path.heard(2, None, 105.0)
    for _ in range(2):
        assert path.is_to_nudge(1e9)
        path.nudged(105.0)
        path.heard(2, None, 105.1)
    assert not path.is_to_nudge(1e9)


def test_a_path_that_fails_is_tried_more_and_more_rarely_until_there_is_a_reason(path):
    waits = []
    for _ in range(10):
        path.try_later(100.0, 1.0)
        waits.append(path.next_deadline() - 100.0)
    assert waits == [0.5, 1, 2, 4, 8, 16, 32, 60, 60, 60]
    path.try_soon(100.0, 1.0)
    path.try_later(100.0, 1.0)
    assert path.next_deadline() == 100.5, "the leader is back"
    path.begin(200.0)
    path.try_later(200.0, 1.0)
    assert path.next_deadline() == 200.5


def test_a_connection_that_is_over_leaves_nothing(path):
    path.heard(3, VIA, 100.0)
    path.acked = 7
    path.begin(120.0)
    assert (path.number, path.via, path.acked, path.next_deadline()) == (0, None, 0, math.inf)


def test_a_leader_that_was_silent_is_not_tried_again_at_once(path):
    path.heard(1, VIA, 100.0)
    path.go_direct(105.0)
    path.try_later(105.0, 0.5)
    assert not path.is_to_try(109.9)
    assert path.is_to_try(110.0), "half of the timeout at the least"
    path.try_soon(106.0, 0.5)
    assert path.is_to_try(106.1), "it is back, or another one leads"
