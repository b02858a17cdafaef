"""What ranks ask of the coordinator while the link to it is broken: it is done once the link is back, and only once."""

import pytest

from ckptd.core import events as ev
from ckptd.shared.protocol.messages import Cadence, Done
from tests.unit.core.nodes.a_cluster import KEY, ONE, THREE, TWO, ACluster

MINUTE_S = 60.0


@pytest.fixture
def job():
    """ONE is durable; the cadence chooses none of those that follow. a coordinates."""
    cluster = ACluster("abc", set_size=3)
    cluster.connect("abc")
    drain_rarely(cluster)
    cluster.stage(ONE)
    cluster.tick(1.0)
    return cluster


def coordinator(job):
    return job.nodes["a"].job.coordinator


def drain_rarely(job):
    """Also after a node has come back, and said how often its ranks want a drain."""
    coordinator(job).sessions.cadence = Cadence(steps=1000)


def state(job, save):
    return str(coordinator(job).facts.records[save].state)


def ask(job, kind, **fields):
    """Rank 1, on b, asks while b is cut off; then the link is back."""
    job.cut_off("b")
    request = job.seq()
    job.say(job.nodes["b"], kind(job=KEY, rank=1, session=job.sid, request=request, **fields))
    job.settle()
    assert isinstance(job.answer(1, request), Done)
    job.heal("b")
    job.tick(1.0)


def reconnect(job):
    job.cut_off("b")
    job.heal("b")
    job.tick(1.0)


def test_a_checkpoint_that_is_wanted_durable_is_drained_once_the_link_is_back(job):
    job.stage(TWO)
    assert state(job, TWO) == "kept"
    ask(job, ev.DrainAsked)
    assert state(job, TWO) == "durable"
    assert job.milestones(1, TWO)[-1] == "durable"


def test_a_later_checkpoint_is_not_drained_for_a_demand_that_was_met(job):
    job.stage(TWO)
    ask(job, ev.DrainAsked)
    drain_rarely(job)
    job.stage(THREE)
    reconnect(job)
    assert state(job, THREE) == "kept"


def test_a_demand_reaches_a_coordinator_that_was_restarted_meanwhile(job):
    job.stage(TWO)
    job.cut_off("b")
    job.say(job.nodes["b"], ev.DrainAsked(job=KEY, rank=1, session=job.sid, request=job.seq()))
    job.settle()
    job.heal("b")
    job.nodes["a"].restart()
    job.return_ranks("a")
    job.tick(MINUTE_S)
    assert TWO in job.store.committed


def test_a_demand_for_a_save_that_was_skipped_is_one_for_the_newest_that_is_whole(job):
    job.stage(TWO)
    job.stage(THREE, [0, 1])
    job.cut_off("b")
    job.say(job.nodes["b"], ev.DrainAsked(job=KEY, rank=1, session=job.sid, request=job.seq()))
    job.settle()
    skip = ev.SaveSkipped(job=KEY, rank=2, session=job.sid, request=job.seq(), save=THREE, reason="no slot")
    job.say(job.nodes["c"], skip)
    job.settle()
    job.heal("b")
    job.tick(1.0)
    assert TWO in job.store.committed
    assert job.nodes["b"].job.node.demands.durable is None


def test_a_save_that_one_rank_wants_durable_is_though_its_report_was_lost(job):
    job.stage(TWO, [0, 2])
    job.cut_off("b")
    job.stage(TWO, [1], drain=True)
    job.heal("b")
    job.tick(1.0)
    assert coordinator(job).facts.records[TWO].forced
    assert job.store.committed.keys() >= {TWO}


def test_a_skipped_save_ends_once_the_link_is_back(job):
    job.stage(TWO, [0, 2])
    ask(job, ev.SaveSkipped, save=TWO, reason="no slot")
    assert state(job, TWO) == "skipped"
    assert job.milestones(2, TWO)[-1] == "skipped"
    told = len(job.milestones(1, TWO))
    reconnect(job)
    assert len(job.milestones(1, TWO)) == told, "its end is known, and not asked for again"


def test_a_job_is_preempted_once_the_link_is_back(job):
    ask(job, ev.PreemptAsked, why="ckptd drain")
    assert job.nodes["b"].job.node.notice.order is not None


def test_the_next_session_is_not_preempted_for_this_one(job):
    job.cut_off("b")
    job.say(job.nodes["b"], ev.PreemptAsked(job=KEY, why="ckptd drain"))
    job.settle()
    job.end_ranks()
    job.heal("b")
    job.connect("abc")
    reconnect(job)
    assert coordinator(job).preemption.shown(job.sid) is None
