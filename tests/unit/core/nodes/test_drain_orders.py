"""Which orders the coordinator sends while a drain cannot begin."""

from ckptd.core import actions as act
from ckptd.core import events as ev
from tests.unit.core.nodes.a_cluster import ONE, ACluster


def test_a_drain_that_no_node_has_the_order_of_is_not_taken_back_from_all_nodes():
    """A node is lost for long: each try would cost a message to each of the others."""
    cluster, dropped = ACluster("abcd", drain_retry_s=1.0), []
    cluster.connect("abcd")
    cluster.held = {act.Drain, act.Encode}
    cluster.stage(ONE)
    perform = cluster.perform

    def watched(node, action):
        if isinstance(action, act.ToNode) and isinstance(action.message, ev.DrainDropped):
            dropped.append(action.node)
        perform(node, action)

    cluster.perform = watched
    cluster.cut_off("d")
    assert set(dropped) >= {"b", "c"}, "they had it"
    dropped.clear()
    record = cluster.nodes["a"].job.coordinator.facts.records[ONE]
    failures = record.failures
    for _ in range(20):
        cluster.tick(1.0)
    assert record.failures > failures, "it was tried again"
    assert dropped == []
