"""Turns of the loop: the long ones are counted, and the log names their longest part."""

import logging
from concurrent.futures import ThreadPoolExecutor

import pytest

from ckptd.daemon.pace import LONG_S, Pace


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


class Plane:
    def __init__(self):
        self.heard = []

    def turn_begins(self):
        self.heard.append("begins")

    def turn_ends(self):
        self.heard.append("ends")


@pytest.fixture
def clock():
    return Clock()


def test_long_turns_are_counted_and_named(clock, caplog):
    caplog.set_level(logging.INFO, "ckptd")
    pace = Pace(Plane(), clock)
    with pace.turn():
        clock.now += 0.01
        with pace.part("LoadAsked"):
            clock.now += 0.3
        with pace.part("SaveStaged"):
            clock.now += 0.02
    with pace.turn():
        clock.now += LONG_S
    assert (pace.long, round(pace.longest_s, 3)) == (1, 0.33)
    (said,) = caplog.messages
    assert "mostly=LoadAsked" in said
    assert "part_s=0.3" in said


def test_what_follows_a_part_is_not_its_own(clock, caplog):
    caplog.set_level(logging.INFO, "ckptd")
    pace = Pace(Plane(), clock)
    with pace.turn():
        with pace.part("LoadAsked"):
            clock.now += 0.02
        clock.now += 0.3
    (said,) = caplog.messages
    assert "mostly=the rest" in said.replace('"', "")


def test_a_section_is_named_when_no_part_of_it_was_longer(clock, caplog):
    caplog.set_level(logging.INFO, "ckptd")
    pace = Pace(Plane(), clock, clock)
    with pace.turn():
        pace.section("requests of ranks")
        clock.now += 0.01
        pace.section("links to other nodes")
        with pace.part("LoadAsked"):
            clock.now += 0.02
        clock.now += 0.3
    (said,) = caplog.messages
    assert "mostly=links to other nodes" in said.replace('"', "")
    assert "cpu_s=0.33" in said


def test_a_collection_is_a_part_that_interrupts_another(clock, caplog):
    caplog.set_level(logging.INFO, "ckptd")
    pace = Pace(Plane(), clock)
    with pace.turn(), pace.part("LoadAsked"):
        clock.now += 0.02
        pace.collecting("start", {})
        clock.now += 0.05
        pace.collecting("stop", {})
        clock.now += 0.03
    (said,) = caplog.messages
    assert ("mostly=garbage collection" in said.replace('"', ""), "part_s=0.05" in said) == (True, True)


def test_a_collection_in_another_thread_is_no_part(clock, caplog):
    caplog.set_level(logging.INFO, "ckptd")
    pace = Pace(Plane(), clock)
    with pace.turn(), pace.part("LoadAsked"), ThreadPoolExecutor(1) as pool:
        pool.submit(pace.collecting, "start", {}).result()
        clock.now += 0.06
    assert "mostly=LoadAsked" in caplog.messages[0]


def test_many_long_turns_make_few_lines(clock, caplog):
    caplog.set_level(logging.INFO, "ckptd")
    pace = Pace(Plane(), clock)
    for _ in range(30):
        with pace.turn():
            clock.now += 1.0
    assert pace.long == 30
    assert 3 <= len(caplog.messages) <= 4


def test_the_plane_knows_when_a_turn_is_over_however_it_ends(clock):
    plane = Plane()
    pace = Pace(plane, clock)
    with pytest.raises(KeyError), pace.turn():
        raise KeyError
    assert plane.heard == ["begins", "ends"]
