"""Daemons that take time: a busy one handles later, a blocked one loses its links, queues are bounded as links are."""

import os

import pytest

from ckptd.core import events as ev
from ckptd.core.placement import Placement
from ckptd.peers.link import MAX_QUEUED
from ckptd.shared.format.schemes import Scheme
from tests.simulation.costs import Costs, Sizes
from tests.simulation.run import play
from tests.simulation.world import KEY, World

LONG = os.environ.get("FAULTS") == "long"
TIMEOUT_S = 10.0


def world_of(nodes, **more):
    """A job whose ranks train and do not save, some seconds after its start."""
    world = World(1, nodes, scheme=Scheme.XOR, fault_every_s=0.0, shared=0.0, think_s=1e6, costs=Costs(), **more)
    world.clock.steady = True
    world.begin()
    launcher = world.launchers[0]
    assert world.run_until(lambda: launcher.current is not None and launcher.current.rounds == 1, 60)
    world.run(5.0)
    return world


def downs_of(world):
    """Which nodes learned that which other is down, from here on."""
    found = []
    world.at_each_event = lambda: None
    saw = world.saw
    world.saw = lambda machine, event: (
        found.append((machine.name, event.node)) if isinstance(event, ev.PeerDown) else None,
        saw(machine, event),
    )
    return found


@pytest.mark.parametrize(("factor", "lost"), [(0.5, False), (1.3, False), (2.8, False), (4.5, True)])
def test_a_loop_that_is_blocked_for_far_longer_than_the_peer_timeout_loses_its_links(factor, lost):
    world = world_of(4)
    downs = downs_of(world)
    world.nodes["n001"].charge(factor * TIMEOUT_S)
    world.run(7 * TIMEOUT_S)
    assert {name for name, other in downs if other == "n001"} == ({"n000", "n002", "n003"} if lost else set())
    assert all("n001" in pair for pair in downs)
    assert all(view.up for machine in world.nodes.values() for view in machine.plane.views())  # and has them again


def test_an_event_waits_for_a_busy_loop():
    world = world_of(2)
    machine, seen = world.nodes["n001"], []
    saw = world.saw
    world.saw = lambda where, event: (seen.append((world.clock.now, event)), saw(where, event))
    machine.charge(0.25)
    begin, event = world.clock.now, ev.DrainAsked(job=KEY, rank=-1)
    machine.say(event)
    world.run(1.0)
    when = next(at for at, what in seen if what is event)
    assert when - begin == pytest.approx(0.25)


def test_a_broadcast_leaves_one_order_after_another():
    world = world_of(8)
    machine, seen = world.nodes["n000"], {}
    order = ev.DrainDropped(job=KEY, node="n000", save=world.launchers[0].current.newest)
    saw = world.saw
    world.saw = lambda where, event: (
        seen.__setitem__(where.name, world.clock.now) if event is order else None,
        saw(where, event),
    )
    begin = world.clock.now
    for name in list(world.nodes)[1:]:
        machine.plane.send(KEY, name, order)
    world.run(1.0)
    costs = Costs()
    assert len(seen) == 7
    assert max(seen.values()) - begin >= 7 * costs.packet_out_s + costs.delay_s / 2
    assert min(seen.values()) < max(seen.values())


def test_a_link_is_given_up_when_too_much_waits():
    world = world_of(2)
    machine, downs = world.nodes["n000"], downs_of(world)
    world.nodes["n001"].freeze(5.0)
    order = ev.DrainDropped(job=KEY, node="n000", save=world.launchers[0].current.newest)
    sent = [machine.plane.send(KEY, "n001", order) for _ in range(MAX_QUEUED + 1)]
    assert sent == [True] * MAX_QUEUED + [False]
    world.run(2.0)
    assert ("n000", "n001") in downs
    world.run(20.0)
    assert all(view.up for view in machine.plane.views())


def test_sizes_are_those_of_the_codec():
    world = world_of(3)
    sizes, topology = Sizes(), world.nodes["n000"].catalogue.jobs[KEY].node.membership.topology
    attached = ev.NodeAttached(job=KEY, session="s", peer=topology.peers[1], waiting=(ev.Arrival(1, 3),))
    report = ev.Report(job=KEY, node="n001", event=attached)
    place = Placement(topology).place("n001")
    opened = ev.SessionOpened(job=KEY, node="n000", session="s", incarnation=1, ranks=(1,), place=place)
    asked = ev.TopologyReported(job=KEY, node="n000", packed=topology.packed)
    announced = ev.SessionAnnounced(job=KEY, node="n001", session="s", coordinator=topology.peers[0])
    for message in (report, opened, asked, announced, report):
        assert sizes.of(message) == len(ev.encode(message))


@pytest.mark.parametrize(("nodes", "seed"), [(1, 1), (3, 2), (4, 103), *([(3, 7), (8, 200)] if LONG else [])])
def test_no_promise_is_broken_by_daemons_that_take_time(nodes, seed):
    assert play(seed, nodes=nodes, seconds=60.0, slower=1.0).told["staged"]
