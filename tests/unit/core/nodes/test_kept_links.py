"""Links lead to the coordinator and inside the sets; what needed a link to all nodes works without."""

import pytest

from ckptd.core import actions as act
from ckptd.core import events as ev
from tests.unit.core.nodes.a_cluster import KEY, ONE, ACluster

NODES = "abcdefgh"


def a_job(homes=NODES):
    cluster = ACluster(NODES, set_size=4)
    cluster.connect(homes)
    return cluster


def sets_of(cluster):
    return {frozenset(node.job.node.protection.members) for node in cluster.nodes.values()}


def test_links_are_to_the_coordinator_and_inside_the_sets():
    cluster = a_job()
    assert {len(members) for members in sets_of(cluster)} == {4}
    wanted = {frozenset(("a", node)) for node in NODES[1:]}
    wanted |= {frozenset((one, two)) for members in sets_of(cluster) for one in members for two in members - {one}}
    assert cluster.links == wanted
    cluster.stage(ONE)
    assert all("protected" in cluster.milestones(rank, ONE) for rank in range(8))
    assert cluster.links == wanted


@pytest.fixture
def orphans():
    """The coordinator was lost when all had voted."""
    cluster = a_job()
    cluster.held = {act.Commit}
    cluster.stage(ONE)
    assert [node.name for node, _ in cluster.waiting] == ["a"]
    cluster.waiting = []
    return cluster


def test_the_set_of_a_lost_coordinator_makes_its_commit_and_the_others_find_it_made(orphans):
    (own,) = [members for members in sets_of(orphans) if "a" in members]
    orphans.lose("a")
    orphans.tick(0.1)
    ((node, commit),) = orphans.waiting
    assert node.name == min(own - {"a"})
    assert commit.save == ONE
    orphans.release()
    durable = {NODES[rank] for rank in range(1, 8) if "durable" in orphans.milestones(rank, ONE)}
    assert durable == own - {"a"}
    orphans.tick(0.1)
    orphans.tick(10.0)
    assert all("durable" in orphans.milestones(rank, ONE) for rank in range(1, 8))


def test_another_set_makes_the_commit_when_the_coordinator_s_whole_set_is_lost(orphans):
    (own,) = [members for members in sets_of(orphans) if "a" in members]
    orphans.held = set()
    for name in sorted(own):
        orphans.cut_off(name)
    orphans.store.committed.clear()
    orphans.tick(0.1)
    orphans.tick(10.0)
    assert ONE in orphans.store.committed
    assert all("durable" in orphans.milestones(NODES.index(name), ONE) for name in set(NODES) - own)


def test_a_coordinator_that_answers_again_makes_the_commit_itself(orphans):
    orphans.cut_off("a")
    orphans.waiting = []
    orphans.heal("a")
    orphans.tick(0.1)
    orphans.tick(10.0)
    assert {node.name for node, _ in orphans.waiting} <= {"a"}


def test_a_link_that_rests_is_no_node_that_was_lost():
    cluster = a_job()
    node = cluster.nodes["b"]
    for rests in (True, False):
        cluster.say(node, ev.PeerDown(job=KEY, node="g", rests=rests))
        cluster.settle()
        assert ("g" in node.job.node.membership.down) is not rests


def test_no_machine_takes_a_link_that_rests_for_a_lost_node():
    """Every part of the job would react to the loss of this one: it drains, and is of the coordinator's set."""
    cluster = a_job()
    cluster.held = {act.Drain}
    cluster.stage(ONE)
    cluster.say(cluster.nodes["a"], ev.PeerDown(job=KEY, node="b", rests=True))
    cluster.settle()
    assert cluster.nodes["a"].job.coordinator.facts.active == ONE
    cluster.say(cluster.nodes["a"], ev.PeerDown(job=KEY, node="b"))
    cluster.settle()
    assert cluster.nodes["a"].job.coordinator.facts.active is None


def test_links_to_sources_of_copies_are_kept_while_those_are_on_their_way():
    cluster = ACluster(NODES, set_size=4)
    cluster.replicas = 1
    cluster.connect(NODES)
    cluster.stage(ONE)
    cluster.end_ranks()
    cluster.connect(NODES)
    before = {node.name: node.wanted for node in cluster.nodes.values()}
    cluster.held = {act.FetchSegment}
    for rank in range(8):
        cluster.say(cluster.node(rank), ev.LoadAsked(job=KEY, rank=rank, session=cluster.sid, request=cluster.seq()))
    cluster.settle()
    assert {node.name for node, _ in cluster.waiting} == set(NODES)
    assert all(cluster.nodes[name].wanted == set(NODES) - {name} for name in NODES[1:])
    cluster.release()
    assert {node.name: node.wanted for node in cluster.nodes.values()} == before


def test_members_keep_their_leader_until_they_know_another_one():
    """They would all dial the coordinator, at the moment at which each of them waits for the new session."""
    cluster, kept = ACluster(NODES, set_size=2, relayed_from=3), []
    cluster.connect(NODES)
    perform = cluster.perform

    def watched(node, action):
        if isinstance(action, act.KeepLinks):
            kept.append((node.name, dict(action.relays)))
        perform(node, action)

    cluster.perform = watched
    members = {name for name in NODES[1:] if cluster.nodes[name].job.node._kept_links._relays}
    assert len(members) >= 2
    cluster.end_ranks()
    cluster.lose("h")
    cluster.add("i")
    cluster.connect("abcdefgi")
    after = {name for name in members if name in cluster.nodes and cluster.nodes[name].job.node._kept_links._relays}
    moved = [(name, relays) for name, relays in kept if name in after]
    assert moved
    assert all(relays for _, relays in moved), "none of them goes without a leader meanwhile"
