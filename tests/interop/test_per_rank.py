"""A job of 4 ranks goes on with 2, and with 4 again: what each rank has for itself, from memory and from the store.

FAULTS=long reads all from each of both.
"""

import json
import os

import pytest
import torch

from tests.cluster import Node, wait_for
from tests.interop.launch import on_ranks
from tests.long_form import in_long


def run(node, ranks, step, patterns, tier, *more):
    """What each rank got, and what they all logged."""
    log = on_ranks(node, ranks, "per_rank_ranks.py", "job", str(step), node.store, patterns, tier, *more)
    found = []
    for rank in range(ranks):
        with open(os.path.join(node.store, f"{step}-{rank}.json"), encoding="utf-8") as file:
            found.append(json.load(file))
    return found, log


OWN = "each a value of its own"


@pytest.fixture
def node(tmp_path):
    with Node(str(tmp_path)) as node:
        node.start()
        yield node


@pytest.mark.parametrize("tier", ["arena", *in_long("pfs")])
def test_four_ranks_two_ranks_four_ranks(tier, node):
    def again(ranks, step, patterns):
        if tier == "pfs":
            wait_for(lambda: not node.slots())
        found, log = run(node, ranks, step, patterns, tier)
        assert {one["tier"] for one in found} == {tier}
        return [one["rng"][0] for one in found], [one["notes"] for one in found], log

    run(node, 4, 1, "rng", tier)
    values, notes, log = again(2, 2, "rng")
    assert values == [20, 21]
    text = "rng: each rank has its own; those of ranks 2 to 3 are dropped, for the job has 2 ranks now, and had 4"
    assert notes == [[text]] * 2
    assert log.count(text) == 1
    values, notes, log = again(4, 3, "rng")
    assert values == [20, 21, 62, 63]
    told = [
        f"the checkpoint has nothing that rank {r} itself saved of state['rng']: it keeps its present value"
        for r in (2, 3)
    ]
    assert notes == [[], [], [told[0]], [told[1]]]
    assert all(log.count(one) == 1 for one in told)
    values, notes, log = again(2, 4, "")
    text = f"ranks 0 to 3 saved state['rng'], {OWN}; those of ranks 2 to 3 are dropped"
    assert all(text in one[0] for one in notes)
    assert log.count(text) == 1
    values, notes, log = again(4, 5, "")
    assert values == [20, 21, 20, 20]
    text = f"ranks 0 to 1 saved state['rng'], {OWN}; ranks without one take that of rank 0"
    assert all(text in one[0] for one in notes)


@pytest.mark.parametrize("tier", ["pfs", "load_from", *in_long("arena")])
def test_tensors_of_any_kind_that_differ_are_named_and_no_others(tier, node):
    """Counters, floats and masks of each rank, 4 to 2 to 4; what rank 1 alone has moves what lies behind it."""

    def again(ranks, step):
        if tier != "arena":
            wait_for(lambda: not node.slots())
        found, log = run(node, ranks, step, "", tier, "more")
        assert {one["tier"] for one in found} == {"" if tier == "load_from" else tier}
        return found, log

    run(node, 4, 1, "", tier, "more")
    found, log = again(2, 2)
    assert [one["count"] for one in found] == [20, 21]
    keys = "state['rng'], state['count'], state['noise'], and 1 more"
    for rank, one in enumerate(found):
        assert one["noise"] == torch.full((70,), (20 + rank) / 3).tolist()
        told = f"ranks 0 to 3 saved {keys}, {OWN}; those of ranks 2 to 3 are dropped; to have each rank"
        assert [note.startswith(told) for note in one["notes"]] == [True]
    assert log.count(keys) == (2 if tier == "load_from" else 1)
    found, log = again(4, 3)
    assert [one["count"] for one in found] == [20, 21, 20, 20]
    for one in found:
        told = f"ranks 0 to 1 saved {keys}, {OWN}; ranks without one take that of rank 0; to have each rank"
        assert [note.startswith(told) for note in one["notes"]] == [True]
