"""Messages that wait for a later turn: all of them leave, in order, and none of an earlier link on a new one."""

import time

import pytest

from ckptd.core import events as ev
from ckptd.core.actions import ToNode
from ckptd.peers.outbox import Outbox
from tests.unit.peers.planes import JOB, staged


def order(node, number=0):
    return ToNode(job=JOB, node=node, message=ev.JobReleased(job=JOB, node=f"c{number}"))


class Turns:
    """An outbox whose messages take a millisecond each."""

    def __init__(self):
        self.now, self.sent = 100.0, []
        self.box = Outbox(self._send, lambda: self.now)

    def _send(self, action):
        self.now += 0.001
        self.sent.append(action)


def test_what_one_event_orders_of_a_thousand_nodes_is_sent_in_short_turns():
    turns = Turns()
    orders = [order(f"n{number}") for number in range(1000)]
    turns.box.begins()
    for one in orders:
        turns.box.carry(one)
    assert 0 < len(turns.sent) < 50
    while turns.box:
        began = turns.now
        turns.box.begins()
        turns.box.send_more()
        assert turns.now - began < 0.03
    assert turns.sent == orders


def test_a_later_message_does_not_overtake_those_that_wait():
    turns = Turns()
    turns.box.begins()
    orders = [order("a", number) for number in range(100)]
    for one in orders:
        turns.box.carry(one)
    turns.box.begins()
    turns.box.carry(last := order("a", 100))
    turns.box.send_more(1000.0)
    assert turns.sent == [*orders, last]


def test_what_waits_for_a_node_is_lost_with_its_link():
    turns = Turns()
    turns.box.begins()
    turns.now += 1.0
    for node in "abab":
        turns.box.carry(order(node))
    assert turns.sent == []
    turns.box.drop("a")
    turns.box.send_more()
    assert [one.node for one in turns.sent] == ["b", "b"]


def test_without_a_loop_nothing_waits():
    turns = Turns()
    for number in range(100):
        turns.box.carry(order("a", number))
    assert len(turns.sent) == 100


@pytest.fixture
def pair(world):
    """Two planes with a link."""
    for node in "ab":
        world.start(node)
    world.all_meet()
    world.until(lambda: world.ups("a") and world.ups("b"))
    return world


def long_turn(plane):
    """From here on the loop of this plane is in a turn that has lasted long."""
    plane.turn_begins()
    plane._outbox._until = 0.0


@pytest.mark.parametrize("end", ["forget", "close"])
def test_last_words_leave_before_the_end(pair, end):
    a = pair.planes["a"]
    long_turn(a)
    a.carry(ToNode(job=JOB, node="b", message=staged("a", 7)))
    assert a._outbox
    if end == "forget":
        a.forget(JOB)
    else:
        pair.stop("a")
    pair.until(lambda: 7 in pair.counters("b"))


def test_what_waits_is_sent_in_the_next_turn(pair):
    a = pair.planes["a"]
    long_turn(a)
    a.carry(ToNode(job=JOB, node="b", message=staged("a", 8)))
    a.turn_ends()
    assert a.next_deadline() == 0.0
    pair.until(lambda: 8 in pair.counters("b"))


def test_what_waits_for_a_daemon_that_ended_is_not_sent_to_the_next_one(pair):
    """Its hello is received in the turn that would send what waits."""
    a = pair.planes["a"]
    long_turn(a)
    a.carry(ToNode(job=JOB, node="b", message=staged("a", 9)))
    pair.stop("b")
    b = pair.start("b")
    b.meet(JOB, [a.peer])
    before, deadline = len(pair.ups("a", "b")), time.monotonic() + 10
    while len(pair.ups("a", "b")) == before:
        assert time.monotonic() < deadline
        pair.heard["a"] += a.receive()
        pair.heard["b"] += [*b.receive(), *b.tick()]
    a.turn_begins()
    a.carry(ToNode(job=JOB, node="b", message=staged("a", 10)))
    pair.until(lambda: pair.counters("b"))
    assert pair.counters("b") == [10]
