"""Reports that arrive together are one event of the coordinator: all facts count, what follows is asked for once."""

import pytest

from ckptd.core import actions as act
from ckptd.core import events as ev
from ckptd.shared.base.ids import JobKey
from tests.unit.core.nodes.a_cluster import KEY, ONE, TWO, ACluster

OTHER = JobKey("/store", "other")


def report(node, fact):
    return ev.Report(job=fact.job, node=node, event=fact)


def encoded(job=KEY, save=ONE, problem=""):
    return ev.Encoded(job=job, save=save, epoch=1, problem=problem)


def a_job(placement="aabbccdd"):
    job = ACluster("abcd", set_size=2)
    job.connect(placement)
    return job


def reports_of(job, kind):
    """What nodes report of this kind is kept back from here on."""
    kept, perform = [], job.perform

    def watched(node, action):
        message = action.message if isinstance(action, act.ToNode) else None
        if isinstance(message, ev.Report) and isinstance(message.event, kind) and node.name != "a":
            kept.append(message)
        else:
            perform(node, action)

    job.perform = watched
    return kept


def together(job, reports):
    """Delivers them, and returns in how many turns the coordinator took them."""
    coordinator, asked = job.nodes["a"].job.coordinator, []
    handle = coordinator.handle

    def handled(event, now):
        asked.append(isinstance(event, ev.Reports) or event in reports)
        return handle(event, now)

    coordinator.handle = handled
    for event in ev.together(reports):
        job.say(job.nodes["a"], event)
    job.settle()
    del coordinator.handle
    return sum(asked)


def test_only_reports_of_how_far_saves_are_in_a_row_and_of_one_job_are_one_event():
    progress = [report(node, encoded()) for node in "bcd"]
    gone = report("b", ev.RanksGone(job=KEY, session="s", ranks=(1,)))
    other = [report(node, encoded(job=OTHER)) for node in "bc"]
    up = ev.PeerUp(job=KEY, node="e")
    events = [progress[0], gone, progress[1], progress[2], *other, up, progress[0]]
    found = ev.together(events)
    assert [type(event) for event in found] == [ev.Report, ev.Report, ev.Reports, ev.Reports, ev.PeerUp, ev.Report]
    assert [one for event in found for one in getattr(event, "reports", (event,))] == events
    assert [event.job for event in found[2:4]] == [KEY, OTHER]


def test_a_save_is_staged_once_with_the_last_of_many_reports():
    job = a_job()
    kept = reports_of(job, ev.SegmentsStaged)
    job.stage(ONE)
    assert sorted(one.node for one in kept) == ["b", "c", "d"]
    assert not job.nodes["a"].job.coordinator.facts.records[ONE].staged
    assert together(job, kept) == 1
    assert job.nodes["a"].job.coordinator.facts.records[ONE].staged
    assert all("staged" in job.milestones(rank, ONE) for rank in range(8))


@pytest.mark.parametrize("kind", [ev.Encoded, ev.VoteWritten, ev.SegmentsReleased])
def test_what_many_nodes_say_at_once_has_the_outcome_of_one_after_the_other(kind):
    outcomes = []
    for at_once in (False, True):
        job = a_job()
        kept = reports_of(job, kind)
        job.stage(ONE)
        job.stage(TWO)
        while kept:
            some = [kept.pop(0) for _ in range(len(kept))]
            for reports in [some] if at_once else [[one] for one in some]:
                assert together(job, reports) == 1
        records = job.nodes["a"].job.coordinator.facts.records
        outcomes.append({save: (r.state, r.protected, r.held, r.voters) for save, r in records.items()})
    assert outcomes[0] == outcomes[1]


def test_a_report_of_a_session_that_is_over_counts_for_nothing_among_others():
    job = a_job()
    kept = reports_of(job, ev.SegmentsStaged)
    job.stage(ONE)
    stale = [report(one.node, ev.SegmentsStaged(job=KEY, session="before", save=TWO, world_size=8, segments=()))
             for one in kept]  # fmt: skip
    together(job, [stale[0], *kept, *stale[1:]])
    records = job.nodes["a"].job.coordinator.facts.records
    assert records[ONE].staged
    assert set(records) == {ONE}
