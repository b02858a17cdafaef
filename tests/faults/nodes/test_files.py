"""A trainer's files on four nodes: any rank reads those of all, also of a lost node, before they are drained."""

import pytest

from tests.faults.nodes.clusters import Cluster

pytestmark = [pytest.mark.faults, pytest.mark.timeout(90), pytest.mark.xdist_group("nodes-files")]

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
