"""A dispute about runs ends with what it is about, and nothing in dispute is given away by mistake."""

import pytest

from ckptd.core import events as ev
from ckptd.core.coordinator.lineage import Lineage
from ckptd.shared.base.errors import CkptdError
from ckptd.shared.base.ids import SaveId
from ckptd.shared.protocol.messages import LoadFrom, Refused
from tests.runs import OTHER_RUN, RUN, STORE_ID
from tests.unit.core.nodes.a_cluster import KEY, ONE, ACluster
from tests.unit.core.nodes.test_two_runs import THEIRS, started_over


def in_dispute() -> ACluster:
    cluster = started_over(durable=False)
    cluster.connect("ac")
    assert all(isinstance(answer, Refused) for answer in cluster.load())
    return cluster


def forget(cluster: ACluster, name: str, *, force: bool) -> None:
    node = cluster.nodes[name]
    there = tuple(ev.OnStore(save, world, 10, save.dirname) for save, world in cluster.store.committed.items())
    seen = ev.StoreScanned(job=KEY, store_id=STORE_ID, committed=there)
    for action in node.catalogue.forget(KEY, force=force, seen=seen):
        cluster.perform(node, action)
    cluster.settle()


def test_it_ends_with_a_session_that_is_without_the_nodes_of_the_other_run():
    cluster = in_dispute()
    cluster.end_ranks()
    cluster.lose("c")
    cluster.lose("d")
    cluster.connect("ab")
    answers = cluster.load()
    assert all(isinstance(answer, LoadFrom) and answer.save == ONE for answer in answers), answers


def test_a_link_that_is_down_decides_nothing():
    cluster = in_dispute()
    cluster.cut_off("c")
    assert cluster.nodes["a"].job.coordinator.runs.lineage.is_disputed(ONE)


def test_it_ends_when_the_memory_of_the_other_run_is_forgotten():
    cluster = in_dispute()
    cluster.end_ranks()
    runs = cluster.nodes["a"].job.coordinator.runs
    for name in "cd":
        assert THEIRS in runs.strangers.disputed(None)
        with pytest.raises(CkptdError):
            forget(cluster, name, force=False)
        forget(cluster, name, force=True)
    assert not runs.strangers.disputed(None)
    assert runs.lineage.rivals(ONE.incarnation) == (RUN,)
    assert runs.is_ours(ONE)


def test_what_is_in_dispute_and_durable_nowhere_is_forgotten_only_by_force():
    cluster = in_dispute()
    cluster.end_ranks()
    with pytest.raises(CkptdError, match=r"step 10 of another run .*not durable") as error:
        forget(cluster, "a", force=False)
    assert "--force" in error.value.hint
    forget(cluster, "a", force=True)
    assert KEY not in cluster.nodes["a"].catalogue.jobs


def test_what_is_in_dispute_and_durable_is_forgotten():
    cluster = started_over()
    cluster.store.committed[ONE] = 2
    cluster.connect("ac")
    assert all(isinstance(answer, Refused) for answer in cluster.load())
    cluster.end_ranks()
    assert cluster.nodes["a"].job.node.slots.foreign
    forget(cluster, "a", force=False)
    assert KEY not in cluster.nodes["a"].catalogue.jobs


def test_the_last_segment_of_a_run_that_is_released_takes_its_run_along():
    lineage, later = Lineage(), SaveId(1, 2, 20, OTHER_RUN)
    lineage.held("a", [ONE])
    lineage.held("b", (), [(THEIRS, 0), (later, 0)])
    assert lineage.is_disputed(ONE)
    assert not lineage.released("b", later, 1)
    assert not lineage.released("b", THEIRS, 0)
    assert lineage.is_disputed(ONE)
    assert lineage.released("b", later, 0)
    assert lineage.is_ours(ONE)
    assert not lineage.is_disputed(ONE)
