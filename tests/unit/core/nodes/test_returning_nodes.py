"""Nodes that a drain or an encode lacks return one by one: how soon it is tried again does not depend on how many."""

from ckptd.core import actions as act
from ckptd.core import events as ev
from ckptd.core.coordinator.save_states import On
from tests.unit.core.nodes.a_cluster import KEY, ONE, TWO, ACluster

NAMES = "abcdefgh"


def a_drain_that_lacks_all_nodes_but_one() -> ACluster:
    """ONE is staged and its ranks have ended. Nodes b to h went while they wrote their parts."""
    cluster = ACluster(NAMES)
    cluster.connect(NAMES)
    cluster.held = {act.Drain}
    cluster.stage(ONE)
    cluster.end_ranks()
    for name in NAMES[1:]:
        cluster.cut_off(name)
    return cluster


def failures(cluster: ACluster) -> list[str]:
    """What the coordinator has said of drains."""
    return [note for note in cluster.nodes["a"].notes if note.startswith("drain of")]


def test_a_drain_is_not_tried_while_it_lacks_a_node_that_is_known_to_be_away():
    cluster = a_drain_that_lacks_all_nodes_but_one()
    before = failures(cluster)
    for name in NAMES[1:-1]:
        cluster.heal(name)
    assert failures(cluster) == before
    cluster.heal(NAMES[-1])
    cluster.release()
    assert ONE in cluster.store.committed


def test_a_forced_save_is_not_tried_while_it_lacks_a_node_though_the_newest_lacks_none():
    cluster = ACluster("abcd")
    cluster.connect("abcd")
    cluster.held = {act.Drain}
    cluster.stage(ONE, drain=True)
    cluster.cut_off("d")
    facts = cluster.nodes["a"].job.coordinator.facts
    newest = facts.record_of(TWO, 1, cluster.now)
    facts.put(newest, 0, "a")
    newest.delivered[0], newest.due = 10, True
    facts.move(newest, On.WHOLE_DUE)
    assert facts.newest_staged is newest
    before = failures(cluster)
    for name in "bc":
        cluster.say(cluster.nodes["a"], ev.PeerUp(job=KEY, node=name))
        cluster.settle()
    assert failures(cluster) == before


def test_a_store_that_fails_gets_its_pause_whatever_nodes_come_back():
    cluster = ACluster("abcd")
    cluster.connect("abcd")
    cluster.held = {act.Drain}
    cluster.stage(ONE)
    cluster.fail()
    cluster.held = {act.Drain}
    for _ in range(3):
        cluster.cut_off("d")
        cluster.heal("d")
    assert len(failures(cluster)) == 1
    assert cluster.waiting == []
    cluster.tick(1.0)
    assert cluster.waiting, "it is tried again after the pause"


def test_the_end_of_each_rank_is_no_reason_to_try_again():
    """As after a failure: nodes are gone, the launcher ends the ranks of all others, one after the other."""
    cluster = ACluster(NAMES)
    cluster.connect(NAMES)
    cluster.held = {act.Drain}
    cluster.stage(ONE)
    for name in NAMES[4:]:
        cluster.cut_off(name)
    cluster.end_ranks()
    assert len(failures(cluster)) == 1


def test_nodes_that_cannot_encode_at_one_time_are_one_failure():
    """Else the pause of a large job would be the longest at once: each member of a set that lacks a node says so."""
    cluster = ACluster(NAMES, set_size=2)
    cluster.connect(NAMES)
    cluster.failing = set(NAMES)
    cluster.stage(ONE)
    assert [note for note in cluster.nodes["a"].notes if "not protected yet" in note] == [
        "step 10 (incarnation 1) is not protected yet: a: it fails"
    ]
    assert cluster.nodes["a"].job.coordinator.parity.problems == dict.fromkeys(NAMES, "it fails")  # status has all
    cluster.failing.clear()
    cluster.tick(2)
    assert cluster.nodes["a"].job.coordinator.parity.newest is not None
