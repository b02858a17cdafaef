"""PyTorch's own cases for FSDP and DTensor state under DCP, with CkptdWriter, CkptdReader and CkptdStager.

Layouts of one dimension and of two are saved, read and read into; FAULTS=long adds the others, and pairs.
"""

import os

import pytest

from ckptd.checkpoint.verify import verify_path
from tests.cluster import Node
from tests.interop.launch import on_ranks
from tests.long_form import in_long

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240)]

SCRIPT = "dcp_ranks.py"
SAVED = ("hsdp", "fsdp_tp", *in_long("fsdp", "tp", "ddp"))


@pytest.fixture(scope="module")
def saved(node):
    """By 4 ranks, in each of these layouts."""
    folder = os.path.join(node.store, "four")
    os.mkdir(folder)
    on_ranks(node, 4, SCRIPT, "save", folder, ",".join(SAVED))
    return folder


@pytest.mark.parametrize(
    ("ranks", "pairs"),
    [
        (4, "fsdp_tp>fsdp_tp"),
        (2, "hsdp>ddp"),
        *in_long((4, "hsdp>hsdp,fsdp>fsdp,tp>tp,ddp>fsdp"), (2, "fsdp>fsdp,fsdp>ddp,hsdp>fsdp,tp>tp,fsdp_tp>tp")),
        *in_long((1, "fsdp>fsdp,tp>tp,ddp>fsdp")),
    ],
)
def test_every_layout_comes_back(ranks, pairs, node, saved):
    on_ranks(node, ranks, SCRIPT, "load", saved, pairs)


def test_what_the_writer_wrote_is_sound(node, saved):
    for layout in SAVED:
        directory = os.path.join(node.store, f"dcp-{layout}", "latest")
        report = verify_path(directory)
        assert report.ok, report.problems


def test_two_ranks_to_four(node, tmp_path):
    with Node(str(tmp_path)) as other:
        other.start()
        for layout in ("fsdp", *in_long("tp")):
            on_ranks(other, 2, SCRIPT, "save", str(tmp_path), layout)
            on_ranks(other, 4, SCRIPT, "load", str(tmp_path), f"{layout}>{layout}")


@pytest.mark.parametrize("case", ["arena", "caching", "leaves_of_one", "errors"])
def test_four_ranks(case, node):
    on_ranks(node, 4, SCRIPT, case)


@pytest.mark.parametrize("layout", ["hsdp", *in_long("fsdp", "tp")])
def test_asynchronous_saves_of_four_ranks(layout, node):
    on_ranks(node, 4, SCRIPT, "staged", layout)
