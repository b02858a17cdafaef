"""Nodes that are sent to the store in a load hear of each other's gates."""

import pytest

from ckptd.core import actions as act
from ckptd.core import events as ev
from ckptd.shared.protocol.messages import Tier
from ckptd.shared.protocol.read_groups import MAX_COMPANY, Gate, company
from tests.unit.core.nodes.a_cluster import KEY, ONE, ACluster

SECRET = bytes(32)


def gate_of(rank):
    return Gate("127.0.0.1", 1000 + rank, SECRET)


def ask(cluster, gates):
    """All ranks ask for the newest; the request of each."""
    seqs = {}
    for rank in range(len(cluster.homes)):
        seqs[rank] = cluster.seq()
        gate = gate_of(rank) if rank in gates else None
        event = ev.LoadAsked(job=KEY, rank=rank, session=cluster.sid, request=seqs[rank], gate=gate)
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


def test_nodes_that_are_sent_to_the_store_hear_of_each_other():
    cluster = a_job_on_the_store("aabb", lost="ab")
    answers = told(cluster, ask(cluster, {0, 2}))
    assert {answer.tier for answer in answers.values()} == {Tier.PFS}
    for rank, answer in answers.items():
        assert answer.gates == [gate_of(0), gate_of(2)]
        assert answer.gate == rank // 2
        assert answer.readers == [rank // 2 * 2, rank // 2 * 2 + 1]


def test_who_reads_memory_hears_of_no_gates():
    cluster = a_job_on_the_store("aabb", lost="")
    answers = told(cluster, ask(cluster, {0, 2}))
    assert {answer.tier for answer in answers.values()} == {Tier.ARENA}
    assert all((answer.gates, answer.gate) == ([], -1) for answer in answers.values())


@pytest.mark.parametrize("gates", [set(), {0}])
def test_a_node_that_could_open_no_gate_leaves_the_other_alone(gates):
    cluster = a_job_on_the_store("aabb", lost="ab")
    answers = told(cluster, ask(cluster, gates))
    assert all((answer.gates, answer.gate) == ([], -1) for answer in answers.values())


def test_a_coordinator_that_restarts_hears_of_the_gates_again():
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
        ev.LoadAsked(job=KEY, rank=0, session=cluster.sid, request=again, gate=gate_of(0)),
    )
    cluster.settle()
    answers = told(cluster, seqs | {0: again})
    assert [answers[rank].gates for rank in range(3)] == [[gate_of(0), gate_of(1), gate_of(2)]] * 3


def test_large_jobs_read_in_companies():
    gates = [(8 * node, gate_of(node)) for node in range(MAX_COMPANY + 3)]
    first, own = company(gates, range(8 * 5, 8 * 6))
    assert (len(first), own) == (MAX_COMPANY, 5)
    last, own = company(gates, range(8 * (MAX_COMPANY + 1), 8 * (MAX_COMPANY + 2)))
    assert (last, own) == ([gate_of(MAX_COMPANY + i) for i in range(3)], 1)
    assert company(gates[: MAX_COMPANY + 1], [8 * MAX_COMPANY]) == ([], -1)  # a company of one is none
    assert company(gates, [3]) == ([], -1)
