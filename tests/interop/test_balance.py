"""Replicas that each save a slice: restored on as many ranks, fewer and more, by stock readers, or found to differ."""

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.interop.launch import on_ranks


@pytest.fixture
def folder(tmp_path):
    return str(tmp_path)


def run(node, ranks, what, folder):
    out = on_ranks(node, ranks, "balance_ranks.py", what, folder)
    assert out.count("did it") == ranks, out


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_slices_are_equal_and_come_back_on_any_number_of_ranks_and_in_stock_readers(node, folder):
    run(node, 4, "save", folder)
    for ranks in (4, 2, 1):
        run(node, ranks, "load", folder)
    expected = torch.load(f"{folder}/reference-0.pt")["model"]
    state = {"model": {name: torch.zeros_like(value) for name, value in expected.items()}}
    dcp.load(state, checkpoint_id=f"{node.store}/save/latest")
    for name, value in expected.items():
        assert "running" in name or torch.equal(value, state["model"][name]), name


@pytest.mark.parametrize(
    ("what", "ranks"), [("hsdp", 4), ("diverged", 3), ("lying", 2), ("structure", 2), ("stages", 4), ("off", 2)]
)
def test_replicas(node, folder, what, ranks):
    run(node, ranks, what, folder)
