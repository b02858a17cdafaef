"""Ranks for which another node allocates memory: its daemon reports them, through cuts and restarts."""

from ckptd.core import actions as act
from ckptd.shared.base.ids import SaveId
from ckptd.shared.protocol.messages import Progress
from tests.runs import RUN
from tests.unit.core.nodes.a_cluster import ACluster

ONE = SaveId(1, 1, 10, RUN)
ALLOCATED = "waits for rank 1: the memory of its slots is being allocated"
ACCUSED = "waits for rank 1: every rank must call save"
SILENT = "waits for rank 1: node b does not answer: ckptd status there"


def waiting() -> ACluster:
    """Rank 0 on node a has saved, node b allocates memory for rank 1."""
    cluster = ACluster("ab", set_size=2)
    cluster.connect("ab", expect=False)
    cluster.ask_slots_of(0)
    cluster.held = {act.AllocateSlots}
    cluster.ask_slots_of(1)
    cluster.stage(ONE, [0])
    cluster.tick(6)
    return cluster


def said(cluster: ACluster) -> list[str]:
    """What rank 0 was told of the ranks that its save waits for, up to what to type."""
    news = [m.reason for _, m in cluster.nodes["a"].told if isinstance(m, Progress) and m.save == ONE and m.reason]
    return [text.partition(" (")[0] for text in dict.fromkeys(news)]


def shown(cluster: ACluster) -> str:
    """What the status says of the save."""
    return cluster.nodes["a"].job.coordinator.facts.records[ONE].waits_for


def ticks(cluster: ACluster, count: int = 4) -> None:
    for _ in range(count):
        cluster.tick(4)


def test_a_rank_of_another_node_is_not_accused_while_its_slots_are_allocated():
    cluster = waiting()
    ticks(cluster)
    assert said(cluster) == [ALLOCATED]
    cluster.release()
    ticks(cluster)
    assert said(cluster) == [ALLOCATED, ACCUSED]


def test_a_link_that_comes_back_brings_what_is_still_so():
    cluster = waiting()
    cluster.cut_off("b")
    ticks(cluster)
    cluster.heal("b")
    ticks(cluster)
    assert said(cluster) == [ALLOCATED, SILENT]
    assert shown(cluster).startswith(ALLOCATED)


def test_a_link_that_comes_back_brings_what_is_so_no_more():
    cluster = waiting()
    cluster.cut_off("b")
    cluster.release()
    ticks(cluster)
    cluster.heal("b")
    ticks(cluster)
    assert said(cluster) == [ALLOCATED, SILENT, ACCUSED]


def test_a_new_daemon_allocates_nothing_before_it_is_asked():
    cluster = waiting()
    cluster.nodes["b"].restart()
    ticks(cluster)
    assert not shown(cluster).startswith(ALLOCATED), "what the former daemon reported"
    cluster.return_ranks("b")  # and asks for slots
    ticks(cluster)
    assert shown(cluster).startswith(ALLOCATED)
