"""Saves of which replicas hold shares: a node lost, a coordinator that is new, and which segments a node gets."""

from ckptd.core import actions as act
from ckptd.core.record import Record
from ckptd.protocol.shares import Share
from tests.unit.nodes.a_cluster import ONE, ACluster


def cluster(names="abcd"):
    made = ACluster(names)
    made.replicas = True
    made.connect("abc")
    return made


def test_a_coordinator_that_takes_over_after_a_loss_finds_the_save_whole_and_drains_it():
    job = cluster()
    job.held = {act.Drain}
    job.stage(ONE)
    job.end_ranks()
    job.lose("a")
    job.connect("dbc")
    answers = job.load()
    assert {answer.save for answer in answers} == {ONE}
    assert not job.nodes["d"].job.coordinator.saves.records[ONE].apart
    job.waiting = [(node, action) for node, action in job.waiting if node.name in job.nodes]
    job.release()
    record = job.nodes["d"].job.coordinator.saves.records[ONE]
    assert not record.apart
    assert ONE in job.store.committed


def test_replicas_get_each_others_segments_and_no_more():
    job = cluster()
    job.stage(ONE)
    job.end_ranks()
    job.connect("abc")
    answers = job.load()
    assert {answer.save for answer in answers} == {ONE}
    for name in "abc":
        assert len(job.nodes[name].job.node.slots.holding(ONE)) == 3


def test_needed_are_the_own_segments_and_those_of_who_shared():
    record = cluster_record({0: (b"x" * 8,), 1: (b"y" * 8,), 2: (b"x" * 8,), 3: (b"y" * 8,), 4: ()})
    assert record.needed_for([0]) == [0, 2]
    assert record.needed_for([1, 4]) == [1, 3, 4]
    assert record.needed_for([4]) == [4]


def cluster_record(sets):

    record = Record(ONE, len(sets), 0.0)
    record.shares = {r: tuple(Share(s, 2, b"c" * 8, b"w" * 8) for s in said) for r, said in sets.items()}
    return record
