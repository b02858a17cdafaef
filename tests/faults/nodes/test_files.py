"""A trainer's files on four nodes: any rank reads those of all, also of a lost node, before they are drained."""

import os

import pytest

from ckptd.shared.format import arena_paths
from tests.cluster import wait_for
from tests.faults.nodes.clusters import Cluster

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240), pytest.mark.xdist_group("nodes-files")]

LONG = os.environ.get("FAULTS") == "long"
NAMES = "abcd"


def test_files_of_a_lost_node_come_from_parity(four: Cluster):
    ranks = four.ranks(NAMES, "files")
    ranks.connect(drain_every=1000)
    ranks.call("save_files", 0)
    ranks.call("wait", 0, "durable")
    ranks.call("save_files", 7)
    ranks.call("wait", 7, "protected")
    ranks.kill()
    four.replace("b")
    ranks = four.ranks(NAMES, "files")
    ranks.connect(drain_every=1000)
    found = ranks.call("load_files", len(NAMES))
    assert [(one["step"], one["intact"]) for one in found] == [(7, True)] * len(NAMES), found
    assert {one["tier"] for one in found} <= {"arena", "rebuilt", "peer"}
    four.end(ranks)


def names_of(ranks):
    return {f"empty_{rank}" for rank in ranks} | {f"state_{rank}.pt" for rank in ranks}


@pytest.mark.parametrize("whole", [True, False] if LONG else [False])
def test_files_of_all_nodes_are_published(four: Cluster, whole: bool):
    """All at once by the node that commits; beside other files each node puts what its own ranks have named."""
    out = os.path.join(four.directory, f"out-{whole}")
    ranks = four.ranks(NAMES, f"published-{whole}")
    ranks.connect()
    ranks.call("save_files", 0, directory=out, whole=whole)
    ranks.call("wait", 0, "durable")
    wait_for(lambda: names_of(range(len(NAMES))) <= set(os.listdir(out)))
    wait_for(lambda: not [name for node in four.nodes.values() for name in due(node)])
    four.end(ranks)


def test_another_node_finishes_what_the_one_that_committed_did_not_live_to_do(four: Cluster):
    """It has it from ranks of its own."""
    out, marker = os.path.join(four.directory, "out"), os.path.join(four.directory, "marker-publish")
    four.restart("a", CKPTD_FAILPOINT=f"publish.before-rename@{marker}")
    ranks = four.ranks(NAMES, "finished")
    ranks.connect()
    ranks.call("save_files", 0, directory=out)
    wait_for(lambda: os.path.exists(marker))
    assert not os.path.exists(out)
    four.lose("a")
    wait_for(lambda: os.path.exists(out))
    assert names_of(range(len(NAMES))) <= set(os.listdir(out))
    assert not [name for name in os.listdir(out) if ".tmp-" in name]


def due(node):
    walk = os.walk(os.path.join(node.arena, arena_paths.JOBS))
    return [name for _, _, names in walk for name in names if name.endswith(arena_paths.DUE_SUFFIX)]
