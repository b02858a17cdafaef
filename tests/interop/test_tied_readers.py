"""Tied weights and digests at readers of other programs: what the table "Open it with anything" says of them."""

import pathlib

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

import ckptd_client.dcp
from tests.checkpoints import write_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def tied(value):
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))
    model[1].weight = model[0].weight
    nn.init.constant_(model[0].weight, value)
    return model


@pytest.fixture
def directory(tmp_path):
    return write_checkpoint(tmp_path, [{"model": tied(3.0)}])


def untied():
    return {"model": {"0.weight": torch.zeros(5, 4), "1.weight": torch.zeros(5, 4)}}


def test_dcp_finds_both_names(directory):
    for reader in ({"checkpoint_id": directory}, {"storage_reader": ckptd_client.dcp.CkptdReader(directory)}):
        state = untied()
        dcp.load(state, **reader)
        assert all(torch.equal(value, torch.full((5, 4), 3.0)) for value in state["model"].values())


def test_safetensors_and_the_huggingface_reader_have_the_first_name_alone(directory):
    assert [name for name in load_file(directory / "r00000-p00.safetensors") if "__ckptd" not in name] == [
        "model.0.weight"
    ]
    with pytest.raises(dcp.api.CheckpointException, match=r"Missing key in checkpoint state_dict: model.1.weight"):
        dcp.load(untied(), storage_reader=HuggingFaceStorageReader(str(directory)))
    state = {"model": {"0.weight": torch.zeros(5, 4)}}
    dcp.load(state, storage_reader=HuggingFaceStorageReader(str(directory)))
    assert torch.equal(state["model"]["0.weight"], torch.full((5, 4), 3.0))


def flip(directory):
    [path] = pathlib.Path(directory).glob("*.safetensors")
    data = bytearray(path.read_bytes())
    at = data.find(b"\x00\x00\x40\x40" * 5)  # 3.0, in the payload
    data[at] ^= 1
    path.write_bytes(data)


def test_stock_readers_check_no_digests(directory):
    flip(directory)
    for reader in ({"checkpoint_id": directory}, {"storage_reader": HuggingFaceStorageReader(str(directory))}):
        state = {"model": {"0.weight": torch.zeros(5, 4)}}
        dcp.load(state, **reader)
        assert int((state["model"]["0.weight"] != 3.0).sum()) == 1
    with pytest.raises(dcp.api.CheckpointException, match="digest"):
        dcp.load(untied(), storage_reader=ckptd_client.dcp.CkptdReader(directory))
