"""Nodes of earlier sessions are named once, by the topology that had them: not by each node that was in it."""

import pytest

from ckptd.core import actions as act
from ckptd.core import events as ev
from tests.unit.core.nodes.a_cluster import ONE, TWO, ACluster

NAMES = "abcdefghijkl"


def reports(cluster):
    """What other nodes say that they have, from here on."""
    found, perform = [], cluster.perform

    def watched(node, action):
        if isinstance(action, act.ToNode) and isinstance(action.message, ev.Report) and action.node != node.name:
            found.extend([(node.name, action.message.event)] * isinstance(action.message.event, ev.NodeHas))
        perform(node, action)

    cluster.perform = watched
    return found


@pytest.fixture
def job():
    """Its ranks ended after a save, and node l is gone."""
    cluster = ACluster(NAMES)
    cluster.connect(NAMES)
    cluster.stage(ONE)
    cluster.end_ranks()
    return cluster


def barrier(job, name="a"):
    return job.nodes[name].job.coordinator.inventory


@pytest.mark.parametrize("homes", [NAMES, NAMES[:-1] + "m", NAMES[:6]])
def test_no_node_names_those_that_its_coordinator_knows(job, homes):
    job.add("m")
    found = reports(job)
    job.connect(homes)
    assert {name for name, _ in found} >= set(homes[1:]) - {"m"}
    assert [(name, fact.former) for name, fact in found if fact.former] == []
    assert not barrier(job).doubts


def test_a_former_node_that_is_silent_is_still_waited_for(job):
    job.add("m")
    job.cut_off("l")
    job.connect(NAMES[:-1] + "m")
    assert barrier(job)._silent == {"l"}
    assert barrier(job).doubts


def test_a_coordinator_that_restarts_learns_of_it_from_the_others(job):
    job.add("m")
    job.cut_off("l")
    job.connect(NAMES[:-1] + "m")
    job.nodes["a"].kept = ev.TopologyKept(
        **{name: getattr(job.nodes["a"].kept, name) for name in ("job", "session", "topology", "epoch", "since")}
    )
    found = reports(job)
    job.nodes["a"].restart()
    job.return_ranks("a")
    said = {name: fact.former for name, fact in found}
    assert said == {name: ("l",) if name != "m" else () for name in [*NAMES[1:-1], "m"]}
    assert barrier(job)._silent == {"l"}


def test_a_node_outside_that_was_away_when_the_session_opened_is_met_again_after_all_daemons_restart():
    """The coordinator alone can have its address: it is in no topology of the session."""
    job = ACluster("abcd")
    job.connect("abcd")
    job.stage(ONE)
    job.held = {act.Drain, act.Encode}
    job.stage(TWO)
    job.end_ranks()
    job.held |= {act.TakeIncarnation}
    job.connect("abca", expect=False)
    job.cut_off("d")
    job.held.remove(act.TakeIncarnation)
    waiting, job.waiting = job.waiting, []
    for node, action in waiting:
        job.perform(node, action)
    job.settle()
    job.heal("d")
    job.end_ranks()
    for name in "abcd":
        job.nodes[name].restart()
    job.connect("abca")
    assert {answer.save for answer in job.load()} == {TWO}
