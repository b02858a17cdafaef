"""What is no checkpoint, given to each reader: what it is instead, and what to type."""

import os
import shutil

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import ckptd_client
from ckptd_client import UsageError
from ckptd_client.dcp import CkptdReader, CkptdStager, CkptdWriter

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def client(node):
    with ckptd_client.connect("wrong", store=node.store, arena=node.arena, start=False) as client:
        client.save(state(), 1)
        client.wait("durable", 60)
        yield client


def state():
    return {"w": torch.ones(3)}


@pytest.fixture
def places(client, node, tmp_path):
    """Directories and files by what they are; the client's job has a checkpoint by now."""
    dcp.save(state(), checkpoint_id=tmp_path / "dcp")
    (tmp_path / "empty").mkdir()
    (tmp_path / "hf").mkdir()
    safetensors.torch.save_file(state(), tmp_path / "hf" / "model.safetensors")
    torch.save(state(), tmp_path / "sd.pt")
    store = tmp_path / "store"
    shutil.copytree(os.path.join(node.store, "wrong"), store / "wrong", symlinks=True)
    shutil.copytree(os.path.join(node.store, "wrong"), store / "other", symlinks=True)
    return {
        "job": (os.path.join(node.store, "wrong"), "the directory of a job, not of one checkpoint", "wrong/latest'"),
        "store": (str(store), "is a store, with the jobs other, wrong", "store/other/latest'"),
        "missing": (str(tmp_path / "misspelt"), "misspelt does not exist", "directory of a checkpoint"),
        "empty": (str(tmp_path / "empty"), "holds no checkpoint", "safetensors"),
        "torch": (str(tmp_path / "sd.pt"), "is a torch.save file", "torch.load("),
        "dcp": (str(tmp_path / "dcp"), "is a directory of DCP's, not ckptd's", "dcp.load(state, checkpoint_id="),
        "hf": (str(tmp_path / "hf"), "holds no checkpoint of ckptd", "client.load_from"),
    }


@pytest.mark.parametrize("kind", ["job", "store", "missing", "empty", "torch"])
def test_load_from(kind, client, places):
    path, what, hint = places[kind]
    with pytest.raises(UsageError) as caught:
        client.load_from(path, state())
    assert what in caught.value.message
    assert hint in caught.value.hint


@pytest.mark.parametrize("kind", ["job", "store", "missing", "empty", "torch", "dcp", "hf"])
def test_the_reader(kind, places):
    path, what, hint = places[kind]
    with pytest.raises(CheckpointException) as caught:
        dcp.load(state(), storage_reader=CkptdReader(path))
    assert what in str(caught.value)
    assert hint in str(caught.value)
    assert "load_from('" not in str(caught.value) or kind == "dcp"


def test_arguments_of_other_kinds(client):
    with pytest.raises(UsageError, match=r"the path must be text or a Path, not NoneType"):
        client.load_from(None, state())
    with pytest.raises(UsageError, match=r"the path must be text or a Path, not dict"):
        client.load_from(state(), "path")
    with pytest.raises(
        UsageError, match=r"takes the CkptdWriter of the same save, not Client(.|\n)*CkptdStager\(writer"
    ):
        CkptdStager(client)
    with pytest.raises(UsageError, match=r"takes an open client.*, not int(.|\n)*connect"):
        CkptdWriter(5)
    for wrong in (None, 5):
        with pytest.raises(UsageError, match=r"an open client or a directory, not (.|\n)*CkptdReader\(client\)"):
            CkptdReader(wrong)
