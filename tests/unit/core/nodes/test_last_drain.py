"""What a daemon that ends still waits for, as the coordinator of a job and as another of its nodes."""

from ckptd.core import actions as act
from ckptd.core import events as ev
from ckptd.core.last_drain import LastDrain
from ckptd.shared.protocol.messages import Cadence
from tests.unit.core.nodes.a_cluster import KEY, ONE, THREE, TWO, ACluster

SELDOM = Cadence(1_000_000, 0)


def a_job_that_drains_seldom(homes="aabb"):
    cluster = ACluster("ab")
    cluster.connect(homes)
    for node in cluster.nodes.values():
        node.job.coordinator.sessions.cadence = SELDOM
    cluster.stage(ONE)
    assert list(cluster.store.committed) == [ONE]
    cluster.held = {act.Drain}
    cluster.stage(TWO)
    return cluster


def ask(cluster, name):
    cluster.say(cluster.nodes[name], ev.DrainAsked(job=KEY))
    cluster.settle()
    return LastDrain(cluster.nodes[name].job.coordinator, cluster.nodes[name].job.node)


def test_both_wait_for_what_is_asked_for_and_no_longer():
    cluster = a_job_that_drains_seldom()
    drains = [ask(cluster, name) for name in "ba"]
    assert [drain.waits for drain in drains] == [True, True]
    assert [(drain.left.step, drain.left.durable) for drain in drains] == [(TWO.step, str(ONE.step))] * 2
    cluster.release()
    assert TWO in cluster.store.committed
    assert [drain.waits for drain in drains] == [False, False]
    assert [drain.left for drain in drains] == [None, None]


def test_a_follower_waits_before_it_has_received_the_order():
    cluster = a_job_that_drains_seldom()
    job = cluster.nodes["b"].job
    drain = LastDrain(job.coordinator, job.node)
    assert job.node.drain.save is None
    assert drain.waits


def test_a_follower_does_not_wait_for_a_coordinator_that_does_not_answer():
    cluster = a_job_that_drains_seldom()
    drain = ask(cluster, "b")
    cluster.lose("a")
    cluster.fail()
    assert not drain.waits
    assert "node a does not answer" in drain.left.why


def test_what_is_durable_is_not_known_before_the_store_has_answered():
    cluster = a_job_that_drains_seldom()
    job = cluster.nodes["a"].job
    job.coordinator.facts.ready = False
    job.coordinator.facts.on_store.clear()
    left = LastDrain(job.coordinator, job.node).left
    assert (left.step, left.durable, left.why) == (TWO.step, "not known here", "the store has not answered")


def test_what_is_staged_later_holds_none_up():
    cluster = a_job_that_drains_seldom()
    drain = ask(cluster, "a")
    cluster.stage(THREE)
    assert drain.left.step == THREE.step, "what is named is the newest, not what was when it was asked to end"
    cluster.release()
    assert not drain.waits
    left = drain.left
    assert left is None or (left.step, "after" in left.why) == (THREE.step, True)


def test_a_job_that_staged_nothing_is_left_at_once():
    cluster = ACluster("ab")
    cluster.connect("aabb")
    for name in "ab":
        drain = ask(cluster, name)
        assert not drain.waits
        assert drain.left is None


def test_a_save_that_can_never_be_drained_is_not_waited_for():
    cluster = a_job_that_drains_seldom()
    drain = ask(cluster, "a")
    cluster.nodes["a"].job.coordinator.saves.superseded_by(9)
    cluster.fail()
    assert not drain.waits
    assert drain.left is not None
