"""Who runs where changes between two lives of a job; lives that overlap; jobs side by side."""

import pytest

from tests.cluster import wait_for
from tests.faults.nodes.clusters import KB, MB, PEER_TIMEOUT_S, Cluster
from tests.faults.ranks import RankError
from tests.long_form import LONG, in_long
from tests.signals import resume, stop

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240), pytest.mark.xdist_group("nodes-members")]


def lived(four: Cluster, job: str, homes: str, *milestones: str, **named):
    """A life of the job that ends in a crash with step 10."""
    ranks = four.ranks(homes, job, **named)
    ranks.connect()
    ranks.call("load")
    ranks.save(10, *milestones)
    ranks.kill()


def lives_on(four: Cluster, job: str, homes: str, step: int, tiers: list[str]) -> None:
    """The next life, which loads the step and ends in a crash with a newer one that memory alone protects."""
    ranks = four.ranks(homes, job)
    ranks.connect()
    assert [(f["step"], f["tier"]) for f in ranks.load()] == [(step, tier) for tier in tiers]
    ranks.save(step + 10, "protected")
    ranks.kill()


def lives(four: Cluster, job: str, homes: str, step: int = 10, **named) -> list[str]:
    """The last life, from the load of the step to its end; the tiers."""
    ranks = four.ranks(homes, job, **named)
    ranks.connect()
    found = ranks.load()
    assert {f["step"] for f in found} == {step}
    ranks.save(step + 10, "protected", "durable")
    four.end(ranks)
    wait_for(lambda: all(node.slots() == [] for node in four.nodes.values()))
    return [f["tier"] for f in found]


def test_ranks_come_back_elsewhere(four: Cluster):
    """On more nodes, in another order after a loss, on fewer nodes: from memory each time."""
    lived(four, "elsewhere", "aabb", "protected")
    lives_on(four, "elsewhere", "abcd", 10, ["arena", "peer", "peer", "peer"])
    four.replace("c")
    lives_on(four, "elsewhere", "badc", 20, ["peer", "peer", "rebuilt", "peer"])
    assert lives(four, "elsewhere", "badd", step=30) == ["arena", "arena", "arena", "peer"]


@pytest.mark.parametrize("lost", "abc" if LONG else "b")
def test_uneven_ranks_per_node(four: Cluster, lost: str):
    job, homes = f"uneven-{lost}", "aabbc"
    lived(four, job, homes, "protected")
    four.replace(lost)
    assert lives(four, job, homes) == ["rebuilt" if home == lost else "arena" for home in homes]


@pytest.mark.parametrize("lost", "cd" if LONG else "c")
def test_shards_of_very_different_size(four: Cluster, lost: str):
    """Several saves, so that zeros behind short shards are made in buffers that had something else in them."""
    sizes = (4 * KB, 64 * KB, 24 * MB, 8)
    ranks = four.ranks("abcd", f"sizes-{lost}", sizes=sizes)
    ranks.connect()
    ranks.call("load")
    for step in (1, 2, 10):
        ranks.save(step, "protected")
    ranks.kill()
    four.replace(lost)
    expected = ["rebuilt" if home == lost else "arena" for home in "abcd"]
    assert lives(four, f"sizes-{lost}", "abcd", sizes=sizes) == expected


def test_another_world_size_after_a_loss(four: Cluster):
    ranks = four.ranks("abcd", "world")
    ranks.connect(drain_every=1000)
    ranks.call("load")
    ranks.save(10, "durable")
    ranks.save(20, "protected")
    ranks.kill()
    four.replace("b")
    ranks = four.ranks("abc", "world")
    ranks.connect()
    try:
        found = ranks.call("load", timeout_s=10)
        assert [(f["step"], f["tier"]) for f in found] == [(20, "rebuilt")] * 3, found
        four.end(ranks)
    finally:  # nothing of the job may be left to the tests that follow
        ranks.kill()
        for name in "abcd":
            four.replace(name)


@pytest.mark.parametrize("homes", ["ab", *in_long("abc")])
def test_a_load_that_is_not_strict(four: Cluster, homes: str):
    """From memory too, where each rank knows its own image only: whether the others have what it lacks is looked up."""
    ranks = four.ranks("ab", f"loose-{homes}", sizes=[64 << 10])
    ranks.connect()
    ranks.save(10, "staged")
    ranks.kill()
    ranks = four.ranks(homes, f"loose-{homes}", sizes=[64 << 10])
    ranks.connect()
    for rank, found in enumerate(ranks.call("load_what_both_have")):
        assert found["step"] == 10
        assert found["intact"] or rank == 2, "the third rank was none: it goes on as rank 0"
        assert "state['new']: not in the checkpoint, and kept as it was" in found["notes"], found
        assert "state['name']: not in the state, and left out" in found["notes"], found
    four.end(ranks)


def test_two_jobs_on_the_same_nodes_lose_one(four: Cluster):
    for job, step, sizes in (("one", 10, (64 * KB,)), ("two", 15, (300 * KB, 8 * KB))):
        ranks = four.ranks("abcd", job, sizes=sizes)
        ranks.connect()
        ranks.call("load")
        ranks.save(step, "protected", "durable")
        if job == "one":
            first = ranks
    first.save(20, "protected")
    first.kill()
    ranks.kill()
    four.replace("b")
    for job, step, sizes in (("two", 15, (300 * KB, 8 * KB)), ("one", 20, (64 * KB,))):
        ranks = four.ranks("abcd", job, sizes=sizes)
        ranks.connect()
        found = ranks.load()
        assert [(f["step"], f["tier"]) for f in found] == [
            (step, "rebuilt" if name == "b" else "arena") for name in "abcd"
        ]
        ranks.save(30, "protected", "durable")
        four.end(ranks)


def test_ranks_that_were_replaced_are_refused(four: Cluster):
    old = four.ranks("abcd", "twice")
    old.connect()
    old.call("load")
    old.save(10, "protected", "durable")
    new = four.ranks("abcd", "twice")
    new.connect(takeover=True)
    assert {f["step"] for f in new.load()} == {10}
    for rank in old.all:
        with pytest.raises(RankError):  # the slot that it was granted is gone
            rank.call("save_staged", 20, 5.0)
        with pytest.raises(RankError, match=rf"another process is rank {rank.rank} of the job now"):
            rank.call("save_staged", 30, 5.0)
    new.save(20, "protected", "durable")
    old.kill()
    four.end(new)


def test_a_node_that_froze_wakes_up_in_a_job_that_went_on_without_it(four: Cluster):
    old = four.ranks("abcd", "frozen")
    old.connect()
    old.call("load")
    old.save(10, "protected", "durable")
    frozen = [four.nodes["d"].daemon.pid, old[3].pid]
    for pid in frozen:
        stop(pid)
    for rank in old.all[:3]:
        rank.kill()
    four.add("x")
    try:
        wait_for(lambda: any(not n.reachable for n in four.job("a", "frozen").nodes), 3 * PEER_TIMEOUT_S + 5)
        new = four.ranks("abcx", "frozen")
        new.connect()
        found = new.load()
        assert [f["tier"] for f in found] == ["arena", "arena", "arena", "rebuilt"]
        new.save(20, "protected", "durable")
    finally:
        for pid in frozen:
            resume(pid)
    with pytest.raises(RankError, match="step 30 "):  # it was handed over before its daemon heard what went on
        old[3].call("save_staged", 30, 4.0)
    assert old[3].call("handle", 30)[0] is None
    said = []
    for step in (40, 50, 60):  # the first may still lack a slot that is gone: but one is told
        with pytest.raises(RankError) as raised:
            old[3].call("save_staged", step, 4.0)
        said.append(str(raised.value))
    assert any("another process is rank 3 of the job now" in text for text in said), said
    new.save(30, "protected", "durable")
    number = new[0].call("incarnation")
    reached = {(c.incarnation, c.milestone) for c in four.job("a", "frozen").checkpoints if c.step == 30}
    assert reached - {(number, "durable")} <= {(old_number, None) for old_number in range(number)}, reached
    old.kill()
    four.end(new)
    four.lose("x")
    four.replace("d")  # what it holds of the job that went on is its own affair


def test_a_daemon_restarted_where_no_rank_lives_any_more(four: Cluster):
    ranks = four.ranks("abcd", "restarted")
    ranks.connect()
    ranks.call("load")
    ranks.save(10, "protected", "durable")
    ranks.kill()
    four.restart("c")
    ranks = four.ranks("abcd", "restarted")
    ranks.connect()
    assert [(f["step"], f["tier"]) for f in ranks.load()] == [(10, "arena")] * 4
    four.end(ranks)
