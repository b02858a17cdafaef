"""When a node's parity goes to the store with its images, and when its vote does not wait for it."""

from ckptd.core import actions as act
from ckptd.shared.base.ids import SaveId
from tests.unit.core.nodes.a_cluster import KEY, ONE, THREE, TWO, ACluster

WAIT_S = 30.0


def a_job(*held: type[act.Action], on: bool = True) -> ACluster:
    cluster = ACluster(drain_parity=on, parity_wait_s=WAIT_S)
    cluster.connect("abcd")
    cluster.held = set(held)
    cluster.stage(ONE)
    return cluster


def voters(cluster: ACluster, save: SaveId = ONE) -> list[str]:
    return sorted(cluster.store.votes.get(save, {}))


def test_every_vote_names_the_parity_of_its_node():
    cluster = a_job()
    assert cluster.store.parity == {ONE: set("abcd")}
    assert cluster.store.committed == {ONE: 4}


def test_without_the_setting_none_is_copied():
    cluster = a_job(act.DrainParity, on=False)
    assert not cluster.waiting
    assert cluster.store.parity == {}
    assert cluster.store.committed == {ONE: 4}


def test_a_vote_waits_for_parity_that_is_being_made():
    cluster = a_job(act.Encode)
    cluster.tick(WAIT_S / 2)
    assert voters(cluster) == []
    cluster.release()
    assert cluster.store.parity == {ONE: set("abcd")}


def test_but_not_for_ever():
    cluster = a_job(act.Encode)
    assert cluster.nodes["b"].catalogue.next_deadline() == 0.0, "the node asks for the time at once"
    cluster.tick(0)
    cluster.tick(WAIT_S - 1)
    assert voters(cluster) == []
    due = cluster.nodes["b"].catalogue.next_deadline()
    assert due is not None
    assert due <= cluster.now + 1
    cluster.tick(1)
    assert cluster.store.committed == {ONE: 4}
    cluster.release()
    assert cluster.store.parity == {}


def test_an_encode_that_fails_keeps_only_its_own_node_waiting_no_longer():
    cluster = ACluster(drain_parity=True)
    cluster.connect("abcd")
    cluster.failing = {"c"}
    cluster.stage(ONE)
    assert cluster.store.parity == {ONE: set("abd")}
    assert cluster.store.committed == {ONE: 4}


def test_a_member_that_is_lost_ends_the_wait():
    cluster = a_job(act.Encode)
    cluster.lose("d")
    assert voters(cluster) == ["a", "b", "c"]
    assert cluster.store.parity == {}


def test_a_copy_that_fails_costs_the_parity_and_no_more():
    cluster = a_job(act.DrainParity)
    assert voters(cluster) == []
    del cluster.nodes["a"].chunks[ONE, 1]
    cluster.release()
    assert cluster.store.parity == {ONE: set("bcd")}
    assert cluster.store.committed == {ONE: 4}


def test_what_is_copied_stays_though_newer_is_protected_and_goes_when_it_is_copied():
    cluster = a_job(act.DrainParity)
    cluster.stage(TWO)
    assert all((TWO, 1) in node.chunks for node in cluster.nodes.values())
    assert all((ONE, 1) in node.chunks for node in cluster.nodes.values())
    cluster.release()
    assert cluster.store.parity[ONE] == set("abcd")
    cluster.tick(1)
    assert all((ONE, 1) not in node.chunks for node in cluster.nodes.values())
    assert cluster.store.parity[TWO] == set("abcd")
    assert all(not node.catalogue.jobs[KEY].node.slots.holding(ONE) for node in cluster.nodes.values())


def test_a_save_that_is_older_than_what_is_encoded_is_not_waited_for():
    cluster = ACluster(drain_parity=True)
    cluster.connect("abcd")
    cluster.held = {act.Encode, act.Drain}
    cluster.stage(ONE)
    cluster.stage(TWO)  # its encode is ordered once the first one's is over
    cluster.release()
    cluster.stage(THREE)
    assert cluster.store.committed[THREE] == 4
    assert cluster.store.parity[THREE] == set("abcd")
