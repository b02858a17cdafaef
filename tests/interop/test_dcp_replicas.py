"""Saves through DCP, which leaves what ranks hold alike to one of them: compared all the same, or marked.

FAULTS=long adds jobs of four ranks.
"""

import pytest

from ckptd.cli.listing import _listing
from ckptd.shared.base.ids import JobKey
from tests.cluster import Node
from tests.interop.launch import on_ranks
from tests.long_form import in_long

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240)]

SCRIPT = "dcp_replica_ranks.py"
DRIFTS = {2, 4, 5}


@pytest.fixture
def node(tmp_path):
    with Node(str(tmp_path)) as node:
        node.start("--keep-last", "100")
        yield node


def said(node, ranks, way, verify="drained"):
    """What the record of each save says of its replicas, by step."""
    out = on_ranks(node, ranks, SCRIPT, "save", way, verify)
    assert out.count("did it") == ranks, out
    return {row.step: row.replicas for row in _listing(JobKey(node.store, f"dcp-{way}-{verify}")).checkpoints}


@pytest.mark.parametrize(
    ("way", "ranks"),
    [("new", 2), ("cached", 2), ("staged", 2), *in_long(("sync", 2), ("sync", 4), ("cached", 4), ("staged", 4))],
)
def test_replicas_that_differ_are_marked_and_others_are_not(node, way, ranks):
    records = said(node, ranks, way)
    assert records == {step: "differing" if step in DRIFTS else "all" for step in range(1, 7)}
    out = on_ranks(node, ranks, SCRIPT, "load", way, "2,4,5")
    assert out.count("did it") == ranks, out


@pytest.mark.parametrize(
    ("way", "verify"), [("staged", "3"), ("sync", "off"), *in_long(("sync", "3"), ("staged", "off"))]
)
def test_what_was_not_compared_in_full_is_marked(node, way, verify):
    records = said(node, 2, way, verify)
    full = {1: "all", 4: "differing"} if verify == "3" else {}
    assert {step: records[step] for step in full} == full
    assert len(records) == 6
    assert all(records[step] in {"window", "differing"} for step in records.keys() - full.keys()), records


def test_what_is_held_once_is_in_no_doubt(node):
    assert said(node, 2, "sharded") == dict.fromkeys(range(1, 7), "")
