"""PyTorch's own cases for FSDP and DTensor state under DCP, with CkptdWriter, CkptdReader and CkptdStager."""

import os

import pytest

from ckptd.checkpoint.verify import verify_path
from tests.cluster import Node
from tests.interop.launch import on_ranks

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240)]

SCRIPT = "dcp_ranks.py"


@pytest.fixture(scope="module")
def saved(node):
    """By 4 ranks, in every layout."""
    folder = os.path.join(node.store, "four")
    os.mkdir(folder)
    on_ranks(node, 4, SCRIPT, "save", folder, "fsdp,hsdp,tp,fsdp_tp,ddp")
    return folder


@pytest.mark.parametrize(
    ("ranks", "pairs"),
    [
        (4, "fsdp>fsdp,hsdp>hsdp,tp>tp,fsdp_tp>fsdp_tp,ddp>fsdp"),
        (2, "fsdp>fsdp,fsdp>ddp,hsdp>fsdp,tp>tp,fsdp_tp>tp"),
        (1, "fsdp>fsdp,tp>tp"),
    ],
)
def test_every_layout_comes_back(ranks, pairs, node, saved):
    on_ranks(node, ranks, SCRIPT, "load", saved, pairs)


def test_what_the_writer_wrote_is_sound(node, saved):
    for layout in ("fsdp", "hsdp", "tp", "fsdp_tp", "ddp"):
        directory = os.path.join(node.store, f"dcp-{layout}", "latest")
        report = verify_path(directory)
        assert report.ok, report.problems


def test_two_ranks_to_four(node, tmp_path):
    with Node(str(tmp_path)) as other:
        other.start()
        on_ranks(other, 2, SCRIPT, "save", str(tmp_path), "fsdp,tp")
        on_ranks(other, 4, SCRIPT, "load", str(tmp_path), "fsdp>fsdp,tp>tp")


@pytest.mark.parametrize("case", ["arena", "staged", "caching", "leaves_of_one", "errors"])
def test_four_ranks(case, node):
    on_ranks(node, 4, SCRIPT, case)
