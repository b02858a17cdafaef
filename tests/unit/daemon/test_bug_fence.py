"""A bug in one step of the daemon's loop is told, and costs no other step."""

from ckptd.daemon.bug_fence import BugFence


def test_steps_after_a_bug_are_taken_and_it_is_reported():
    fence, told, taken = BugFence(), list[str](), list[int]()
    fence.each((lambda: 1 / 0, lambda: taken.append(1)), told.append)
    assert (taken, fence.bugs) == ([1], 1)
    assert "ZeroDivisionError" in told[0]


def test_who_cannot_be_reached_costs_no_step_either():
    fence, taken = BugFence(), list[int]()
    fence.each((lambda: 1 / 0, lambda: taken.append(1)), lambda _: 1 / 0)
    assert (taken, fence.bugs) == ([1], 1)
