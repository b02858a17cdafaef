"""Ranks that do not save while those of another node do: both nodes' ranks hear whom a save waits for, and where."""

import pytest

from tests.cluster import wait_for
from tests.faults.nodes.clusters import Cluster, Ranks

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240), pytest.mark.xdist_group("nodes-missing")]

CALL = "every rank must call save (one rank alone: connect(alone=True))"
HOMES = "aabb"


@pytest.fixture(name="ranks")
def fixture_ranks(four: Cluster, request: pytest.FixtureRequest):
    ranks = four.ranks(HOMES, request.node.name)
    ranks.connect()
    yield ranks
    four.end(ranks)
    wait_for(lambda: all(node.slots() == [] for node in four.nodes.values()))


def said(ranks: Ranks, rank: int) -> list[str]:
    return [text for text in ranks[rank].call("logs") if " waits for " in text]


def heard(ranks: Ranks, rank: int) -> str:
    ranks[rank].call("sleep", 5.2)  # nobody calls the client meanwhile
    return str(wait_for(lambda: said(ranks, rank), 4, every_s=0.2)[0])


def places(ranks: Ranks, first: int) -> list[str]:
    return [f"{ranks[first].pid}", f"{ranks[first + 1].pid}"]


def test_ranks_of_another_node_are_named_with_that_node(four: Cluster, ranks: Ranks):
    for rank in (0, 1):
        ranks[rank].call("save", 10)
    text = heard(ranks, 0)
    assert text.startswith(f"ckptd: step 10 waits for ranks 2-3: {CALL}; ranks 2-3 are pids ")
    assert text.endswith(" on b")
    assert all(pid in text for pid in places(ranks, 2))
    assert said(ranks, 1)
    assert said(ranks, 2) == []
    reasons = [c.reason for c in four.job("a", ranks.job).checkpoints]
    assert reasons == [text.removeprefix("ckptd: step 10 ")]


def test_ranks_away_from_the_coordinator_learn_it_too(ranks: Ranks):
    for rank in (2, 3):
        ranks[rank].call("save", 10)
    text = heard(ranks, 2)
    assert text.startswith(f"ckptd: step 10 waits for ranks 0-1: {CALL}; ranks 0-1 are pids ")
    assert text.endswith(" on a")
    assert said(ranks, 0) == []


def test_a_coordinator_whose_daemon_died_is_named_on_the_other_nodes(four: Cluster, ranks: Ranks):
    for rank in (2, 3):
        ranks[rank].call("save", 10)
    four.nodes["a"].kill()
    for rank in (2, 3):
        text = str(wait_for(lambda rank=rank: slept(ranks, rank, " waits for node a"), 8, every_s=0.2))
        assert text == (
            "ckptd: step 10 waits for node a, whose daemon coordinates the job and does not answer: ckptd status there"
        )
    four.start("a")
    for rank in (0, 1):
        ranks[rank].call("save", 10)
    ranks.call("wait", 10, "durable")


def slept(ranks: Ranks, rank: int, what: str) -> str:
    ranks[rank].call("sleep", 0.2)
    return next((text for text in ranks[rank].call("logs") if what in text), "")
