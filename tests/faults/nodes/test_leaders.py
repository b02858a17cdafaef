"""Real daemons, one of which leads another: what happens to the leader is no matter of the others."""

import os
import re

import pytest

from tests.cluster import wait_for
from tests.faults.nodes.clusters import Cluster, Ranks
from tests.signals import resume, stop

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240), pytest.mark.xdist_group("nodes-leaders")]
JOBS = iter(range(1000))
PATHS = {"a": "b", "b": "a"}  # d leads b; c is in the coordinator's set


class Led(Cluster):
    """Daemons that have leaders. ``marks``: by node, how long the log was before the present job."""

    marks: dict[str, int]
    program = (os.path.join(os.path.dirname(__file__), "led.py"),)


@pytest.fixture(name="led", scope="module")
def fixture_led(zygote, tmp_path_factory):
    """a, b, c, d in sets of two."""
    with Led(str(tmp_path_factory.mktemp("led")), zygote, CKPTD_SET_SIZE="2") as cluster:
        yield cluster


@pytest.fixture(name="ranks")
def fixture_ranks(led: Led):
    """Connected, with a save that is durable."""
    led.marks = {name: len(node.log_text()) for name, node in led.nodes.items()}
    ranks = led.ranks("abcd", f"led-{next(JOBS)}")
    ranks.connect(redundancy="xor")
    ranks.call("load")
    ranks.save(10, "protected", "durable")
    yield ranks
    led.end(ranks)


def paths(led: Led) -> dict[str, str]:
    """By node: the way of its packets for the other one of PATHS, as its log says it last."""
    logs = {name: led.nodes[name].log_text()[led.marks[name] :] for name in PATHS}
    found = {name: re.findall(rf" path node={PATHS[name]} .*by=(\S+)", log) for name, log in logs.items()}
    return {name: ways[-1] if ways else "" for name, ways in found.items()}


def await_leader(led: Led) -> None:
    """Until the packets of b go by d."""
    wait_for(lambda: paths(led) == {"a": "d", "b": "d"}, every_s=0.1)  # it reads logs


def unreachable(led: Led, ranks: Ranks) -> list[str]:
    """Nodes that the coordinator does not reach."""
    return [node.node for node in led.job("a", ranks.job).nodes if not node.reachable]


def test_a_leader_that_is_stopped_during_saves_is_left_and_gone_back_to(led: Led, ranks: Ranks):
    await_leader(led)
    ranks.start("save", 20)
    stop(led.nodes["d"].daemon.pid)
    try:
        wait_for(lambda: paths(led) == {"a": "direct", "b": "direct"}, every_s=0.1)
        assert "b" not in unreachable(led, ranks)
    finally:
        resume(led.nodes["d"].daemon.pid)
    ranks.results()
    ranks.save(30, "protected", "durable")
    await_leader(led)


def test_a_leader_that_is_killed_during_a_save_costs_the_others_nothing(led: Led, ranks: Ranks):
    await_leader(led)
    ranks.start("save", 20)
    led.nodes["d"].kill()
    wait_for(lambda: paths(led) == {"a": "direct", "b": "direct"})
    wait_for(lambda: unreachable(led, ranks) == ["d"])
    led.start("d")
    ranks.results()
    ranks.save(30, "protected", "durable")
    await_leader(led)


def test_the_coordinators_daemon_is_killed_during_a_save(led: Led, ranks: Ranks):
    await_leader(led)
    ranks.start("save", 20)
    led.marks = {name: len(node.log_text()) for name, node in led.nodes.items()}
    led.restart("a")
    ranks.results()
    ranks.save(30, "protected", "durable")
    await_leader(led)
