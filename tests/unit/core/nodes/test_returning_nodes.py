"""Nodes that a drain lacks return one by one: it is tried again when it lacks none, not at each return."""

from ckptd.core import actions as act
from tests.unit.core.nodes.a_cluster import ONE, ACluster

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
