"""A node asks for the topology of its session, and again when no answer comes."""

import pytest

from ckptd.core import actions as act
from ckptd.core import events as ev
from ckptd.core.node.known_topologies import PATIENCE_S
from tests.unit.core.nodes.a_cluster import ONE, ACluster


@pytest.fixture
def lossy():
    """Answers to c's question are lost; its set is a and c."""
    cluster = ACluster("abcd", set_size=2)
    perform, cluster.asked = cluster.perform, []

    def losing(node, action):
        message = action.message if isinstance(action, act.ToNode) else None
        if isinstance(message, ev.TopologyAsked):
            cluster.asked.append((node.name, action.node))
        if not (cluster.loses and isinstance(message, ev.TopologyReported) and action.node == cluster.loses):
            perform(node, action)

    cluster.perform, cluster.loses = losing, ""
    return cluster


@pytest.mark.parametrize("loses", ["c", "d"])
def test_a_topology_that_did_not_come_is_asked_for_again_of_the_coordinator(lossy, loses):
    lossy.loses = loses
    lossy.connect("abcd")
    lost = lossy.nodes[loses]
    assert lost.job.node.membership.topology is None
    lossy.tick(0.0)
    lossy.tick(PATIENCE_S)
    assert lost.catalogue.next_deadline() > lossy.now, "the loop would spin"
    lossy.loses, lossy.asked[:] = "", []
    lossy.tick(PATIENCE_S / 2)
    assert lossy.asked == []
    lossy.tick(PATIENCE_S / 2)
    assert lossy.asked == [(loses, "a")]
    assert lost.job.node.membership.topology == lossy.nodes["a"].job.node.membership.topology
    lossy.tick(10 * PATIENCE_S)
    assert lossy.asked == [(loses, "a")]


def test_a_node_without_a_topology_still_saves(lossy):
    lossy.loses = "d"
    lossy.connect("abcd")
    lossy.stage(ONE)
    assert lossy.store.committed


def test_a_coordinator_that_restarts_still_has_the_nodes_that_the_job_ran_on_before():
    """It asked itself for them, and had given them up."""
    cluster = ACluster("abcd")
    cluster.connect("abcd")
    cluster.stage(ONE)
    cluster.end_ranks()
    cluster.connect("ab")
    known = cluster.nodes["a"].job.node.membership.topologies
    before = [peer.node for peer in known.outside]
    assert before == ["c", "d"]
    cluster.nodes["a"].restart()
    cluster.return_ranks("a")
    known = cluster.nodes["a"].job.node.membership.topologies
    assert ([peer.node for peer in known.outside], known.next_deadline()) == (before, None)
