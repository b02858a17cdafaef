"""What a job's journal has of a job of several nodes."""

from ckptd.shared.protocol import journal as log
from tests.unit.core.nodes.a_cluster import ONE, TWO, ACluster, a_protected_job


def records(cluster, name="a", kind=None):
    return [one.entry for one in cluster.nodes[name].records if kind is None or isinstance(one.entry, kind)]


def test_a_save_is_on_record_at_the_coordinator_alone_and_protected_once_all_sets_have_encoded_it():
    cluster = ACluster()
    cluster.connect("abcd")
    cluster.stage(ONE)
    assert [type(entry).__name__ for entry in records(cluster)] == ["Staged", "Protected", "Durable"]
    assert not any(records(cluster, name) for name in "bcd")
    (first, *_) = cluster.nodes["a"].records
    assert (first.began.nodes, first.began.scheme, first.began.set_size) == (4, "xor", 4)


def test_a_lost_node_and_a_lost_arena_are_on_record_with_the_ranks_there():
    cluster = ACluster()
    cluster.connect("abcd")
    cluster.stage(ONE)
    cluster.lose("d")
    assert records(cluster, kind=log.Lost) == [log.Lost(at=0, node="d", what="node", ranks=1)]
    cluster.add("d")
    cluster.settle()
    cluster.end_ranks()
    cluster.connect("abcd")
    cluster.load()
    restored = records(cluster, kind=log.Restored)[-1]
    assert (restored.counter, sum(restored.tiers.values())) == (1, 4)
    assert restored.tiers.keys() - {"arena"}, "rank 3 had to have its part from elsewhere"


def test_a_node_that_was_cut_off_has_lost_no_arena():
    cluster = ACluster()
    cluster.connect("abcd")
    cluster.stage(ONE)
    cluster.cut_off("d")
    cluster.heal("d")
    assert records(cluster, kind=log.Lost) == [log.Lost(at=0, node="d", what="node", ranks=1)]


def test_a_save_takes_as_many_bytes_on_record_whatever_the_number_of_nodes():
    sizes = {}
    for count in (2, 40):
        names = [f"{number:03d}" for number in range(count)]
        cluster = ACluster(names)
        cluster.connect(names)
        cluster.stage(ONE)
        cluster.stage(TWO)
        sizes[count] = sum(len(log.framed(entry)) for entry in records(cluster, names[0])) / 2
    assert abs(sizes[40] - sizes[2]) <= 8, "a number of more digits, and no more"
    assert max(sizes.values()) <= 200


def test_bytes_of_a_rebuilt_segment_count_at_a_coordinator_that_never_saw_it():
    cluster = a_protected_job()
    cluster.end_ranks()
    cluster.lose("d")
    cluster.nodes["a"].restart()
    cluster.settle()
    cluster.add("d")
    cluster.settle()
    cluster.connect("abcd")
    cluster.load()
    record = cluster.nodes["a"].job.coordinator.facts.records[ONE]
    assert record.delivered == dict.fromkeys(range(4), 10)
    assert sum(record.writes.values()) == 40, "of the drain that runs"
    assert records(cluster, kind=log.Restored)[-1].nbytes == 40
