"""A session that waits to join, and whose ranks or nodes are gone before it is the job: the rows of its table."""

from collections import Counter

import pytest

from ckptd.core import actions as act
from ckptd.core import events as ev
from tests.states import reached
from tests.unit.core.nodes.a_cluster import KEY, ONE, ACluster


@pytest.fixture
def rows():
    with reached(Counter()) as found:
        yield found


def ends(cluster, rank):
    cluster.say(cluster.node(rank), ev.RankGone(job=KEY, rank=rank, session=cluster.sid))
    cluster.settle()


def test_a_session_whose_nodes_are_lost_while_its_number_comes_is_not_the_job(rows):
    cluster = ACluster("ab")
    cluster.connect("ab")
    cluster.stage(ONE)
    cluster.end_ranks()
    before = cluster.nodes["a"].job.coordinator.sessions.session
    cluster.held = {act.TakeIncarnation}
    cluster.connect("ab", expect=False)
    ends(cluster, 0)
    cluster.lose("b")
    cluster.release()
    assert rows["admission: numbering -> -: its nodes do not answer"] == 1
    assert cluster.nodes["a"].job.coordinator.sessions.session == before


def test_a_session_that_waits_for_another_and_ends_is_over(rows):
    cluster = ACluster("ab")
    cluster.connect("ab")
    cluster.connect("ab", expect=False)
    sessions = cluster.nodes["a"].job.coordinator.sessions
    before = sessions.session
    ends(cluster, 0)
    assert rows["admission: placed -> gathering: a rank ended"] == 1
    ends(cluster, 1)
    assert rows["admission: gathering -> -: no rank waits any more"] == 1
    assert (sessions.session, sessions.taking) == (before, "")
