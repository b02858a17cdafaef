"""A load of a job whose checkpoints were staged only, and are lost in part with a node."""

from ckptd.core import actions as act
from ckptd.shared.format.schemes import Scheme
from ckptd.shared.protocol.messages import LoadFrom, Refused
from tests.unit.core.nodes.a_cluster import ONE, TWO, ACluster, a_protected_job
from tests.unit.core.nodes.test_restarts import ask_load


def answers(cluster: ACluster) -> list[LoadFrom | Refused | None]:
    """Of all ranks, to a load of the newest."""
    seqs = ask_load(cluster)
    return [cluster.answer(rank, seq) for rank, seq in seqs.items()]


def staged_only(*saves) -> ACluster:
    """These lie in memory alone, and the ranks are gone."""
    cluster = ACluster("abc", scheme=Scheme.NONE)
    cluster.connect("aab")
    cluster.held = {act.Drain}
    for save in saves:
        cluster.stage(save)
    cluster.end_ranks()
    return cluster


def test_a_job_begins_again_where_all_that_it_had_was_staged_only_and_learns_what_is_lost():
    cluster = staged_only(ONE)
    cluster.lose("b")
    cluster.connect("aac")
    found = answers(cluster)
    assert [getattr(one, "save", one) for one in found] == [None] * 3, found
    for one in found:
        assert any(str(ONE) in note and "rank 2 saved" in note and "lost" in note for note in one.notes), one.notes


def test_a_job_of_which_something_was_protected_never_begins_again_by_itself():
    cluster = a_protected_job("abcd")
    cluster.held = {act.Drain}
    cluster.end_ranks()
    cluster.lose("c")
    cluster.lose("d")
    cluster.connect("abab")
    found = answers(cluster)
    assert all(isinstance(one, Refused) for one in found), found
    assert all("ckptd forget" in one.hint for one in found), found


def test_the_newest_that_all_ranks_have_is_loaded_when_a_newer_one_is_lost():
    cluster = ACluster("abc", scheme=Scheme.NONE)
    cluster.connect("aab")
    cluster.stage(ONE)  # and drained
    cluster.held = {act.Drain}
    cluster.stage(TWO)
    cluster.end_ranks()
    cluster.lose("b")
    cluster.connect("aac")
    found = answers(cluster)
    assert [getattr(one, "save", one) for one in found] == [ONE] * 3, found
