"""Who has said what it has: asking again ends no doubt about those that are silent."""

from ckptd.core.coordinator.inventory_barrier import InventoryBarrier
from ckptd.core.policy import Policy

ALL = {"a", "b", "c"}


def settles(call: InventoryBarrier) -> bool:
    call.settle()
    return not call.doubts


def a_call() -> InventoryBarrier:
    call = InventoryBarrier(Policy())
    call.begin(ALL, ALL, "s", 0.0)
    call.spoke("a", "s", ())
    call.spoke("b", "s", ())
    assert not settles(call)
    return call


def test_who_was_silent_before_all_are_asked_again_is_doubted_still():
    call = a_call()
    call.begin(ALL, ALL, "s", 1.0, repeat=True)
    call.spoke("a", "s", ())
    call.spoke("b", "s", ())
    assert not settles(call)
    call.spoke("c", "s", ())
    assert settles(call)


def test_a_silent_node_outside_of_the_session_is_doubted_when_all_are_asked_again():
    call = a_call()
    call.spoke("c", "s", ("d",))
    call.begin(ALL, ALL, "s", 1.0, repeat=True)
    for node in sorted(ALL):
        call.spoke(node, "s", ())
    assert not settles(call)
    assert not call.overdue
    call.tick(1.0 + Policy().stage_timeout_s)
    assert call.overdue


def test_loads_wait_only_for_those_that_can_answer_when_all_are_asked_again():
    call = a_call()
    call.went("c")
    call.begin(ALL, ALL, "s", 1.0, repeat=True)
    assert not call.complete
    call.spoke("a", "s", ())
    call.spoke("b", "s", ())
    assert call.complete


def test_who_spoke_and_is_not_asked_again_is_not_doubted():
    call = a_call()
    call.spoke("c", "s", ("d",))
    call.spoke("d", "s", ())
    call.begin(ALL, ALL, "s", 1.0, repeat=True)
    for node in sorted(ALL):
        call.spoke(node, "s", ("d",))
    assert settles(call)
