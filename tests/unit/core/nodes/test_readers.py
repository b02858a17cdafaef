"""Nodes that read a checkpoint on the store together: their places, and the address of each one's parent."""

import pytest

from ckptd.core import actions as act
from ckptd.core import events as ev
from ckptd.core.node.readers import DIAL_S, PATIENCE_S
from ckptd.shared.protocol import read_tree
from ckptd.shared.protocol.messages import Tier
from ckptd.shared.protocol.read_tree import ExchangeAddress
from tests.unit.core.nodes.a_cluster import KEY, ONE, ACluster

SECRET = bytes(32)


def exchange_of(rank):
    return ExchangeAddress("127.0.0.1", 1000 + rank, SECRET)


def places(cluster, ranks, read, *, mute=()):
    """These ranks ask for their places, each with an address unless it is mute; the requests."""
    seqs = {rank: cluster.seq() for rank in ranks}
    for rank, seq in seqs.items():
        exchange = None if rank in mute else exchange_of(rank)
        event = ev.PlaceAsked(job=KEY, rank=rank, session=cluster.sid, request=seq, read=read, exchange=exchange)
        cluster.say(cluster.node(rank), event)
    cluster.settle()
    return seqs


def told(cluster, seqs):
    return {rank: cluster.answer(rank, seq) for rank, seq in seqs.items()}


def a_job_on_the_store(homes, *, lost):
    """It was saved and drained; these nodes have lost their memory, and the ranks are back."""
    cluster = ACluster("".join(dict.fromkeys(homes)))
    cluster.connect(homes)
    cluster.stage(ONE)
    cluster.settle()
    assert cluster.store.committed
    cluster.end_ranks()
    for name in lost:
        cluster.lose(name)
        cluster.add(name)
    cluster.connect(homes)
    return cluster


def test_nodes_that_are_sent_to_the_store_receive_the_address_of_their_parent():
    cluster = a_job_on_the_store("aabb", lost="ab")
    answers = told(cluster, cluster.ask())
    assert {(answer.tier, answer.read) for answer in answers.values()} == {(Tier.PFS, answers[0].read)}
    assert [answer.readers for answer in answers.values()] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    found = told(cluster, places(cluster, [0, 2], answers[0].read))
    assert {rank: (place.number, place.count) for rank, place in found.items()} == {0: (0, 2), 2: (1, 2)}
    assert {rank: place.parent for rank, place in found.items()} == {0: None, 2: exchange_of(0)}


def test_the_order_has_the_same_size_at_any_number_of_nodes_and_no_address():
    cluster = a_job_on_the_store("aabb", lost="ab")
    orders = []
    perform = cluster.perform

    def seen(node, action):
        if isinstance(action, act.ToNode) and isinstance(action.message, ev.LoadOrdered):
            orders.append(action.message)
        perform(node, action)

    cluster.perform = seen
    cluster.ask()
    assert orders
    assert {order.tiers.others for order in orders} == {()}


def test_a_parent_whose_rank_comes_later_answers_then():
    cluster = a_job_on_the_store("aabb", lost="ab")
    read = told(cluster, cluster.ask())[0].read
    early = places(cluster, [2], read)
    assert told(cluster, early) == {2: None}
    places(cluster, [0], read)
    assert told(cluster, early)[2].parent == exchange_of(0)


def test_a_rank_receives_no_answer_to_what_its_predecessor_has_asked():
    cluster = a_job_on_the_store("aabb", lost="ab")
    early = places(cluster, [2], told(cluster, cluster.ask())[0].read)
    cluster.tick(0)
    cluster.end_ranks()
    cluster.connect("aabb")
    cluster.tick(PATIENCE_S)
    assert told(cluster, early) == {2: None}


def test_a_parent_whose_rank_never_comes_costs_patience():
    cluster = a_job_on_the_store("aabb", lost="ab")
    early = places(cluster, [2], told(cluster, cluster.ask())[0].read)
    cluster.tick(0)
    assert told(cluster, early) == {2: None}
    cluster.tick(PATIENCE_S)
    place = told(cluster, early)[2]
    assert (place.number, place.count, place.parent) == (1, 2, None)


def test_a_parent_that_does_not_answer_is_not_waited_for():
    cluster = a_job_on_the_store("abc", lost="abc")
    early = places(cluster, [2], told(cluster, cluster.ask())[0].read)
    cluster.say(cluster.nodes["c"], ev.PeerDown(job=KEY, node="a"))
    cluster.settle()
    assert told(cluster, early)[2].parent is None


def test_a_parent_without_a_port_is_none():
    cluster = a_job_on_the_store("aabb", lost="ab")
    read = told(cluster, cluster.ask())[0].read
    found = told(cluster, places(cluster, [0, 2], read, mute={0}))
    assert found[2].parent is None
    assert found[2].count == 2


def test_a_node_that_does_not_take_part_says_so_without_a_wait_for_its_parent(monkeypatch):
    monkeypatch.setattr(read_tree, "FANOUT", 2)
    cluster = a_job_on_the_store("abcd", lost="")
    early = places(cluster, [3], "all.1")
    (place,) = told(cluster, places(cluster, [2], "all.1", mute={2})).values()
    assert place is not None
    assert (place.count, place.parent) == (0, None)
    assert (told(cluster, early)[3].count, told(cluster, early)[3].parent) == (4, None)


def test_a_rank_that_reads_memory_takes_part_in_no_read():
    cluster = a_job_on_the_store("aabb", lost="")
    answers = told(cluster, cluster.ask())
    assert {(answer.tier, answer.read) for answer in answers.values()} == {(Tier.ARENA, "")}


def test_only_nodes_that_are_sent_to_the_store_have_places():
    cluster = a_job_on_the_store("abc", lost="ac")
    answers = told(cluster, cluster.ask())
    tiers = [answers[rank].tier for rank in range(3)]
    assert tiers == [Tier.PFS, Tier.ARENA, Tier.PFS]
    found = told(cluster, places(cluster, [0, 1, 2], answers[0].read))
    assert [(found[rank].number, found[rank].count) for rank in range(3)] == [(0, 2), (0, 0), (1, 2)]
    assert found[2].parent == exchange_of(0)


def test_all_nodes_have_places_in_a_read_that_is_no_load(monkeypatch):
    monkeypatch.setattr(read_tree, "FANOUT", 2)
    cluster = a_job_on_the_store("abcd", lost="")
    found = told(cluster, places(cluster, range(4), "all.1"))
    assert [(found[rank].number, found[rank].count) for rank in range(4)] == [(rank, 4) for rank in range(4)]
    assert [found[rank].parent for rank in range(4)] == [None, exchange_of(0), exchange_of(0), exchange_of(2)]


def test_a_daemon_that_restarts_knows_no_place_and_its_ranks_read_by_themselves():
    cluster = a_job_on_the_store("abc", lost="abc")
    read = told(cluster, cluster.ask())[0].read
    cluster.nodes["a"].restart()
    cluster.settle()
    cluster.return_ranks("a", 2)
    assert told(cluster, places(cluster, [0], read))[0].count == 0


@pytest.mark.parametrize("read", ["load.1.9", "load.x"])
def test_a_read_without_an_order_has_no_places(read):
    cluster = a_job_on_the_store("abc", lost="abc")
    cluster.ask()
    assert {place.count for place in told(cluster, places(cluster, range(3), read)).values()} == {0}


def test_a_parent_whose_link_broke_some_time_ago_is_asked_all_the_same():
    """No link is kept to it, so nothing has made another since; the question does."""
    cluster = a_job_on_the_store("abc", lost="abc")
    read = told(cluster, cluster.ask())[0].read
    cluster.say(cluster.nodes["c"], ev.PeerDown(job=KEY, node="a"))
    cluster.settle()
    found = told(cluster, places(cluster, [0, 2], read))
    assert found[2].parent == exchange_of(0)


def test_a_parent_that_was_lost_costs_a_short_patience():
    cluster = a_job_on_the_store("abc", lost="abc")
    read = told(cluster, cluster.ask())[0].read
    cluster.say(cluster.nodes["c"], ev.PeerDown(job=KEY, node="a"))
    cluster.settle()
    early = places(cluster, [2], read)
    cluster.tick(0)
    assert told(cluster, early) == {2: None}
    cluster.tick(DIAL_S)
    assert told(cluster, early)[2].parent is None


def test_a_parent_that_was_lost_and_is_up_again_has_the_usual_patience():
    cluster = a_job_on_the_store("abc", lost="abc")
    read = told(cluster, cluster.ask())[0].read
    cluster.say(cluster.nodes["c"], ev.PeerDown(job=KEY, node="a"))
    cluster.settle()
    early = places(cluster, [2], read)
    cluster.tick(0)
    cluster.say(cluster.nodes["c"], ev.PeerUp(job=KEY, node="a"))
    cluster.settle()
    cluster.tick(DIAL_S)
    assert told(cluster, early) == {2: None}
    places(cluster, [0], read)
    assert told(cluster, early)[2].parent == exchange_of(0)


def test_a_link_to_the_parent_that_rests_ends_no_wait():
    cluster = a_job_on_the_store("abc", lost="abc")
    early = places(cluster, [2], told(cluster, cluster.ask())[0].read)
    cluster.say(cluster.nodes["c"], ev.PeerDown(job=KEY, node="a", rests=True))
    cluster.settle()
    assert told(cluster, early) == {2: None}


def exchange_asked(cluster, node, read):
    """What a node is told, or None for nothing yet."""
    told = []
    actions = cluster.nodes["a"].job.node.readers.exchange_asked(ev.ExchangeAsked(job=KEY, node=node, read=read))
    told += [(action.node, action.message.read, action.message.address) for action in actions]
    return told


def test_questions_of_a_node_about_any_reads_are_bounded():
    cluster = a_job_on_the_store("abc", lost="")
    told = [one for n in range(100) for one in exchange_asked(cluster, "b", f"s/x.{n}")]
    assert [read for _, read, _ in told] == [f"s/x.{n}" for n in range(96)]
    assert {(node, address) for node, _, address in told} == {("b", None)}


def test_a_node_that_counts_reads_of_all_ranks_lower_meets_the_newest():
    """One of its ranks raised before it counted; the nodes then agree on the number."""
    cluster = a_job_on_the_store("abc", lost="")
    places(cluster, [0], "all.5")
    assert told(cluster, places(cluster, [1], "all.4"))[1].parent == exchange_of(0)
    early = places(cluster, [2], "all.6")
    assert told(cluster, early) == {2: None}
    places(cluster, [0], "all.6")
    assert told(cluster, early)[2].parent == exchange_of(0)


def test_a_late_word_that_a_node_takes_no_part_ends_no_wait_for_a_later_read():
    cluster = a_job_on_the_store("abc", lost="")
    early = places(cluster, [2], "all.6")
    places(cluster, [0], "all.5", mute={0})
    assert told(cluster, early) == {2: None}
