"""Nodes that the job has left or lost, and the end of a job: who still gives what it has, and when it is given back."""

import pytest

from ckptd.core import actions as act
from ckptd.core import events as ev
from ckptd.shared.base.ids import SaveId
from ckptd.shared.protocol.messages import Tier
from tests.runs import RUN
from tests.seals import a_seal
from tests.unit.core.nodes.a_cluster import (
    KEY,
    ONE,
    TWO,
    ACluster,
    a_protected_job,
    close,
    nothing_is_left,
    refused,
)

HOUR = 3600


def test_a_node_that_the_job_leaves_still_gives_its_segments():
    cluster = a_protected_job("aabbccdd")
    cluster.end_ranks()
    cluster.connect("aabbccab")
    cluster.tick(5)
    assert [a.save for a in cluster.load()] == [ONE] * 8
    assert [cluster.tiers[r] for r in (6, 7)] == [Tier.PEER] * 2


def test_after_close_nothing_is_left_anywhere():
    cluster = ACluster()
    cluster.connect("aabbccdd")
    cluster.stage(ONE)
    close(cluster)
    nothing_is_left(cluster)


def test_a_node_that_was_lost_for_good_does_not_delay_the_end_of_a_job_that_has_gone_on():
    cluster = a_protected_job()
    cluster.fail()
    cluster.end_ranks()
    cluster.lose("b")
    cluster.add("x")
    cluster.connect("axcd")
    answers = cluster.load()
    cluster.stage(SaveId(answers[0].incarnation, 1, 20, RUN))
    close(cluster)
    nothing_is_left(cluster)


def test_a_silent_node_of_the_session_delays_its_end_though_something_older_is_durable():
    cluster = ACluster()
    cluster.connect("ab")
    cluster.stage(ONE)
    cluster.held = {act.Drain}
    cluster.stage(TWO)
    assert list(cluster.store.committed) == [ONE]
    cluster.cut_off("b")
    cluster.nodes["a"].restart()
    cluster.return_ranks("a")
    close(cluster)
    assert cluster.has("a", TWO, 0)
    cluster.waiting = [(node, action) for node, action in cluster.waiting if node.name == "b"]
    cluster.release()
    cluster.heal("b")
    cluster.tick(60)
    assert TWO in cluster.store.committed
    nothing_is_left(cluster)


def test_a_node_that_the_job_left_keeps_its_piece_while_nothing_newer_is_protected():
    cluster = ACluster()
    cluster.connect("abcd")
    cluster.stage(ONE)
    cluster.end_ranks()
    cluster.connect("abca")
    cluster.tick(5)
    cluster.held = {act.Encode}
    answers = cluster.load()
    newer = SaveId(answers[0].incarnation, 1, 20, RUN)
    cluster.stage(newer)
    assert newer in cluster.store.committed
    assert (ONE, 1) in cluster.nodes["d"].chunks


def test_what_arrives_for_a_job_that_is_gone_is_given_back():
    cluster = ACluster("a")
    seal = a_seal(KEY, ONE, 0, 1)
    fetched = ev.SegmentFetched(
        job=KEY, rank=0, save=ONE, tier=Tier.PEER, slot="r00000-000001.slot", capacity=99, seal=seal
    )
    catalogue = cluster.nodes["a"].catalogue
    assert act.UnlinkSlot(job=KEY, slot="r00000-000001.slot") in catalogue.handle(fetched, 0.0)
    assert act.DropChunk(job=KEY, save=ONE, epoch=1) in catalogue.handle(ev.Encoded(job=KEY, save=ONE, epoch=1), 0.0)
    assert not catalogue.jobs


def test_a_node_that_the_job_leaves_is_empty_once_a_newer_checkpoint_is_protected():
    cluster = a_protected_job("aabbccdd")
    cluster.end_ranks()
    cluster.connect("aabbccab")
    cluster.tick(5)
    cluster.load()
    assert cluster.nodes["d"].slots
    cluster.release()
    newer = SaveId(cluster.store.numbers, 1, 20, RUN)
    cluster.stage(newer)
    assert "protected" in cluster.milestones(0, newer)
    assert not cluster.nodes["d"].slots
    assert not cluster.nodes["d"].chunks
    assert not cluster.nodes["d"].catalogue.jobs


def test_a_node_that_the_job_left_two_sessions_ago_is_still_notified():
    cluster = a_protected_job("aabbccdd")
    for homes in ("aabbccab", "aabbccab"):
        cluster.end_ranks()
        cluster.connect(homes)
        cluster.tick(5)
        cluster.load()
    assert cluster.nodes["d"].slots
    cluster.release()
    cluster.stage(SaveId(cluster.store.numbers, 1, 20, RUN))
    assert not cluster.nodes["d"].catalogue.jobs


def test_a_node_that_no_coordinator_speaks_to_gives_its_memory_back_after_a_while():
    cluster = a_protected_job()
    cluster.cut_off("d")
    cluster.say(cluster.nodes["d"], ev.RankGone(job=KEY, rank=3, session=cluster.sid))
    cluster.settle()
    cluster.tick(0)
    assert cluster.nodes["d"].catalogue.next_deadline() == cluster.now + cluster.policy.orphan_ttl_s
    cluster.tick(cluster.policy.orphan_ttl_s - 1)
    assert cluster.nodes["d"].slots
    cluster.tick(1)
    assert not cluster.nodes["d"].slots
    assert not cluster.nodes["d"].chunks
    assert not cluster.nodes["d"].catalogue.jobs


def test_a_node_to_which_a_rank_came_has_all_of_its_time_again():
    cluster = a_protected_job()
    cluster.cut_off("d")
    node, ttl = cluster.nodes["d"], cluster.policy.orphan_ttl_s
    gone = ev.RankGone(job=KEY, rank=3, session=cluster.sid)
    found = ev.RankFound(job=KEY, rank=3, session=cluster.sid, pid=1, host="h")
    cluster.say(node, gone)
    cluster.settle()
    cluster.tick(0)
    cluster.tick(ttl - 1)
    cluster.say(node, found)
    cluster.settle()
    cluster.tick(10)
    cluster.say(node, gone)
    cluster.settle()
    cluster.tick(0)
    assert node.slots
    assert node.catalogue.next_deadline() == cluster.now + ttl


def test_a_new_node_meets_one_that_the_job_leaves_and_gets_its_segment():
    cluster = a_protected_job()
    cluster.end_ranks()
    cluster.lose("b")
    cluster.add("x")
    cluster.connect("axc")
    cluster.tick(5)
    answers = cluster.load()
    assert not refused(answers)
    assert [a.save for a in answers] == [ONE] * 3
    assert "d" in cluster.nodes["x"].met


def test_what_was_fetched_to_a_new_arena_does_not_make_it_look_old():
    cluster = ACluster()
    cluster.connect("abcd")
    cluster.stage(ONE)
    cluster.held = {act.Encode}
    cluster.stage(TWO)
    assert TWO in cluster.store.committed
    cluster.end_ranks()
    cluster.lose("d")
    cluster.add("d")
    cluster.connect("aada")
    cluster.load()
    cluster.end_ranks()
    cluster.connect("dabc")
    assert all((ONE, 1) in cluster.nodes[name].chunks for name in "abc")


def test_a_silent_node_of_a_job_that_closes_may_have_what_is_newer():
    cluster = ACluster("ab")
    cluster.connect("ab")
    cluster.stage(ONE)
    cluster.held = {act.Drain}
    cluster.stage(TWO)
    cluster.cut_off("b")
    left = ev.RankDetached(job=KEY, rank=0, session=cluster.sid, request=cluster.seq())
    cluster.say(cluster.nodes["a"], left)
    cluster.settle()
    assert cluster.has("a", TWO, 0)


@pytest.mark.parametrize("closes", [True, False])
def test_ranks_of_a_lost_node_keep_no_memory(closes):
    cluster = ACluster("abcd")
    cluster.connect("abcd")
    cluster.stage(ONE)
    cluster.lose("b")
    for rank, name in enumerate("abcd"):
        if name in cluster.nodes:
            words = {"job": KEY, "rank": rank, "session": cluster.sid}
            event = ev.RankDetached(request=cluster.seq(), **words) if closes else ev.RankGone(**words)
            cluster.say(cluster.nodes[name], event)
    cluster.settle()
    for _ in range(60):
        cluster.tick(HOUR)
    assert not any(node.slots or node.chunks for node in cluster.nodes.values())
    assert all(node.catalogue.empty for node in cluster.nodes.values())
