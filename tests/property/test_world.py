"""A death that the property tests seldom come to, step by step."""

import pytest

from ckptd.core import actions as act
from ckptd.shared.protocol.messages import Cadence
from tests.property.world import POLICY, Proc, World


def settled(world: World) -> None:
    while world.todo:
        world.finish(0, well=True)


@pytest.mark.parametrize("capacity", [1, 2])
def test_what_a_daemon_left_that_died_while_it_made_larger_slots_goes_when_the_rank_asks_again(capacity: int):
    world = World()
    proc = Proc("a", 0, 1, Cadence(), takeover=False)
    world.procs.append(proc)
    world.attach(proc)
    settled(world)
    world.ask_slots(proc, 1)
    settled(world)
    world.save(proc, 10, drain=False)
    settled(world)
    world.ask_slots(proc, 2)
    assert any(isinstance(action, act.AllocateSlots) and action.instead for action in world.todo)
    world.crash([True] * len(world.todo))
    world.restart()
    assert len(world.files) == 5
    world.attach(proc)
    settled(world)
    world.ask_slots(proc, capacity)
    settled(world)
    assert len(world.files) == POLICY.slots_per_rank
    assert sum(f.save is None and f.capacity >= capacity for f in world.files.values()) == 2
