"""Reports of what the ranks of a node staged and gave up: one for ranks that do so together, in order."""

from ckptd.core import actions as act
from ckptd.core import events as ev
from ckptd.core.node.delivery import TOGETHER_S
from tests.unit.core.nodes.a_cluster import KEY, ONE, TWO, ACluster

FACTS = ev.SegmentsStaged | ev.SegmentsReleased | ev.RanksGone


def a_job():
    """Four ranks on each of two nodes, whose coordinator is a; and the reports of b from here on."""
    job = ACluster("ab", set_size=2)
    job.connect("aaaabbbb")
    seen, perform = [], job.perform

    def watched(node, action):
        if isinstance(action, act.ToNode) and isinstance(action.message, ev.Report) and node.name == "b":
            seen.append(action.message.event)
        perform(node, action)

    job.perform = watched
    return job, seen


def facts(seen):
    return [event for event in seen if isinstance(event, FACTS)]


def ranks_of(fact):
    return tuple(segment.rank for segment in fact.segments)


def staged(job, save=ONE):
    return job.nodes["a"].job.coordinator.facts.records[save].delivered.keys()


def test_ranks_that_stage_together_are_one_report_and_so_are_their_slots_when_they_are_free():
    job, seen = a_job()
    for save in (ONE, TWO):
        job.stage(save)
    first = facts(seen)[0]
    assert ranks_of(first) == (4, 5, 6, 7)
    assert len([fact for fact in facts(seen) if isinstance(fact, ev.SegmentsStaged)]) == 2
    released = [fact for fact in facts(seen) if isinstance(fact, ev.SegmentsReleased)]
    assert [(fact.save, sorted(fact.ranks)) for fact in released] == [(ONE, [4, 5, 6, 7])]


def test_what_some_ranks_staged_is_reported_before_the_others_have():
    job, seen = a_job()
    job.stage(ONE, [4, 5])
    assert facts(seen) == []
    job.tick(TOGETHER_S)
    assert [ranks_of(fact) for fact in facts(seen)] == [(4, 5)]
    assert staged(job) == {4, 5}
    job.stage(ONE, [0, 1, 2, 3, 6, 7])
    assert [ranks_of(fact) for fact in facts(seen)] == [(4, 5), (6, 7)]
    assert staged(job) == set(range(8))


def test_that_a_rank_staged_is_known_before_it_is_known_to_have_ended():
    job, seen = a_job()
    job.stage(ONE, [0, 1, 2, 3, 4])
    job.say(job.nodes["b"], ev.RankGone(job=KEY, rank=4, session=job.sid))
    job.settle()
    job.tick(TOGETHER_S)
    assert [type(fact) for fact in facts(seen)] == [ev.SegmentsStaged, ev.RanksGone]
    job.stage(ONE, [5, 6, 7])
    assert job.nodes["a"].job.coordinator.facts.records[ONE].staged


def test_a_coordinator_learns_at_once_what_its_own_ranks_staged():
    job, _ = a_job()
    job.stage(ONE, [2])
    assert staged(job) == {2}


def test_ranks_that_end_together_are_one_report():
    job, seen = a_job()
    coordinator = job.nodes["a"].job.coordinator
    job.end_ranks()
    assert [(fact.session, sorted(fact.ranks)) for fact in facts(seen)] == [(job.sid, [4, 5, 6, 7])]
    assert set(coordinator.sessions.departed) == set(range(8))


def test_a_rank_that_ends_alone_is_reported_soon():
    job, seen = a_job()
    job.say(job.nodes["b"], ev.RankGone(job=KEY, rank=5, session=job.sid))
    job.settle()
    assert facts(seen) == []
    job.tick(TOGETHER_S)
    assert [fact.ranks for fact in facts(seen)] == [(5,)]


def test_all_nodes_that_know_a_rank_learn_that_it_ended():
    """The next session, on another coordinator, waits for it."""
    cluster = ACluster("abc")
    cluster.connect("abc")
    before = cluster.sid
    for rank in (0, 1):
        cluster.say(cluster.node(rank), ev.RankGone(job=KEY, rank=rank, session=before))
    cluster.settle()
    cluster.connect("bac", expect=False)
    sessions = cluster.nodes["b"].job.coordinator.sessions
    assert sessions.session != cluster.sid
    cluster.say(cluster.nodes["c"], ev.RankGone(job=KEY, rank=2, session=before))
    cluster.settle()
    cluster.tick(TOGETHER_S)
    assert sessions.session == cluster.sid
