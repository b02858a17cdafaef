"""Links whose packets go by a leader, with real sockets: the way moves, the link does not notice."""

import pytest

from ckptd.core import events as ev
from ckptd.peers.plane import PeerPlane
from tests.unit.peers.planes import JOB, staged

MEMBERS = ("m1", "m2")


@pytest.fixture
def group(world):
    """A coordinator, a leader and two members, which keep the links that the core wants."""
    for node in ("chief", "leader", *MEMBERS):
        world.start(node)
    begin(world)
    world.until(lambda: all(len(world.ups(node)) == 3 for node in ("chief", "leader")))
    return world


def begin(world, leader="leader", members=MEMBERS):
    peers = [plane.peer for plane in world.planes.values()]
    for node, plane in world.planes.items():
        PeerPlane.meet(plane, JOB, peers)
        keep(world, node, leader, members)


def keep(world, node, leader="leader", members=MEMBERS):
    plane = world.planes[node]
    if node == "chief":
        plane.keep_links(JOB, None, [(member, leader) for member in members if member in world.planes])
    elif node in members:
        plane.keep_links(JOB, ["chief", leader], [("chief", leader)])
    else:
        plane.keep_links(JOB, ["chief"], [])


def remote(world, node, other):
    return next(one for one in world.planes[node]._remotes.values() if one.peer.node == other)


def by(world, node, other):
    """By which leader the node's packets for the other go; None: directly."""
    via = remote(world, node, other).path.via
    return via.node if via is not None else None


def relayed(world, leader="leader", members=MEMBERS):
    """Whether all members and the coordinator have gone over to the leader, and have no socket to each other."""
    pairs = [pair for member in members for pair in ((member, "chief"), ("chief", member))]
    return all(by(world, *pair) == leader and remote(world, *pair)._socket is None for pair in pairs)


def downs(world, *nodes):
    return [(node, event.node) for node in nodes or world.planes for event in world.of(node, ev.PeerDown)]


def exchange(world, number, members=MEMBERS):
    for member in members:
        assert world.planes["chief"].send(JOB, member, staged("chief", number))
        assert world.planes[member].send(JOB, "chief", staged(member, number))
    world.until(lambda: all(number in world.counters(node) for node in members))
    world.until(lambda: world.counters("chief").count(number) == len(members))


def test_members_and_coordinator_go_over_to_the_leader_and_close_their_sockets(group):
    exchange(group, 1)
    group.until(lambda: relayed(group))
    exchange(group, 2)
    assert downs(group) == []
    assert [len(group.ups(node)) for node in MEMBERS] == [2, 2]
    assert all(plane.problems() == [] and not +plane.refused for plane in group.planes.values())
    group.spend(3.0)
    assert relayed(group)
    exchange(group, 3)
    assert downs(group) == []
