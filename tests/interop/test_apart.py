"""Replicas that differ, each saved in full: marked, given back to each rank, and never blended in another layout.

FAULTS=long adds a job of two ranks, and all readers in all layouts.
"""

import glob
import json
import os
import sys

import pytest
from safetensors import safe_open

from ckptd.cli.listing import _listing
from ckptd.shared.base.ids import JobKey
from tests.cluster import Node
from tests.interop.launch import on_ranks
from tests.long_form import LONG, in_long

SCRIPT = "apart_ranks.py"
JOB = "apart"


@pytest.fixture(scope="module", params=[4, *in_long(2)])
def saved(request, tmp_path_factory):
    """A node with the checkpoints, and how many ranks saved them."""
    with Node(str(tmp_path_factory.mktemp("apart"))) as node:
        node.start("--keep-last", "100")
        on_ranks(node, request.param, SCRIPT, "save", node.store)
        yield node, request.param


def load(node, saved_by, ranks, hows, layouts):
    out = on_ranks(node, ranks, SCRIPT, "load", str(saved_by), hows, layouts)
    assert out.count("did it") == ranks, out


def test_such_a_checkpoint_is_marked_and_one_whose_replicas_are_alike_again_is_not(saved):
    node, _ = saved
    rows = {row.step: row.replicas for row in _listing(JobKey(node.store, JOB)).checkpoints}
    assert rows == {2: "differing", 3: "all", 4: "differing"}
    listed = node.complete(sys.executable, "-m", "ckptd", "list", os.path.join(node.store, JOB), timeout_s=60,
                           COLUMNS="160")  # fmt: skip
    assert listed.count("replicas differed") == 2
    verified = node.complete(sys.executable, "-m", "ckptd", "verify", os.path.join(node.store, JOB), timeout_s=60)
    assert verified.count("its replicas differed") == 2, verified


def test_no_rank_gets_a_part_of_one_replica_and_a_part_of_another(saved):
    node, saved_by = saved
    load(node, saved_by, saved_by, f"load,load_from,reader{',dcp' * LONG}", f"same,plain,crossed{',sharded' * LONG}")


def test_nor_in_a_job_of_another_size(saved):
    node, saved_by = saved
    load(node, saved_by, 6 - saved_by, "load,load_from,dcp,reader", "same,sharded")


def test_an_export_has_one_replica_and_says_so(saved, tmp_path):
    node, _ = saved
    out = str(tmp_path / "out")
    latest = os.path.join(node.store, JOB, "latest")
    said = node.complete(sys.executable, "-m", "ckptd", "export", latest, out, "--json", timeout_s=60)
    (path,) = glob.glob(os.path.join(out, "*.safetensors"))
    with safe_open(path, "numpy") as file:
        for name in ("plain", "line"):
            assert file.get_tensor(name).tolist() == [float(i) for i in range(64)]
    assert any("its replicas differed" in note for note in json.loads(said)["notes"])


def test_from_the_store_alone(saved):
    node, saved_by = saved
    node.stop()
    node.lose_arena()
    node.start("--keep-last", "100")
    load(node, saved_by, saved_by, "load,dcp", "same,sharded,crossed")
