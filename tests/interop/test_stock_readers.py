"""One drained checkpoint of 4 ranks (FSDP2, AdamW, scheduler, generators), read to the bit by every reader there is.

That is safetensors alone, plain ``dcp.load`` without a reader argument, torch's HuggingFace reader, CkptdReader,
``client.load`` and ``client.load_from``; on 4, 2 and 1 ranks, as FSDP2 and DDP; plain values through all that
can hold them. FAULTS=long adds 3 ranks, and layouts, HSDP too.
"""

import os

import pytest
import safetensors.torch
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from ckptd.checkpoint.export.names import Choice
from ckptd.checkpoint.export.run import Order, export
from ckptd.checkpoint.verify import verify_path
from ckptd.shared.torchfile.image import FILLER_PREFIX
from tests.cluster import Node
from tests.interop.launch import on_ranks
from tests.interop.ranks import JOB, Model, flat
from tests.long_form import in_long
from tests.unit.client.same import bits

pytestmark = [pytest.mark.faults, pytest.mark.timeout(180)]

SCRIPT = "ranks.py"
WORLDS = [(4, "fsdp"), (2, "ddp"), (1, "fsdp")]
MORE = [(3, "fsdp"), (4, "ddp"), (3, "ddp"), (2, "fsdp"), (4, "hsdp"), (1, "ddp")]


@pytest.fixture(scope="module")
def drained(tmp_path_factory):
    """(node, folder with reference.pt, directory of the checkpoint)."""
    folder = str(tmp_path_factory.mktemp("stock"))
    with Node(folder) as node:
        node.start()
        on_ranks(node, 4, SCRIPT, "save", folder)
        reference = torch.load(f"{folder}/reference.pt", weights_only=False)
        yield node, folder, os.path.join(node.store, JOB, reference["dirname"])


def test_the_whole_checkpoint_is_sound(drained):
    report = verify_path(drained[2])
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


@pytest.mark.parametrize(("ranks", "layouts"), [*WORLDS, *in_long(*MORE)])
def test_every_reader_gives_back_what_was_saved(ranks, layouts, drained):
    node, folder, _ = drained
    on_ranks(node, ranks, SCRIPT, "load", folder, layouts)


# --- exported: whole tensors for programs that know neither ckptd nor shards


def reference(folder):
    """What rank 0 had, tensors whole; of what each rank had of its own an export has rank 0's."""
    return torch.load(f"{folder}/reference.pt", weights_only=False)["ranks"][0]


def check_tensors(found, folder):
    """Name for name, bit for bit, no filler and no piece of a file too many."""
    expected = {name: value for name, value in reference(folder).items() if isinstance(value, torch.Tensor)}
    assert {0, 1, 2} <= {value.dim() for value in expected.values()}
    assert {torch.int64, torch.bfloat16, torch.uint8} <= {value.dtype for value in expected.values()}
    assert set(found) == set(expected)
    assert [name for name in expected if bits(found[name]) != bits(expected[name])] == []


@pytest.mark.parametrize("shard_nbytes", [5 << 30, 500])
def test_an_export_to_safetensors_has_every_tensor_whole(drained, tmp_path, shard_nbytes):
    _, folder, directory = drained
    out = tmp_path / "out"
    export(Order(source=directory, out=str(out), max_shard_nbytes=shard_nbytes))
    files = list(out.glob("*.safetensors"))
    assert (len(files) > 1) == (shard_nbytes == 500)
    found = [safetensors.torch.load_file(file) for file in files]
    check_tensors({name: value for tensors in found for name, value in tensors.items()}, folder)
    assert sum(map(len, found)) == len({name for tensors in found for name in tensors})


def test_an_export_to_a_torch_file_has_every_tensor_whole(drained, tmp_path):
    _, folder, directory = drained
    out = str(tmp_path / "out.pt")
    export(Order(source=directory, out=out, format="torch"))
    check_tensors(torch.load(out, weights_only=True), folder)


def test_an_exported_model_goes_into_a_model_without_shards(drained, tmp_path):
    _, folder, directory = drained
    out = str(tmp_path / "out.pt")
    export(Order(source=directory, out=out, format="torch", choice=Choice(only=("model",), strip="model")))
    model = Model()
    model.load_state_dict(torch.load(out, weights_only=True))
    expected = reference(folder)
    for name, value in model.state_dict().items():
        assert bits(value) == bits(expected[f"model.{name}"]), name


def test_an_export_to_dcp_is_read_in_other_layouts(drained, tmp_path):
    node, folder, directory = drained
    out = str(tmp_path / "out")
    export(Order(source=directory, out=out, format="dcp"))
    on_ranks(node, 2, SCRIPT, "dcp", folder, "fsdp,ddp", out)
    whole = str(tmp_path / "whole.pt")
    dcp_to_torch_save(out, whole)
    found = flat(torch.load(whole, weights_only=False))
    check_tensors({name: value for name, value in found.items() if isinstance(value, torch.Tensor)}, folder)
    plain = {name: value for name, value in reference(folder).items() if not isinstance(value, torch.Tensor)}
    assert {name: found[name] for name in plain} == plain
