"""Directories and files of other programs that contradict themselves, or are no files: refused at once, by name."""

import enum
import json
import os
import pickle
import subprocess
import sys
import time

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ckptd.shared.base.errors import CkptdError, DamagedError, MismatchError, RestoreError, UsageError
from ckptd_client._load.fit import fit
from ckptd_client._load.foreign.load_from import load_from
from ckptd_client._local.rank import Group
from tests import pythons
from tests.boxes import some_whole
from tests.boxes import write_checkpoint as write_cut
from tests.checkpoints import write_checkpoint

INDEX = "model.safetensors.index.json"


def load(path, state):
    return load_from(str(path), state, Group(0, 1, "test"))


def put(directory, name, tensors, offsets=None):
    info = {"DCP_SHARDING_INFO": json.dumps({n: {"saved_offsets": o} for n, o in offsets.items()})} if offsets else None
    safetensors.torch.save_file(tensors, directory / name, info)


# -- which file a tensor is taken from


def test_a_name_is_taken_from_the_file_that_the_index_says(tmp_path):
    put(tmp_path, "1.safetensors", {"v": torch.ones(2), "w": torch.zeros(2)})  # an old w
    put(tmp_path, "2.safetensors", {"w": torch.full((2,), 2.0)})
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"v": "1.safetensors", "w": "2.safetensors"}}))
    state = {"v": torch.zeros(2), "w": torch.zeros(2)}
    load(tmp_path, state)
    assert state["v"].tolist() == [1, 1]
    assert state["w"].tolist() == [2, 2]


def test_a_name_that_its_file_has_not_is_reported_when_wanted(tmp_path):
    put(tmp_path, "1.safetensors", {"v": torch.ones(2), "w": torch.zeros(2)})
    put(tmp_path, "2.safetensors", {"u": torch.ones(2)})
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"v": "1.safetensors", "w": "2.safetensors"}}))
    load(tmp_path, {"v": torch.zeros(2)})
    with pytest.raises(MismatchError, match=r"\['w'\].*2\.safetensors"):
        load(tmp_path, {"w": torch.zeros(2)})


@pytest.mark.parametrize("rows", [(0, 3), (2, 5)])
def test_one_box_in_two_files_is_refused_without_an_index(rows, tmp_path):
    put(tmp_path, "1.safetensors", {"w": torch.zeros(3, 2)}, {"w": [0, 0]})
    put(tmp_path, "2.safetensors", {"w": torch.ones(rows[1] - rows[0], 2)}, {"w": [rows[0], 0]})
    with pytest.raises(DamagedError, match=r"'w'(.|\n)*1\.safetensors(.|\n)*2\.safetensors"):
        load(tmp_path, {"w": torch.zeros(rows[1], 2)})


def test_a_scalar_in_two_files_is_refused_and_empty_boxes_are_not(tmp_path):
    for name in ("1.safetensors", "2.safetensors"):
        put(tmp_path, name, {"empty": torch.zeros(0, 2)})
    load(tmp_path, {"empty": torch.zeros(0, 2)})
    for name in ("1.safetensors", "2.safetensors"):
        put(tmp_path, name, {"s": torch.tensor(1.0)})
    with pytest.raises(DamagedError, match="'s'"):
        load(tmp_path, {"s": torch.tensor(0.0)})


# -- what is no file


def pipe(path):
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def a_dcp_directory(path):
    dcp.save({"w": torch.ones(2), "lr": 0.5}, storage_writer=dcp.FileSystemWriter(path))
    return path


@pytest.mark.timeout(20)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("where", ["x.safetensors", INDEX, ".metadata", "__0_0.distcp"])
def test_a_pipe_never_holds_the_reader(where, tmp_path):
    if "safetensors" not in where:
        a_dcp_directory(tmp_path)
    pipe(tmp_path / where)
    state = {"w": torch.zeros(2)} if where != "__0_0.distcp" else {"lr": 0.0}
    with pytest.raises(CkptdError, match=rf"{where}.*no regular file"):
        load(tmp_path, state)


@pytest.mark.timeout(20)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_pipe_in_the_place_of_a_tensors_file_never_holds_the_reader(tmp_path):
    pipe(a_dcp_directory(tmp_path) / "__0_0.distcp")
    with pytest.raises(CkptdError, match=r"__0_0\.distcp.*no regular file"):
        load(tmp_path, {"w": torch.zeros(2)})


def test_links_to_files_are_followed(tmp_path):
    """The cache of a hub is nothing else."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    put(tmp_path / "blobs", "abc", {"w": torch.ones(2)})
    os.symlink("../blobs/abc", tmp_path / "snapshot" / "model.safetensors")
    state = {"w": torch.zeros(2)}
    load(tmp_path / "snapshot", state)
    assert state["w"].tolist() == [1, 1]


# -- metadata that makes much of little


@pytest.mark.timeout(20)
def test_names_that_share_one_list_of_chunks_cost_nothing(tmp_path):
    """Of one chunk or of empty ones, and where each lies."""
    names = [f"n{i}" for i in range(1500)]
    info = _StorageInfo("__0_0.distcp", 0, 8000)
    storage = {MetadataIndex(name, torch.Size([0])): info for name in names}
    for size in (1500, 0):
        chunks = [ChunkStorageMetadata(torch.Size([0]), torch.Size([size]))] * 1500
        tensor = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([1500]), chunks)
        metadata = Metadata(dict.fromkeys(names, tensor), storage_data=storage)
        (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
        began = time.process_time()
        with pytest.raises(DamagedError, match="two chunks at" if size else "more chunks than"):
            load(tmp_path, {"n0": torch.zeros(1500)})
        assert time.process_time() - began < 2


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_one_offset_twice_is_refused(tmp_path):
    path = a_dcp_directory(tmp_path) / ".metadata"
    metadata = pickle.loads(path.read_bytes())  # noqa: S301 - our own
    metadata.state_dict_metadata["w"].chunks *= 2
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(DamagedError, match=r"'w' has two chunks at"):
        load(tmp_path, {"w": torch.zeros(2)})


# -- a checkpoint of ckptd that is not asked as a whole


def a_checkpoint(tmp_path, ranks=2):
    return write_checkpoint(tmp_path, [{"w": torch.full((3,), float(rank))} for rank in range(ranks)])


def test_one_file_of_a_checkpoint_is_refused_with_the_directory_to_give(tmp_path):
    final = a_checkpoint(tmp_path / "store")
    os.symlink(final / "r00000-p00.safetensors", tmp_path / "link.safetensors")
    for path in (final / "r00000-p00.safetensors", tmp_path / "link.safetensors"):
        with pytest.raises(UsageError, match=rf"one file of a checkpoint(.|\n)*{final.name}'"):
            load(path, {"w": torch.zeros(3)})


_WITH_FEW_DESCRIPTORS = """
import os, resource, sys, torch
from tests.hostile.test_foreign import load
state = {"w": torch.zeros(60, 2)}
load(sys.argv[1], state)
before = len(os.listdir("/proc/self/fd"))
resource.setrlimit(resource.RLIMIT_NOFILE, (before + 20, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
state["w"].zero_()
load(sys.argv[1], state)
print(len(os.listdir("/proc/self/fd")) - before, state["w"].numpy().tobytes().hex())
"""


def test_many_ranks_need_few_descriptors(tmp_path):
    """In a process of its own: what other tests left may be closed meanwhile."""
    whole = some_whole("F32", (60, 2))
    final = write_cut(tmp_path, [{"w": (whole, *whole.rows(rank, 60))} for rank in range(60)])
    command = [sys.executable, "-c", _WITH_FEW_DESCRIPTORS, str(final)]
    done = pythons.run(
        command, stdout=subprocess.PIPE, text=True, check=True, timeout=120, env=os.environ | pythons.ENVIRON
    )
    assert done.stdout.split() == ["0", whole.data.hex()]


def test_a_file_that_is_gone_meanwhile_is_named(tmp_path, monkeypatch):
    final = a_checkpoint(tmp_path)
    monkeypatch.setattr("ckptd_client._load.stored_fit.fit", lambda *args, **kw: (fit(*args, **kw), vanish())[0])

    def vanish():
        os.unlink(final / "r00000-p00.safetensors")

    with pytest.raises(RestoreError, match=r"r00000-p00\.safetensors: No such file"):
        load(final, {"w": torch.zeros(3)})


class _ByName(pickle.Pickler):
    """Names members of enumerations by getattr, as Python 3.11.2 does."""

    def reducer_override(self, value):
        return (getattr, (type(value), value.name)) if isinstance(value, enum.Enum) else NotImplemented


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_metadata_that_another_python_wrote_is_read(tmp_path):
    dcp.save({"w": torch.arange(6.0)}, checkpoint_id=tmp_path)
    found = dcp.FileSystemReader(tmp_path).read_metadata()
    with open(tmp_path / ".metadata", "wb") as file:
        _ByName(file).dump(found)
    assert b"getattr" in (tmp_path / ".metadata").read_bytes()
    state = {"w": torch.zeros(6)}
    load(tmp_path, state)
    assert state["w"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


@pytest.mark.parametrize("named", [(pickle.Unpickler, "load"), ([], "append"), (torch.Size, "count")])
def test_getattr_of_anything_but_an_enumeration_is_refused(named, tmp_path):
    class Crafted:
        def __reduce__(self):
            return getattr, named

    (tmp_path / ".metadata").write_bytes(pickle.dumps(Crafted()))
    with pytest.raises(DamagedError, match="is no metadata of torch"):
        load(tmp_path, {"w": torch.zeros(6)})
