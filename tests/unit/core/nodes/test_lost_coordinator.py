"""The coordinator's daemon does not answer: who saved on other nodes hears it, since nobody else can say it."""

from ckptd.core import actions as act
from ckptd.shared.protocol.messages import Progress
from tests.unit.core.nodes.a_cluster import ONE, TWO, ACluster

WHO = "node a, whose daemon coordinates the job"


def told(cluster: ACluster, rank: int) -> list[Progress]:
    return [news for to, news in cluster.nodes["b"].told if to == rank and isinstance(news, Progress)]


def test_who_delivered_a_save_learns_that_it_waits_for_the_coordinator():
    cluster = ACluster("ab")
    cluster.connect("abb")
    cluster.stage(ONE, [1])
    cluster.lose("a")
    assert [news.reason for news in told(cluster, 1)] == [f"waits for {WHO} and does not answer: ckptd status there"]
    assert told(cluster, 2) == [], "it has not saved"


def test_one_rank_of_the_node_learns_what_is_not_durable_before_it_answers():
    cluster = ACluster("ab")
    cluster.connect("abb")
    cluster.held = {act.Drain}
    cluster.stage(ONE)
    cluster.stage(TWO)  # its drain was not ordered yet
    cluster.cut_off("a")
    notices = [[news.notice for news in told(cluster, rank) if news.notice] for rank in (1, 2)]
    text = f"{WHO}, does not answer: step 20 is not durable before it does; ckptd status there"
    assert notices == [[text], []]


def test_what_is_durable_is_no_update():
    cluster = ACluster("ab")
    cluster.connect("abb")
    cluster.stage(ONE)
    cluster.stage(TWO)
    assert cluster.store.committed
    cluster.lose("a")
    assert not [news for rank in (1, 2) for news in told(cluster, rank) if news.notice]
