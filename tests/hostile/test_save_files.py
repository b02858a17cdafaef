"""A trainer's own files: names and texts that nothing can hold are refused at once, and no pickle is run unasked."""

import os
import pickle

import pytest
import torch

import ckptd_client
from ckptd.shared.base.errors import UsageError
from ckptd_client.files import SafetensorsFile, TorchFile
from ckptd_client.integrations.deepspeed import CkptdCheckpointEngine
from tests.cluster import Node

pytestmark = pytest.mark.timeout(120)
HALF = "\ud800"


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    with Node(str(tmp_path_factory.mktemp("store"))) as node:
        node.start()
        yield node


def connect(node, **settings):
    return ckptd_client.connect("demo", store=node.store, arena=node.arena, start=False, takeover=True, **settings)


MISUSES = {
    "a name": lambda client, _: client.save_files({f"a{HALF}": b"x"}),
    "a name with NUL": lambda client, _: client.save_files({"a\0b": b"x"}),
    "a directory": lambda client, path: client.save_files({"a": b"x"}, directory=f"{path}/{HALF}"),
    "a pointer": lambda client, path: client.save_files({"a": b"x"}, directory=path, pointer=(f"{path}/{HALF}", "a")),
    "a pointer's text": lambda client, path: client.save_files(
        {"a": b"x"}, directory=path, pointer=(f"{path}/latest", f"a{HALF}")
    ),
    "a tensor's name": lambda client, _: client.save_files({"a": SafetensorsFile({f"w{HALF}": torch.ones(2)})}),
    "metadata": lambda client, _: client.save_files({"a": SafetensorsFile({"w": torch.ones(2)}, {"x": HALF})}),
    "a key of a state": lambda client, _: client.save({f"a{HALF}": torch.ones(2)}, 1),
    "a path to load from": lambda client, path: client.load_from(f"{path}/{HALF}", {}),
    "a path with NUL": lambda client, path: client.load_from(f"{path}/\0", {}),
}


@pytest.mark.parametrize("name", MISUSES)
def test_half_a_character_is_a_misuse(node, tmp_path, name):
    with connect(node) as client:
        with pytest.raises(UsageError) as raised:
            MISUSES[name](client, str(tmp_path / "out"))
        str(raised.value).encode()  # and the error itself can be printed
        assert client.save({"w": torch.ones(2)}, 100).wait("staged", 60) is not None


class _Harm:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("allowed", [False, True])
def test_deepspeeds_engine_runs_no_pickle_from_memory_unless_its_name_is_allowed(node, tmp_path, allowed):
    with connect(node, allow_pickle=["*/m.pt", "m.pt"] if allowed else []) as client:
        client.save_files({"m.pt": TorchFile(_Harm(str(tmp_path / "harm")))}, directory=str(tmp_path / "tag"))
        engine = object.__new__(CkptdCheckpointEngine)  # without DeepSpeed, which may not be installed
        engine._client = client
        with client.load_files() as files, engine.reading(files, "/view"):
            try:
                engine.load("/view/tag/m.pt")
            except pickle.UnpicklingError:
                assert not allowed
    assert (tmp_path / "harm").exists() == allowed
