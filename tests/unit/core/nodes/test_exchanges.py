"""Nodes that are sent to the store in a load receive the addresses of each other's peer exchanges."""

import pytest

from ckptd.core import actions as act
from ckptd.core import events as ev
from ckptd.shared.protocol.messages import Tier
from ckptd.shared.protocol.read_groups import MAX_PARTICIPANTS, ExchangeAddress, participants
from tests.unit.core.nodes.a_cluster import KEY, ONE, ACluster

SECRET = bytes(32)


def exchange_of(rank):
    return ExchangeAddress("127.0.0.1", 1000 + rank, SECRET)


def ask(cluster, exchanges):
    """All ranks ask for the newest; the request of each."""
    seqs = {}
    for rank in range(len(cluster.homes)):
        seqs[rank] = cluster.seq()
        exchange = exchange_of(rank) if rank in exchanges else None
        event = ev.LoadAsked(job=KEY, rank=rank, session=cluster.sid, request=seqs[rank], exchange=exchange)
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


def test_nodes_that_are_sent_to_the_store_receive_each_others_addresses():
    cluster = a_job_on_the_store("aabb", lost="ab")
    answers = told(cluster, ask(cluster, {0, 2}))
    assert {answer.tier for answer in answers.values()} == {Tier.PFS}
    for rank, answer in answers.items():
        assert answer.exchanges == [exchange_of(0), exchange_of(2)]
        assert answer.own_exchange == rank // 2
        assert answer.readers == [rank // 2 * 2, rank // 2 * 2 + 1]


def test_a_rank_that_reads_memory_receives_no_addresses():
    cluster = a_job_on_the_store("aabb", lost="")
    answers = told(cluster, ask(cluster, {0, 2}))
    assert {answer.tier for answer in answers.values()} == {Tier.ARENA}
    assert all((answer.exchanges, answer.own_exchange) == ([], -1) for answer in answers.values())


@pytest.mark.parametrize("exchanges", [set(), {0}])
def test_a_node_without_an_exchange_leaves_the_other_alone(exchanges):
    cluster = a_job_on_the_store("aabb", lost="ab")
    answers = told(cluster, ask(cluster, exchanges))
    assert all((answer.exchanges, answer.own_exchange) == ([], -1) for answer in answers.values())


def test_a_coordinator_that_restarts_receives_the_addresses_again():
    cluster = a_job_on_the_store("abc", lost="abc")
    cluster.held = {act.ScanStore}
    seqs = ask(cluster, {0, 1, 2})
    cluster.held, cluster.waiting = set(), []
    cluster.nodes["a"].restart()
    cluster.settle()
    cluster.return_ranks("a", 2)
    again = cluster.seq()
    cluster.say(
        cluster.nodes["a"],
        ev.LoadAsked(job=KEY, rank=0, session=cluster.sid, request=again, exchange=exchange_of(0)),
    )
    cluster.settle()
    answers = told(cluster, seqs | {0: again})
    assert [answers[rank].exchanges for rank in range(3)] == [[exchange_of(0), exchange_of(1), exchange_of(2)]] * 3


def test_large_jobs_read_in_groups():
    exchanges = [(8 * node, exchange_of(node)) for node in range(MAX_PARTICIPANTS + 3)]
    first, own = participants(exchanges, range(8 * 5, 8 * 6))
    assert (len(first), own) == (MAX_PARTICIPANTS, 5)
    last, own = participants(exchanges, range(8 * (MAX_PARTICIPANTS + 1), 8 * (MAX_PARTICIPANTS + 2)))
    assert (last, own) == ([exchange_of(MAX_PARTICIPANTS + i) for i in range(3)], 1)
    assert participants(exchanges[: MAX_PARTICIPANTS + 1], [8 * MAX_PARTICIPANTS]) == ([], -1)  # no group of one
    assert participants(exchanges, [3]) == ([], -1)
