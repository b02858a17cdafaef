"""All nodes are told the end of a save once; again only a node that delivers it late."""

import pytest

from ckptd.core import actions as act
from ckptd.core import events as ev
from ckptd.shared.base.ids import SaveId
from tests.unit.core.nodes.a_cluster import KEY, ONE, ACluster, saves_at

NAMES = "abcdefghijkl"


@pytest.fixture
def job():
    """A rank on each node, and which ends other nodes than the coordinator's were told from here on."""
    cluster = ACluster(NAMES)
    cluster.connect(NAMES)
    cluster.ends = []
    perform = cluster.perform

    def watched(node, action):
        if isinstance(action, act.ToNode) and isinstance(action.message, ev.SaveEnded):
            cluster.ends.append((action.node, action.message.save))
        perform(node, action)

    cluster.perform = watched
    return cluster


def test_of_nodes_that_are_late_each_learns_the_end_again(job):
    skipped = ev.SaveSkipped(job=KEY, rank=0, session=job.sid, request=job.seq(), save=ONE, reason="no slot")
    job.say(job.nodes["a"], skipped)
    job.settle()
    assert sorted(job.ends) == [(name, ONE) for name in NAMES[1:]]
    job.ends.clear()
    job.stage(ONE, list(range(1, len(NAMES))))
    assert sorted(job.ends) == [(name, ONE) for name in NAMES[1:]]
    assert not any(ONE in saves_at(job, name) for name in NAMES)


def test_of_nodes_that_disagree_about_a_step_each_learns_the_end_again(job):
    other = SaveId(ONE.incarnation, ONE.counter, ONE.step + 1, ONE.run)
    job.stage(ONE, [0])
    job.stage(other, [1])
    assert {save for _, save in job.ends} == {ONE, other}
    job.ends.clear()
    job.stage(ONE, list(range(2, len(NAMES))))
    assert sorted(job.ends) == [(name, ONE) for name in NAMES[2:]]
    assert not any(saves_at(job, name) for name in NAMES)
