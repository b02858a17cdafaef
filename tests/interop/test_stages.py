"""Pipeline stages of the same names, replicated within: slices, each stage's own values back, differences named.

FAULTS=long: on eight ranks too, where a stage has shards.
"""

import os

import pytest

from tests.faults.nodes.clusters import a_cluster
from tests.interop.launch import on_homes, on_ranks

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]

LONG = os.environ.get("FAULTS") == "long"
SCRIPT = "stage_ranks.py"
RANKS = [4, pytest.param(8, marks=pytest.mark.skipif(not LONG, reason="FAULTS=long"))]


def run(node, ranks, *args):
    out = on_ranks(node, ranks, SCRIPT, *args)
    assert out.count("did it") == ranks, out


@pytest.mark.parametrize("ranks", RANKS)
def test_each_stage_saves_slices_and_gets_its_own_back_from_memory_and_from_the_store(fresh_node, tmp_path, ranks):
    node, folder = fresh_node, str(tmp_path)
    run(node, ranks, "save", folder, "durable")
    run(node, 2, "fewer", folder)
    node.stop()
    node.lose_arena()
    node.start()
    run(node, ranks, "load", folder, "pfs")


@pytest.mark.parametrize("ranks", RANKS)
def test_replicas_of_one_stage_that_differ_are_named_and_save_all_of_their_own(node, tmp_path, ranks):
    run(node, ranks, "differ", str(tmp_path))


def test_a_stage_is_restored_from_its_nodes_and_rebuilt_when_one_is_lost():
    with a_cluster(None, CKPTD_REDUNDANCY="xor", CKPTD_PEER_TIMEOUT_S="10") as cluster:
        folder = cluster.directory
        on_homes([cluster.nodes[name] for name in "abcd"], SCRIPT, "save", folder, "protected")
        on_homes([cluster.nodes[name] for name in "abcd"], SCRIPT, "load", folder, "peer")
        cluster.replace("c", "e")
        on_homes([cluster.nodes[name] for name in "abed"], SCRIPT, "load", folder, "peer,peer,rebuilt,peer")
