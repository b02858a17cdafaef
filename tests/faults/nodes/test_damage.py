"""A flipped bit in a slot or in parity: found, named, made good where that can be, and in no restored shard."""

import glob
import os

import pytest

from ckptd.checkpoint.verify import verify_path
from ckptd.shared.format.slot import SEALS_NBYTES, decode_seals
from tests.cluster import Node, wait_for
from tests.faults.nodes.clusters import KB, Cluster, Ranks, a_cluster
from tests.flips import flip

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240), pytest.mark.xdist_group("nodes-damage")]

LONG = os.environ.get("FAULTS") == "long"
SCHEMES = ["xor", "double"] if LONG else ["xor"]
SIZES = (256 * KB, 512 * KB, 128 * KB, 300 * KB)


@pytest.fixture(name="four", scope="module")
def fixture_four(zygote):
    """a, b, c, d; what is fetched of c passes a relay."""
    with a_cluster(zygote, relayed="c") as cluster:
        yield cluster


def slot_of(node: Node, step: int) -> str:
    """The slot that has the step."""
    found = []
    for path in node.slots():
        with open(path, "rb") as file:
            file.seek(-SEALS_NBYTES, os.SEEK_END)
            seal = decode_seals(file.read())[2]
        if seal.save is not None and seal.save.step == step and seal.state != "free":
            found.append(path)
    (path,) = found
    return path


def parity_of(node: Node, job: str) -> str:
    (path,) = list(glob.glob(os.path.join(node.arena, "**", "p*-*.parity"), recursive=True))
    return path


def protected(four: Cluster, job: str, scheme: str) -> Ranks:
    ranks = four.ranks("abcd", job, sizes=SIZES)
    ranks.connect(redundancy=scheme)
    ranks.call("load")
    ranks.save(10, "protected", "durable")
    return ranks


def restored(four: Cluster, job: str, scheme: str) -> tuple[list[str], str]:
    """Tiers and notes of the next life, after which nothing is left."""
    ranks = four.ranks("abcd", job, sizes=SIZES)
    ranks.connect(redundancy=scheme)
    found = ranks.load()
    assert {f["step"] for f in found} == {10}
    ranks.save(20, "protected", "durable")
    four.end(ranks)
    wait_for(lambda: all(node.slots() == [] for node in four.nodes.values()))
    return [f["tier"] for f in found], "\n".join(note for f in found for note in f["notes"])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_in_a_slot_that_is_read_back_it_is_repaired_from_parity(four: Cluster, scheme: str):
    job = f"own-{scheme}"
    ranks = protected(four, job, scheme)
    ranks.kill()
    flip(slot_of(four.nodes["c"], 10), 60_000)
    tiers, notes = restored(four, job, scheme)
    assert tiers == ["arena", "arena", "rebuilt", "arena"], notes
    assert "rank 2" in notes


def test_in_a_slot_while_it_is_encoded_it_never_reaches_parity(four: Cluster):
    ranks = four.ranks("abcd", "encode", sizes=SIZES)
    ranks.connect()
    ranks.call("load")
    ranks.save(10, "protected", "durable")
    bulk = four.relays["c"].bulk
    bulk.cut()
    bulk.held = True
    before = bulk.asked
    ranks.save(20, "staged")
    wait_for(lambda: bulk.asked > before)
    flip(slot_of(four.nodes["c"], 20), 60_000)
    bulk.cut()
    bulk.held = False
    wait_for(lambda: any("slot r00002-" in e and "match" in e for e in four.job("a", "encode").errors))
    assert [c.step for c in four.job("a", "encode").checkpoints if c.protected] == [10]
    ranks.save(30, "protected", "durable")
    ranks.kill()
    four.replace("b")
    ranks = four.ranks("abcd", "encode", sizes=SIZES)
    ranks.connect()
    assert [(f["step"], f["tier"]) for f in ranks.load()] == [
        (30, "arena"), (30, "rebuilt"), (30, "arena"), (30, "arena")
    ]  # fmt: skip
    four.end(ranks)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("where", ["slot", "parity"])
def test_in_what_a_rebuild_needs(four: Cluster, scheme: str, where: str):
    job = f"source-{where}-{scheme}"
    ranks = protected(four, job, scheme)
    ranks.kill()
    node = four.nodes["c"]
    flip(slot_of(node, 10) if where == "slot" else parity_of(node, job), 50_000)
    four.replace("b")
    tiers, notes = restored(four, job, scheme)
    assert tiers[0] == tiers[3] == "arena"
    assert tiers[1] == "pfs", notes  # double could bear it, but a rebuild is not tried again without the damaged source
    assert "node c" in notes, notes


def test_in_the_index_of_a_checkpoint_it_costs_no_load(four: Cluster):
    """All that the index says the records of all ranks say too. Other ranks than those that saved read it."""
    ranks = four.ranks("abcd", "index", sizes=SIZES)
    ranks.connect()
    ranks.call("load")
    ranks.save(10, "durable")
    four.end(ranks)
    (path,) = glob.glob(os.path.join(four.store, "index", "step-*", "ckptd.*.index"))
    flip(path, os.path.getsize(path) // 2)
    assert [problem.path for problem in verify_path(os.path.dirname(path)).problems] == [path]
    ranks = four.ranks("abc", "index", sizes=SIZES)
    ranks.connect()
    assert {(f["step"], f["tier"]) for f in ranks.load()} == {(10, "pfs")}
    for said in ranks.call("logs"):
        assert [line for line in said if path in line and "all votes are read instead" in line], said
    four.end(ranks)
