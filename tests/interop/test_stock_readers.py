"""One drained checkpoint of 4 ranks (FSDP2, AdamW, scheduler, generators), read to the bit by every reader there is.

That is safetensors alone, plain ``dcp.load`` without a reader argument, torch's HuggingFace reader, and
``client.load``; on as many ranks and on fewer, as FSDP2, HSDP and DDP. FAULTS=long adds worlds.
"""

import os
import subprocess
import sys

import pytest
import safetensors.torch
import torch

from ckptd.verify import verify_checkpoint
from ckptd_client._image import FILLER_PREFIX
from tests.cluster import ROOT, Node
from tests.interop.ranks import JOB
from tests.unit.client.same import bits

pytestmark = [pytest.mark.faults, pytest.mark.timeout(180)]

SCRIPT = os.path.join(os.path.dirname(__file__), "ranks.py")
WORLDS = [(4, "fsdp"), (2, "fsdp,ddp"), (1, "fsdp")]
LONG = [(3, "fsdp,ddp"), (4, "hsdp,ddp")]


def torchrun(node, ranks, *args):
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), SCRIPT, *args],
        env=node.environ(PYTHONWARNINGS="ignore"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def drained(tmp_path_factory):
    """(node, folder with reference.pt, directory of the checkpoint)."""
    folder = str(tmp_path_factory.mktemp("stock"))
    with Node(folder) as node:
        node.start()
        torchrun(node, 4, "save", folder)
        reference = torch.load(f"{folder}/reference.pt", weights_only=False)
        yield node, folder, os.path.join(node.store, JOB, reference["dirname"])


def test_the_whole_checkpoint_is_sound(drained):
    report = verify_checkpoint(drained[2])
    assert report.ok, report.problems


def test_safetensors_alone_has_every_element(drained):
    _, folder, directory = drained
    ranks = torch.load(f"{folder}/reference.pt", weights_only=False)["ranks"]
    files = [safetensors.torch.load_file(os.path.join(directory, f"r{rank:05d}-p00.safetensors")) for rank in range(4)]
    for name, value in ranks[0].items():
        parts = [file[name] for file in files if name in file]
        if isinstance(value, torch.Tensor) and parts[0].shape == value.shape:
            assert [bits(part) for part in parts] == [bits(rank[name]) for rank in ranks[: len(parts)]], name
        elif isinstance(value, torch.Tensor):  # shards are of rows, and lie in the order of the ranks
            assert bits(torch.cat(parts)) == bits(value), name
    names = {name for file in files for name in file if not name.startswith(FILLER_PREFIX)}
    assert names == {name for name, value in ranks[0].items() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize(("ranks", "layouts"), WORLDS + (LONG if os.environ.get("FAULTS") == "long" else []))
def test_every_reader_gives_back_what_was_saved(ranks, layouts, drained):
    node, folder, _ = drained
    torchrun(node, ranks, "load", folder, layouts)
