"""The commit of a coordinator that is lost: nodes outside of its set make it later, and not once it has a successor."""

import pytest

from ckptd.core import actions as act
from tests.unit.core.nodes.a_cluster import ONE, ACluster

LONG_S = 60.0


@pytest.fixture
def waits():
    """Every node has voted; the coordinator, a, and c of its set are lost before the commit. b and d are the rest."""
    cluster = ACluster("abcd", set_size=2, outside_wait_s=0.5)
    cluster.connect("abcd")
    cluster.held = {act.Commit}
    cluster.stage(ONE)
    for name in "ca":
        cluster.lose(name)
    cluster.waiting.clear()
    assert cluster.nodes["b"].job.node.drain.voted == ONE
    return cluster


def commits(cluster):
    return [(node.name, action.session) for node, action in cluster.waiting if isinstance(action, act.Commit)]


def test_a_node_that_is_to_commit_later_leaves_it_to_a_new_coordinator(waits):
    waits.tick(0.0)
    waits.end_ranks()
    waits.connect("db")
    waits.tick(1.0)
    assert waits.nodes["b"].job.node.coordinator == "d"
    waits.tick(LONG_S)
    assert {name for name, _ in commits(waits)} <= {"d"}
