"""Replicas compare all bytes while training goes on, under the proof that nobody writes to them."""

import re

import pytest

from ckptd.cli.listing import _listing
from ckptd.shared.base.ids import JobKey
from ckptd_client._local.late_memory import late_memory
from ckptd_client._local.page_guard import NoProofError
from tests.cluster import Node
from tests.interop.late_replica_ranks import COUNT, WRITTEN
from tests.interop.launch import on_ranks


@pytest.fixture
def node(tmp_path, request):
    try:
        late_memory()
    except NoProofError as error:
        pytest.skip(str(error))
    with Node(str(tmp_path)) as node:
        node.start("--keep-last", "100", "--balance", request.param)
        yield node


def run(node, what):
    """How each save ended and how much was read late, by rank and step; the rows of `ckptd list` by step."""
    out = on_ranks(node, 2, "late_replica_ranks.py", what)
    lines = re.findall(r"rank (\d) step (\d) late (\d+): (.*)", out)
    assert len(lines) == 12, out
    rows = {row.step: row for row in _listing(JobKey(node.store, "late")).checkpoints}
    return {(int(rank), int(step)): (int(nbytes), end) for rank, step, nbytes, end in lines}, rows


@pytest.mark.parametrize("node", ["rows", "off"], indirect=True, ids=["each its share", "each all of its own"])
def test_all_bytes_of_replicas_are_compared_while_training_goes_on(node):
    saves, rows = run(node, "undisturbed")
    assert {end for _, end in saves.values()} == {"durable"}
    assert all(nbytes > 2 * COUNT for (_, step), (nbytes, _) in saves.items() if step > 1), saves
    assert {row.replicas for row in rows.values()} == {"all"}
    assert len(rows) == 6


@pytest.mark.parametrize("node", ["rows"], indirect=True)
def test_who_writes_to_what_another_rank_copies_is_found(node):
    """Values that are back when the digest is compared: no digest shows that."""
    saves, rows = run(node, "written")
    assert WRITTEN not in rows
    assert "'w': it was written" in saves[1, WRITTEN][1]
    assert {end for (_, step), (_, end) in saves.items() if step != WRITTEN} == {"durable"}
    assert saves[1, WRITTEN + 1][0] == 0, "from then on it is read before save returns"
    assert saves[0, WRITTEN + 1][0] > 0
