"""A job that closes owes its newest checkpoint to the store, also where only parity still has all of it."""

import pytest

from ckptd.core import actions as act
from ckptd.core import events as ev
from ckptd.shared.base.errors import CkptdError
from ckptd.shared.base.ids import SaveId
from tests.runs import RUN, STORE_ID
from tests.unit.core.nodes.a_cluster import (
    KEY,
    ONE,
    TWO,
    ACluster,
    a_protected_job,
    close,
    nothing_is_left,
    saves_at,
)

DAY = 86400


def a_job_with_a_lost_node(lost: str = "b") -> ACluster:
    """TWO is protected, and not drained; a session runs, with new machines in place of the lost ones."""
    cluster = ACluster("abcd")
    cluster.connect("abcd")
    cluster.stage(ONE)
    assert ONE in cluster.store.committed
    cluster.held = {act.Drain}
    cluster.stage(TWO)
    assert "protected" in cluster.milestones(0, TWO)
    cluster.end_ranks()
    for name in lost:
        cluster.lose(name)
        cluster.add(name)
    cluster.fail()
    cluster.connect("abcd")
    return cluster


def is_drained_at_last(cluster: ACluster) -> None:
    """What the job owed is on the store, and its memory is given back."""
    cluster.tick(60)
    cluster.tick(60)
    assert TWO in cluster.store.committed
    nothing_is_left(cluster)


def test_what_was_protected_is_rebuilt_and_drained_before_its_memory_is_given_back():
    cluster = a_job_with_a_lost_node()
    close(cluster)
    cluster.tick(60)
    assert TWO in cluster.store.committed
    nothing_is_left(cluster)


def test_what_was_protected_is_drained_at_the_end_of_a_job_that_went_on_from_something_older():
    cluster = a_job_with_a_lost_node()
    assert {answer.save for answer in cluster.load(step=ONE.step)} == {ONE}
    close(cluster)
    cluster.tick(60)
    assert TWO in cluster.store.committed
    nothing_is_left(cluster)


def test_what_a_newer_durable_checkpoint_replaced_is_not_rebuilt():
    cluster = a_job_with_a_lost_node()
    answers = cluster.load(step=ONE.step)
    newer = SaveId(answers[0].incarnation, 1, 20, RUN)
    cluster.stage(newer)
    cluster.tick(60)
    assert newer in cluster.store.committed
    cluster.held = {act.FetchSegment}
    close(cluster)
    assert not cluster.waiting
    assert TWO not in cluster.store.committed
    nothing_is_left(cluster)


def test_a_node_that_is_lost_while_the_job_closes_does_not_take_the_checkpoint_with_it():
    cluster = a_protected_job()
    close(cluster)
    cluster.lose("b")
    cluster.fail()
    cluster.tick(60)
    cluster.tick(60)
    assert ONE in cluster.store.committed
    nothing_is_left(cluster)


@pytest.mark.parametrize("lost", ["order", "answer"])
def test_a_rebuild_that_fails_at_the_end_of_a_job_is_tried_again(lost):
    cluster = a_job_with_a_lost_node()
    cluster.held = {act.FetchSegment}
    close(cluster)
    cluster.tick(5)
    (node, fetch), cluster.held, cluster.waiting = cluster.waiting[0], set(), []
    if lost == "answer":
        fetched = ev.SegmentFetched(job=KEY, rank=fetch.rank, save=fetch.save, tier=fetch.tier, problem="EIO")
        cluster.say(node, fetched)
        cluster.settle()
    else:
        node.restart()
    assert TWO not in cluster.store.committed
    is_drained_at_last(cluster)


def test_a_node_that_is_away_with_a_part_of_the_parity_delays_the_end():
    cluster = a_job_with_a_lost_node()
    close(cluster)
    cluster.cut_off("d")
    cluster.tick(600)
    assert TWO in saves_at(cluster, "a")
    assert any(
        "waits in parity" in note and "nodes that do not answer" in note and "d" in note
        for note in cluster.nodes["a"].notes
    )
    cluster.heal("d")
    is_drained_at_last(cluster)


def test_what_is_given_up_at_last_is_said():
    cluster = a_job_with_a_lost_node()
    close(cluster)
    cluster.lose("d")
    cluster.tick(DAY + 60)
    cluster.tick(60)
    assert any("is given up, which was never drained" in note for note in cluster.nodes["a"].notes)
    nothing_is_left(cluster)


@pytest.mark.parametrize("named", [{"step": ONE.step}, {"run": RUN}], ids=["step", "run"])
def test_a_load_by_name_gives_up_nothing_that_a_node_that_is_away_makes_whole(named):
    """That something newer is lost shows only where the newest was looked for. The coordinator has restarted since."""
    cluster = ACluster("abcd")
    cluster.connect("abcd")
    cluster.stage(ONE)
    cluster.end_ranks()
    cluster.store.run = bytes(reversed(RUN))
    cluster.connect("abcd")
    cluster.held = {act.Drain}
    newer = SaveId(2, 1, 20, cluster.store.run)
    cluster.stage(newer)
    assert "protected" in cluster.milestones(0, newer)
    cluster.end_ranks()
    cluster.lose("b")
    cluster.add("b")
    cluster.fail()
    cluster.nodes["a"].restart()
    cluster.connect("abca")
    cluster.cut_off("d")
    assert {answer.save for answer in cluster.load(**named)} == {ONE}
    cluster.heal("d")
    close(cluster)
    cluster.tick(60)
    cluster.tick(60)
    assert newer in cluster.store.committed
    nothing_is_left(cluster)


def test_what_parity_alone_has_is_not_forgotten_without_force():
    cluster = a_job_with_a_lost_node()
    cluster.load(step=ONE.step)
    cluster.end_ranks()
    durable = ev.StoreScanned(job=KEY, store_id=STORE_ID, committed=(ev.OnStore(ONE, 4, 40, ONE.dirname),))
    with pytest.raises(CkptdError, match=r"step 20 .* is in memory only and not durable"):
        cluster.nodes["a"].catalogue.forget(KEY, force=False, seen=durable)
    assert cluster.nodes["a"].catalogue.forget(KEY, force=True, seen=durable)


def test_what_nothing_can_rebuild_is_forgotten():
    cluster = a_job_with_a_lost_node("bc")
    cluster.load(step=ONE.step)
    cluster.end_ranks()
    durable = ev.StoreScanned(job=KEY, store_id=STORE_ID, committed=(ev.OnStore(ONE, 4, 40, ONE.dirname),))
    assert cluster.nodes["a"].catalogue.forget(KEY, force=False, seen=durable)


def test_what_nothing_can_rebuild_delays_no_end():
    cluster = a_job_with_a_lost_node("bc")
    close(cluster)
    cluster.tick(60)
    assert TWO not in cluster.store.committed
    nothing_is_left(cluster)


def test_the_memory_is_given_back_at_last_though_the_rebuild_never_ends():
    cluster = a_job_with_a_lost_node()
    cluster.held = {act.FetchSegment}
    close(cluster)
    assert TWO in saves_at(cluster, "a")
    cluster.tick(DAY)
    assert TWO not in saves_at(cluster, "a")
