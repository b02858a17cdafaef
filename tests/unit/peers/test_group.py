"""Which report of a group is the last that the others wait for."""

from ckptd.core import events as ev
from ckptd.peers.group import SIGN, Group, waits_of
from ckptd.shared.base.ids import SaveId
from tests.runs import RUN
from tests.unit.peers.planes import JOB

TIMEOUT_S = 10.0
ONE, TWO = SaveId(1, 1, 10, RUN), SaveId(1, 2, 20, RUN)


def a_group(*nodes):
    group = Group(TIMEOUT_S)
    for node in nodes:
        group.passes(node, SIGN, 0.0)
    return group


def report(node, save=ONE, kind=ev.VoteWritten, **more):
    return ev.Report(job=JOB, node=node, event=kind(job=JOB, save=save, **more))


def test_the_same_report_has_the_same_number_at_all_nodes_and_no_other():
    staged = ev.SegmentsStaged(job=JOB, save=ONE, world_size=2, segments=(ev.StagedSegment(0, 10),))
    other = ev.SegmentsStaged(job=JOB, save=ONE, world_size=2, segments=(ev.StagedSegment(1, 20),), drain=True)
    numbers = {waits_of(ev.Report(job=JOB, node=node, event=fact)) for node, fact in (("a", staged), ("b", other))}
    assert len(numbers) == 1
    numbers |= {waits_of(report("a")), waits_of(report("a", TWO)), waits_of(report("a", kind=ev.Drained))}
    assert len(numbers) == 4
    assert all(SIGN < number < 1 << 33 for number in numbers)


def test_what_is_no_progress_and_what_failed_waits_for_no_other():
    order = ev.SaveStaged(job=JOB, node="a", save=ONE)
    gone = ev.Report(job=JOB, node="a", event=ev.RanksGone(job=JOB, session="s", ranks=(1,)))
    assert [waits_of(one) for one in (order, gone, report("a", problem="EIO"))] == [0, 0, 0]


def test_the_last_of_the_group_lets_all_go_though_others_went_before():
    group = a_group("a", "b", "c")
    assert [group.passes(node, 7, 1.0) for node in "ab"] == [False, False]
    assert not group.passes("c", 0, 1.0)
    assert not group.passes("a", 7, 1.1)
    assert group.passes("c", 7, 1.2)
    assert not group.passes("a", 7, 1.3)


def test_each_report_is_counted_for_itself():
    group = a_group("a", "b")
    assert [group.passes(*one, 1.0) for one in (("a", 7), ("a", 8), ("b", 8), ("b", 7))] == [False, False, True, True]


def test_a_node_that_goes_another_way_is_not_waited_for():
    group = a_group("a", "b", "c")
    for node in "bc":
        group.passes(node, SIGN, TIMEOUT_S / 2)
    assert not group.passes("b", 7, TIMEOUT_S / 2)
    assert group.passes("c", 7, TIMEOUT_S / 2)


def test_a_node_that_reports_nothing_is_not_waited_for_any_more_until_it_reports():
    group = a_group("a", "b", "visitor")
    passed = []
    for number in range(10, 20):
        group.passes("visitor", SIGN, 1.0)
        passed.append([group.passes(node, number, 1.0) for node in "ab"])
    assert passed == [[False, False]] * 4 + [[False, True]] * 6
    group.passes("visitor", 20, 1.0)
    assert [group.passes(node, 21, 1.0) for node in ("a", "b", "visitor")] == [False, False, True]


def test_a_node_that_leaves_out_some_reports_is_waited_for():
    group = a_group("a", "b")
    for number in range(10, 50, 4):
        assert not any(group.passes("a", number + more, 1.0) for more in range(4))
        assert group.passes("b", number + 3, 1.0)


def test_a_pause_between_two_saves_changes_nothing():
    group = a_group("a", "b")
    assert [group.passes(node, 7, 1.0) for node in "ab"] == [False, True]
    for node in "ab":
        group.passes(node, SIGN, 10_000.0)
    assert [group.passes(node, 8, 10_000.0) for node in "ab"] == [False, True]


def test_reports_that_never_become_those_of_all_are_forgotten():
    group = a_group("a", "b")
    for number in range(2, 1000):
        assert not group.passes("a", number, 1.0)
        assert not group.passes("b", number + 1000, 1.0)
    assert len(group._reported) <= 16
    assert group.passes("b", 999, 1.0)
    assert not group.passes("b", 2, 1.0)
