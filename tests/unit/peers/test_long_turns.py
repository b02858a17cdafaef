"""A loop that is busy for longer than the timeout loses no link, and a broadcast costs one encode."""

import itertools
import time

from ckptd.core import events as ev
from ckptd.core.actions import ToNode
from ckptd.peers import keep_alive
from ckptd.peers.link import Link
from ckptd.shared.protocol import node_messages
from tests.unit.peers.planes import JOB, Apart, staged


def test_no_link_is_lost_because_a_turn_is_long(world):
    """The loop of one daemon is busy for longer than the timeout; the other one goes on."""
    a = world.start("a", timeout_s=1.0)
    apart = Apart(world.base / "b", "b", a.peer, timeout_s=1.0)
    try:
        a.meet(JOB, [apart.peer])
        world.until(lambda: world.ups("a"))
        a.turn_begins()
        until = time.monotonic() + 2.5
        while time.monotonic() < until:
            pass
        a.turn_ends()
        assert a.send(JOB, "b", staged("a", 7)), "it is up still"
        world.until(lambda: world.counters("a") == [7])
        world.spend(0.5)
        assert (world.ups("a"), world.of("a", ev.PeerDown)) == ([True], [])
    finally:
        apart.kill()


def test_a_loop_that_hangs_sends_no_signs_of_life(world, monkeypatch):
    monkeypatch.setattr(keep_alive, "_HANGS_S", 0.5)
    a, b = world.start("a", timeout_s=1.0), world.start("b", timeout_s=1.0)
    world.all_meet()
    world.until(lambda: world.ups("a") and world.ups("b"))
    a.turn_begins()
    world.planes.pop("a")
    world.until(lambda: world.of("b", ev.PeerDown))
    world.planes["a"] = a
    a.turn_ends()
    world.until(lambda: len(world.ups("b")) == 2)
    assert b.send(JOB, "a", staged("b", 1))


def test_what_arrived_in_a_long_turn_is_not_late():
    link, other = (
        Link(instance=number, timeout_s=1.0, new_end=itertools.count(100 * number).__next__) for number in (1, 2)
    )
    for one, two in ((link, other), (other, link), (link, other), (other, link)):
        for packet in one.step(0.0):
            two.receive(packet, 0.0)
    assert link.up
    link.step(5.0, 0.9)
    assert link.up, "all that was read had come by 0.9"
    link.step(5.0, 1.1)
    assert not link.up


def test_a_broadcast_is_encoded_once(world, monkeypatch):
    for node in "abcd":
        world.start(node)
    world.all_meet()
    world.until(lambda: all(len(world.ups(node)) == 3 for node in "abcd"))
    encoded = []
    encode = node_messages.encode
    monkeypatch.setattr(node_messages, "encode", lambda message: encoded.append(message) or encode(message))
    for order in (staged("a", 3), staged("a", 4)):
        for node in "bcd":
            world.planes["a"].carry(ToNode(job=JOB, node=node, message=order))
    world.until(lambda: all(world.counters(node) == [3, 4] for node in "bcd"))
    assert [message.save.counter for message in encoded] == [3, 4]
