"""steps() and latest() answer alike on every node: the coordinator is asked, and an error says if it cannot be."""

import time

import pytest

from tests.cluster import wait_for
from tests.faults.nodes.clusters import Cluster, a_cluster
from tests.faults.ranks import RankError
from tests.signals import resume, stop

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240), pytest.mark.xdist_group("nodes-steps")]
MOST_S = 15.0  # the daemon's patience is 10


@pytest.fixture(name="two")
def fixture_two(zygote):
    with a_cluster(zygote, "ab", CKPTD_REDUNDANCY="none") as cluster:
        yield cluster


def started(two: Cluster):
    ranks = two.ranks("ab", sizes=[64 << 10])
    ranks.connect()
    return ranks


def test_every_node_names_the_same_steps_at_once(two: Cluster):
    """Asked as soon as a rank may know better: after its own wait, and after a barrier with one that has waited."""
    ranks = started(two)
    assert ranks.call("steps") == [[], []], "nothing was saved"
    assert ranks.call("latest") == [None, None]
    for step in (10, 20, 5):
        ranks.save(step, "durable")
        assert ranks.call("latest") == [step, step], "the newest save, whatever its number"
    assert ranks.call("steps") == [[5, 10, 20]] * 2
    two.end(ranks)


def test_a_new_start_knows_what_the_store_has(two: Cluster):
    ranks = started(two)
    ranks.save(10, "durable")
    two.end(ranks)
    for name in "ab":
        two.restart(name)
        two.await_daemon(name)
    ranks = started(two)
    assert ranks.call("steps") == [[10], [10]]
    assert ranks.call("latest") == [10, 10]
    two.end(ranks)


def test_a_coordinator_that_does_not_answer_is_an_error_with_its_name(two: Cluster):
    ranks = started(two)
    ranks.save(10, "durable")
    stop(two.nodes["a"].daemon.pid)
    try:
        for name in ("steps", "latest"):
            began = time.monotonic()
            with pytest.raises(RankError, match=r"node a, which coordinates job job, did not answer") as raised:
                ranks[1].call(name)
            assert raised.value.kind == "PeerError"
            assert "ckptd status --nodes" in str(raised.value), "what to type"
            assert time.monotonic() - began < MOST_S
    finally:
        resume(two.nodes["a"].daemon.pid)
    wait_for(lambda: ranks[1].call("latest") == 10)
    two.end(ranks)


def test_a_coordinator_that_restarts_meanwhile_answers(two: Cluster):
    ranks = started(two)
    ranks.save(10, "durable")
    two.nodes["a"].kill()
    ranks[1].start("latest")
    time.sleep(1.0)
    assert not ranks[1].done
    two.start("a")
    assert ranks[1].result(MOST_S) == 10
    two.end(ranks)
