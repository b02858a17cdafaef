"""More than one node lost, at once or one while the other is rebuilt; commits that others finish."""

import os
import signal

import pytest

from ckptd.checkpoint.verify import verify_path
from ckptd.shared.base.wording import named_ranks
from tests.cluster import wait_for
from tests.faults.nodes.clusters import Cluster, a_cluster
from tests.long_form import LONG, in_long

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240), pytest.mark.xdist_group("nodes-two")]


@pytest.fixture(name="four", scope="module")
def fixture_four(zygote):
    """a, b, c, d; what is fetched of d passes a relay."""
    with a_cluster(zygote, relayed="d") as cluster:
        yield cluster


@pytest.mark.parametrize("lost", ["ac", "bd"] if LONG else ["ac"])
@pytest.mark.parametrize("scheme", ["double", "xor"])
def test_two_nodes_lost_at_once(four: Cluster, scheme: str, lost: str):
    job = f"two-{scheme}-{lost}"
    ranks = four.ranks("abcd", job)
    ranks.connect(redundancy=scheme)
    ranks.call("load")
    ranks.save(10, "protected", "durable")
    ranks.kill()
    for name in lost:
        four.replace(name)
    ranks = four.ranks("abcd", job)
    ranks.connect(redundancy=scheme)
    found = ranks.load()
    away = "rebuilt" if scheme == "double" else "pfs"
    assert [f["tier"] for f in found] == [away if name in lost else "arena" for name in "abcd"]
    notes = " ".join(note for f in found for note in f["notes"])
    assert (notes == "") == (scheme == "double"), notes
    if scheme == "xor":
        ranks_lost = named_ranks("abcd".index(name) for name in lost)
        assert f"no node that answers has what {ranks_lost} saved" in notes, notes
        assert "read from the store" in notes, notes
    ranks.save(20, "protected", "durable")
    four.end(ranks)


def test_two_lost_under_xor_with_nothing_on_the_store_falls_back_to_what_is_there_and_says_why(four: Cluster):
    ranks = four.ranks("abcd", "older")
    ranks.connect(drain_every=1000)
    ranks.call("load")
    ranks.save(10, "durable")
    ranks.save(20, "protected")
    ranks.kill()
    four.replace("b")
    four.replace("c")
    ranks = four.ranks("abcd", "older")
    ranks.connect()
    found = ranks.load()
    assert {f["step"] for f in found} == {10}
    notes = " ".join(found[0]["notes"])
    assert "step 20" in notes, found
    assert "ranks 1-2 " in notes, found
    ranks.save(30, "protected", "durable")
    four.end(ranks)


REBUILDS = ["rebuild.before-seal", *in_long("rebuild.half-pulled", "rebuild.slot-made", "rebuild.after-seal")]


@pytest.mark.parametrize("point", REBUILDS)
def test_the_node_that_rebuilds_is_lost_too(four: Cluster, point: str):
    ranks = four.ranks("abcd", point)
    ranks.connect()
    ranks.call("load")
    ranks.save(10, "protected", "durable")
    ranks.kill()
    four.lose("b")
    four.add("b", CKPTD_FAILPOINT=point)
    ranks = four.ranks("abcd", point)
    ranks.connect()
    ranks.start("load")
    assert four.nodes["b"].daemon.wait(60) == -signal.SIGKILL
    four.replace("b")
    ranks.kill()
    ranks = four.ranks("abcd", point)
    ranks.connect()
    found = ranks.load()
    assert [f["tier"] for f in found] == ["arena", "rebuilt", "arena", "arena"]
    ranks.save(20, "protected", "durable")
    four.end(ranks)


@pytest.mark.parametrize("scheme", ["double", "xor"] if LONG else ["double"])
def test_a_node_is_lost_of_which_a_rebuild_takes_bytes(four: Cluster, scheme: str):
    """Under double the second loss is made good too; under xor the lost ones come from the store."""
    job = f"source-{scheme}"
    ranks = four.ranks("abcd", job)
    ranks.connect(redundancy=scheme)
    ranks.call("load")
    ranks.save(10, "protected", "durable")
    ranks.kill()
    four.replace("b")
    bulk = four.relays["d"].bulk
    bulk.held = True
    ranks = four.ranks("abcd", job)
    ranks.connect(redundancy=scheme)
    before = bulk.asked
    ranks.start("load")
    wait_for(lambda: bulk.asked > before)
    four.lose("d")
    bulk.held = False
    ranks.kill()  # as a launcher does when one of them has ended
    four.add("d")
    ranks = four.ranks("abcd", job)
    ranks.connect(redundancy=scheme)
    found = ranks.load()
    away = "rebuilt" if scheme == "double" else "pfs"
    assert [f["tier"] for f in found] == ["arena", away, "arena", away]
    ranks.save(20, "protected", "durable")
    four.end(ranks)


COMMITS = [
    "commit.before-rename",
    "commit.index-named",
    *in_long("commit.before-manifest", "commit.index-unsynced", "commit.after-rename"),
]


@pytest.mark.parametrize("point", COMMITS)
def test_others_finish_the_commit_of_a_coordinator_that_is_lost(four: Cluster, tmp_path, point: str):
    """What all voted for becomes durable, and ranks of the node that did it are told."""
    marker = str(tmp_path / "marker")
    four.restart("a", CKPTD_FAILPOINT=f"{point}@{marker}")
    ranks = four.ranks("abcd", point)
    ranks.connect()
    ranks.call("load")
    ranks.call("save", 10)
    wait_for(lambda: os.path.exists(marker))
    four.replace("a")
    wait_for(lambda: all(rank.call("handle", 10)[0] == "durable" for rank in ranks.all[1:]))
    home = os.path.join(four.store, point)
    assert [name for name in os.listdir(home) if not name.startswith(".") and name != "latest"], os.listdir(home)
    ranks.kill()
    ranks = four.ranks("abcd", point)
    ranks.connect()
    found = ranks.load()
    assert {f["step"] for f in found} == {10}
    ranks.save(20, "protected", "durable")
    four.end(ranks)
    assert verify_path(home).problems == []
