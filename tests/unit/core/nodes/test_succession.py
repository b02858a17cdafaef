"""The commit of a coordinator that is lost: the first of its set makes it, nodes outside of that set later.

None does once the coordinator has a successor.
"""

from itertools import pairwise

import pytest

from ckptd.core import actions as act
from ckptd.core import events as ev
from ckptd.shared.protocol.messages import Progress
from tests.unit.core.nodes.a_cluster import KEY, ONE, ACluster

LONG_S = 60.0
MISSING = "the vote of node d is missing"


@pytest.fixture
def waits():
    """Every node has voted; the coordinator, a, and c of its set are lost before the commit. b and d are the rest."""
    cluster = ACluster("abcd", set_size=2, outside_wait_s=0.5)
    cluster.connect("abcd")
    cluster.held = {act.Commit}
    cluster.stage(ONE)
    for name in "ca":
        cluster.lose(name)
    cluster.waiting.clear()
    assert cluster.nodes["b"].job.node.drain.voted == ONE
    return cluster


def commits(cluster):
    return [(node.name, action.session) for node, action in cluster.waiting if isinstance(action, act.Commit)]


def test_a_node_that_is_to_commit_later_leaves_it_to_a_new_coordinator(waits):
    waits.tick(0.0)
    waits.end_ranks()
    waits.connect("db")
    waits.tick(1.0)
    assert waits.nodes["b"].job.node.coordinator == "d"
    waits.tick(LONG_S)
    assert {name for name, _ in commits(waits)} <= {"d"}


@pytest.fixture
def votes():
    """Nodes of one set, whose votes are held back, and with them all commits."""
    cluster = ACluster("abcd", outside_wait_s=0.5)
    cluster.connect("abcd")
    cluster.held = {act.Commit, act.WriteVote}
    cluster.stage(ONE)
    cluster.tick(1.0)
    return cluster


def vote(cluster, names):
    """The votes of these nodes come to the store; those of the others wait on."""
    cluster.held = {act.Commit}
    held, cluster.waiting = cluster.waiting, []
    for node, action in held:
        if isinstance(action, act.WriteVote) and node.name in names:
            cluster.perform(node, action)
        else:
            cluster.waiting.append((node, action))
    cluster.settle()


def lose_coordinator(cluster):
    cluster.lose("a")
    cluster.waiting = [(node, action) for node, action in cluster.waiting if node.name != "a"]
    cluster.tick(1.0)


def fail_commits(cluster):
    for node, action in cluster.waiting:
        if isinstance(action, act.Commit):
            cluster.say(node, ev.CommitEnded(job=KEY, save=ONE, problem=MISSING))
    cluster.waiting = [entry for entry in cluster.waiting if not isinstance(entry[1], act.Commit)]
    cluster.settle()


def notices(cluster, rank):
    return [m.notice for r, m in cluster.node(rank).told if r == rank and isinstance(m, Progress) and m.notice]


def test_a_vote_that_is_written_after_the_coordinator_was_lost_is_committed_too(votes):
    vote(votes, "acd")
    lose_coordinator(votes)
    assert commits(votes) == []
    assert ["not durable yet" in notice for notice in notices(votes, 1)] == [True], "its vote may be the last"
    vote(votes, "b")
    votes.tick(1.0)
    assert [name for name, _ in commits(votes)] == ["b"]


def test_a_commit_that_fails_is_made_again_after_pauses_that_grow(votes):
    vote(votes, "abc")
    lose_coordinator(votes)
    at = []
    for _ in range(200):
        if commits(votes):
            at.append(votes.now)
            fail_commits(votes)
        votes.tick(0.1)
    pauses = [after - before for before, after in pairwise(at)]
    assert [round(pause) for pause in pauses[:4]] == [1, 2, 4, 8]
    assert len(notices(votes, 1)) == 1, "ranks learn of the first failure, and of no other"
    assert MISSING in notices(votes, 1)[0]
    vote(votes, "d")
    votes.held = set()
    votes.tick(LONG_S)
    assert votes.store.committed == {ONE: 4}
    assert "durable" in votes.milestones(2, ONE), "the others of its set hear it"


def test_a_vote_that_cannot_be_written_is_no_secret(votes):
    vote(votes, "acd")
    lose_coordinator(votes)
    votes.waiting.clear()
    votes.say(votes.nodes["b"], ev.VoteWritten(job=KEY, save=ONE, problem="ENOSPC"))
    votes.settle()
    assert ["ENOSPC" in notice for notice in notices(votes, 1)] == [False, True]


def test_a_save_of_a_job_that_was_taken_over_is_not_committed_again_and_ranks_learn_why(votes):
    vote(votes, "abcd")
    lose_coordinator(votes)
    assert [name for name, _ in commits(votes)] == ["b"]
    votes.waiting.clear()
    votes.say(votes.nodes["b"], ev.CommitEnded(job=KEY, save=ONE, taken_over=7))
    votes.settle()
    votes.tick(LONG_S)
    assert commits(votes) == []
    assert ["incarnation 7 took the job over" in notice for notice in notices(votes, 1)] == [True]


def test_a_commit_that_fails_for_days_is_made_again_every_minute(votes):
    vote(votes, "abc")
    lose_coordinator(votes)
    for _ in range(1100):
        assert commits(votes)
        fail_commits(votes)
        votes.tick(LONG_S)
        votes.tick(1.0)


def test_ranks_of_all_nodes_learn_that_the_commit_is_late(votes):
    vote(votes, "acd")
    lose_coordinator(votes)
    votes.tick(LONG_S)
    votes.tick(LONG_S)
    assert [len(notices(votes, rank)) for rank in (2, 3)] == [1, 1]
    assert "not durable yet" in notices(votes, 2)[0]


def test_links_of_other_nodes_that_break_do_not_put_the_commit_off():
    cluster = ACluster("abcdef", set_size=2, outside_wait_s=0.5)
    cluster.connect("abcdef")
    cluster.held = {act.Commit}
    cluster.stage(ONE)
    for name in "da":
        cluster.lose(name)
    cluster.waiting.clear()
    for _ in range(8):
        cluster.tick(0.5)
        cluster.say(cluster.nodes["b"], ev.PeerDown(job=KEY, node="e"))
        cluster.say(cluster.nodes["b"], ev.PeerUp(job=KEY, node="e"))
        cluster.settle()
    assert "b" in [name for name, _ in commits(cluster)]
