"""client.load_from: checkpoints of ckptd, of torch.distributed.checkpoint and of safetensors, whole and crafted."""

import collections
import dataclasses
import json
import os
import pickle
import struct
import warnings

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import ckptd_client
from ckptd.shared.base.errors import DamagedError
from ckptd_client import MismatchError, RestoreError, UsageError
from ckptd_client._load.foreign import dcp as directory_reader
from ckptd_client._load.reader import Target
from tests.unit.client.same import difference

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def client(node, request):
    name = "".join(c if c.isalnum() else "-" for c in request.node.name)[:60].strip("-")
    with ckptd_client.connect(name, store=node.store, arena=node.arena, start=False) as client:
        yield client


def state_of(seed):
    torch.manual_seed(seed)
    return {
        "model": {"w": torch.randn(5, 3), "t": torch.randn(4, 6).t(), "half": torch.randn(3).bfloat16()},
        "scalar": torch.tensor(float(seed)),
        "empty": torch.empty(0, 4),
        "list": [torch.randn(2), seed, {"deep": torch.arange(3) + seed}],
        "flag": torch.tensor([True, False]),
        "lr": 0.1 * seed,
        "plain": {"history": [seed, 2.5], "name": "run", "none": None},
    }


def trained(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(seed):
        optimizer.zero_grad()
        model(torch.randn(6, 4)).square().mean().backward()
        optimizer.step()
    return {"model": model, "optimizer": optimizer}


def write_dcp(path, state, **how):
    dcp.save(state, storage_writer=dcp.FileSystemWriter(path, **how))
    return str(path)


# --- each kind


def test_a_ckptd_directory(client, node):
    saved = state_of(1)
    handle = client.save(saved, 5)
    client.wait("durable", 60)
    directory = os.path.join(node.store, client.job, handle.save_id.dirname)
    for path in (directory, os.path.join(node.store, client.job, "latest")):
        state = state_of(2)
        loaded = client.load_from(path, state)
        assert difference(state, saved) == ""
        assert (loaded.kind, loaded.step, loaded.notes) == ("ckptd", 5, [])
    part = {"model": {"w": torch.zeros(5, 3)}}
    client.load_from(directory, part)
    assert torch.equal(part["model"]["w"], saved["model"]["w"])
    with pytest.raises(UsageError, match=r"is the directory of a job(.|\n)*latest"):
        client.load_from(os.path.join(node.store, client.job), state)


def test_a_flipped_bit_of_a_ckptd_directory_is_named(client, node):
    handle = client.save(state_of(1), 1)
    client.wait("durable", 60)
    directory = os.path.join(node.store, client.job, handle.save_id.dirname)
    with open(os.path.join(directory, "r00000-p00.safetensors"), "r+b") as file:
        file.seek(-700, os.SEEK_END)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(DamagedError, match=r"r00000-p00.safetensors: block 0"):
        client.load_from(directory, state_of(2))


@pytest.mark.parametrize("single_file", [True, False])
def test_a_dcp_directory(single_file, client, tmp_path):
    saved = state_of(1)
    directory = write_dcp(tmp_path / "dcp", saved, single_file_per_rank=single_file)
    state = state_of(2)
    loaded = client.load_from(directory, state)
    assert difference(state, saved) == ""
    assert (loaded.kind, loaded.step) == ("dcp", None)


def test_modules_and_optimizers_take_a_dcp_directory(client, tmp_path):
    """Also the optimizer's own nesting, whose numbers DCP made text of."""
    saved = trained(3)
    directory = write_dcp(tmp_path / "dcp", {name: value.state_dict() for name, value in saved.items()})
    state = trained(0)
    client.load_from(directory, state)
    for name in saved:
        assert difference(state[name].state_dict(), saved[name].state_dict()) == "", name


def test_a_dcp_directory_of_a_ckptd_job_is_read_by_its_manifest(client, node):
    handle = client.save(state_of(1), 1)
    client.wait("durable", 60)
    directory = os.path.join(node.store, client.job, handle.save_id.dirname)
    os.unlink(os.path.join(directory, ".metadata"))
    client.load_from(directory, state_of(2))


def test_safetensors_file_directory_and_index(client, tmp_path):
    model, other = trained(2)["model"], trained(0)["model"]
    tensors = model.state_dict()
    names = list(tensors)
    one = tmp_path / "one.safetensors"
    safetensors.torch.save_file(tensors, one)
    two = tmp_path / "two"
    two.mkdir()
    safetensors.torch.save_file({name: tensors[name] for name in names[:3]}, two / "a.safetensors")
    safetensors.torch.save_file({name: tensors[name] for name in names[3:]}, two / "b.safetensors")
    for path in (one, two):
        wanted = other.state_dict()
        assert client.load_from(path, wanted).kind == "safetensors"
        assert difference(wanted, tensors) == ""
    safetensors.torch.save_file({names[0]: torch.zeros(1)}, two / "old.safetensors")
    weights = {name: "a.safetensors" if name in names[:3] else "b.safetensors" for name in names}
    (two / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    module = {"model": trained(0)["model"]}
    safetensors.torch.save_file({f"model.{name}": value for name, value in tensors.items()}, tmp_path / "m.safetensors")
    client.load_from(tmp_path / "m.safetensors", module)
    assert difference(module["model"].state_dict(), tensors) == ""
    wanted = trained(0)["model"].state_dict()
    client.load_from(two, wanted)
    assert difference(wanted, tensors) == ""


def test_safetensors_of_dcp_are_put_together(client, tmp_path):
    """Boxes at offsets, of two files, into a narrower view."""
    whole = torch.arange(60.0).reshape(10, 6)
    for number, (start, stop) in enumerate([(0, 4), (4, 10)]):
        info = json.dumps({"w": {"saved_offsets": [start, 0]}})
        safetensors.torch.save_file(
            {"w": whole[start:stop].clone()}, tmp_path / f"{number}.safetensors", {"DCP_SHARDING_INFO": info}
        )
    state = {"w": torch.zeros(6, 10).t()}
    client.load_from(tmp_path, state)
    assert torch.equal(state["w"], whole)
    os.unlink(tmp_path / "0.safetensors")
    with pytest.raises(DamagedError, match="is not whole"):
        client.load_from(tmp_path, state)


# --- what does not fit


def test_what_is_missing_or_of_another_shape_is_listed(client, tmp_path):
    directory = write_dcp(tmp_path / "dcp", state_of(1))
    state = state_of(2)
    state["model"]["w"] = torch.zeros(5, 4)
    state["model"]["half"] = torch.zeros(3)
    state["more"] = torch.zeros(1)
    with pytest.raises(MismatchError) as caught:
        client.load_from(directory, state)
    text = str(caught.value)
    assert "state['model']['w']: F32 [5, 3] in the checkpoint, F32 [5, 4] in the state" in text
    assert "state['model']['half']: BF16 [3] in the checkpoint, F32 [3] in the state" in text
    assert "state['more']: a tensor in the state, none in the checkpoint" in text
    assert state["model"]["w"].eq(0).all()


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_a_dtype_that_ckptd_cannot_hold_matters_only_when_wanted(client, tmp_path):
    directory = write_dcp(tmp_path / "dcp", {"c": torch.ones(2).to(torch.complex32), "f": torch.ones(2)})
    state = {"f": torch.zeros(2)}
    client.load_from(directory, state)
    assert state["f"].tolist() == [1, 1]
    with pytest.raises(MismatchError, match=r"state\['c'\].*complex32"):
        client.load_from(directory, {"c": torch.zeros(2).to(torch.complex32)})


@dataclasses.dataclass
class Custom:
    x: int = 1


def test_a_pickled_value_is_an_error_that_names_it_only_when_wanted(client, tmp_path):
    directory = write_dcp(tmp_path / "dcp", {"w": torch.ones(2), "conf": Custom(3)})
    client.load_from(directory, {"w": torch.zeros(2)})
    with pytest.raises(RestoreError, match=r"'conf' is pickled(.|\n)*add_safe_globals"):
        client.load_from(directory, {"w": torch.zeros(2), "conf": None})
    with torch.serialization.safe_globals([Custom]):
        state = {"conf": None}
        client.load_from(directory, state)
    assert state["conf"] == Custom(3)


@pytest.mark.parametrize("path", ["nothing", "empty"])
def test_no_checkpoint(path, client, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="hint: give"):
        client.load_from(tmp_path / path, {"w": torch.zeros(1)})


# --- crafted files


class Shell:
    """Runs a command when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


class Patch:
    """Would set an attribute of a class of torch's."""

    def __reduce__(self):
        return dcp.metadata.Metadata, (), (None, {"version": "patched"})


def crafted(kind, marker):
    """Pickles, as bytes."""
    good = dcp.metadata.Metadata({"w": Shell(marker)})
    return {
        "shell": lambda: pickle.dumps(Shell(marker)),
        "shell inside": lambda: pickle.dumps(good),
        "shell, protocol 0": lambda: pickle.dumps(Shell(marker), protocol=0),
        "class by build": lambda: (
            b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\nN}X\x01\x00\x00\x00a"
            b"ctorch.distributed.checkpoint.metadata\nMetadataIndex\ns\x86b."
        ),
        "dotted": lambda: b"\x80\x04\x8c(torch.distributed.checkpoint.metadata\x8c\x17Metadata.__init__.__code__\x93.",
        "ext": lambda: b"\x80\x02\x82\x01.",
        "persistent": lambda: b"\x80\x02Pid\n.",
        "huge memo": lambda: b"\x80\x02]r\xff\xff\xff\x7f.",
        "huge bytearray": lambda: b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b".",
        "huge bytes": lambda: b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b".",
        "no end": lambda: pickle.dumps(dcp.metadata.Metadata({}))[:-1],
        "slow key": lambda: b"\x80\x02})" + b"2\x86" * 80 + b"K\x01s.",
        "something else": lambda: pickle.dumps([1]),
        "empty": lambda: b"",
        "calls size": lambda: b"\x80\x02ctorch\nSize\n(K\x01K\x02tR.",
    }[kind]()


KINDS = (
    "shell", "shell inside", "shell, protocol 0", "class by build", "dotted", "ext", "persistent", "huge memo",
    "huge bytearray", "huge bytes", "no end", "slow key", "something else", "empty", "calls size",
)  # fmt: skip


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", KINDS)
def test_crafted_metadata_does_nothing(kind, client, tmp_path):
    marker = tmp_path / "ran"
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(crafted(kind, marker))
    before = dict(vars(dcp.metadata.Metadata))
    with pytest.raises(DamagedError, match=r"is no metadata of torch.distributed.checkpoint"):
        client.load_from(tmp_path / "dcp", {"w": torch.zeros(1)})
    assert not marker.exists()
    assert dict(vars(dcp.metadata.Metadata)) == before


def rewritten(directory, change):
    """A good .metadata with something changed."""
    path = os.path.join(directory, ".metadata")
    with open(path, "rb") as file:
        metadata = pickle.load(file)  # noqa: S301 - our own
    change(metadata)
    with open(path, "wb") as file:
        pickle.dump(metadata, file)


def move(field, value):
    def change(metadata):
        for index, info in metadata.storage_data.items():
            if index.fqn == "w":
                setattr(info, field, value)

    return change


def grow_chunk(metadata):
    metadata.state_dict_metadata["w"].chunks[0].sizes = torch.Size([9])


def deny_chunks(metadata):
    metadata.state_dict_metadata["w"].chunks = []


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (move("relative_path", "../elsewhere"), "no file of this directory"),
        (move("relative_path", "/etc/passwd"), "no file of this directory"),
        (move("offset", -1), "a shape, an offset or a length"),
        (move("length", 1 << 70), "a shape, an offset or a length"),
        (move("length", 1 << 40), "ends before byte"),
        (move("offset", 3), "cannot be read"),
        (grow_chunk, "chunk outside"),
        (deny_chunks, "none in the checkpoint"),
    ],
)
def test_crafted_places_are_refused(change, why, client, tmp_path):
    directory = write_dcp(tmp_path / "dcp", {"w": torch.ones(2), "v": torch.zeros(3)})
    rewritten(directory, change)
    with pytest.raises((DamagedError, MismatchError), match=why):
        client.load_from(directory, {"w": torch.zeros(2)})


def test_an_archive_of_another_tensor_is_refused(client, tmp_path):
    directory = write_dcp(tmp_path / "dcp", {"w": torch.ones(2), "v": torch.zeros(3)})

    def swap(metadata):
        by_name = {index.fqn: index for index in metadata.storage_data}
        metadata.storage_data[by_name["w"]] = metadata.storage_data[by_name["v"]]

    rewritten(directory, swap)
    with pytest.raises(DamagedError, match=r"'w' is not what .metadata says"):
        client.load_from(directory, {"w": torch.zeros(2)})


def safetensors_bytes(header, payload=b"\0" * 8):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + payload


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 8,
        safetensors_bytes(b"{"),
        safetensors_bytes(b"[1]"),
        safetensors_bytes(b'{"w":' * 50000),
        safetensors_bytes({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 800]}}),
        safetensors_bytes({"w": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}),
        safetensors_bytes({"w": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}),
        safetensors_bytes({"w": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}}),
        safetensors_bytes({"w": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}}),
        safetensors_bytes({"w": {"shape": [2]}}),
        safetensors_bytes({"__metadata__": {"DCP_SHARDING_INFO": "["}}),
        safetensors_bytes(
            {
                "__metadata__": {"DCP_SHARDING_INFO": '{"w":{"saved_offsets":[0,0]}}'},
                "w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
            }
        ),
    ],
)
def test_crafted_safetensors_are_refused(data, client, tmp_path):
    (tmp_path / "x.safetensors").write_bytes(data)
    with pytest.raises(DamagedError, match=r"x.safetensors"):
        client.load_from(tmp_path, {"w": torch.zeros(2)})


def test_an_index_names_files_of_its_directory_only(client, tmp_path):
    safetensors.torch.save_file({"w": torch.ones(2)}, tmp_path / "a.safetensors")
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "../a.safetensors"}}))
    with pytest.raises(DamagedError, match="no safetensors file beside it"):
        client.load_from(inner, {"w": torch.zeros(2)})


def test_only_what_is_needed_is_read(client, tmp_path, monkeypatch):
    """Half of a tensor of two chunks comes from one of them, by its bytes alone."""
    read = collections.Counter()
    real = directory_reader.read_ranges

    def counting(path, targets, *, base=0):
        targets = list(targets)
        read["bytes"] += sum(target.nbytes for target in targets)
        assert all(isinstance(target, Target) for target in targets)
        return real(path, targets, base=base)

    monkeypatch.setattr(directory_reader, "read_ranges", counting)
    path = write_dcp(tmp_path / "dcp", {"w": torch.arange(1000.0), "v": torch.zeros(10**6)})
    state = {"w": torch.zeros(1000)}
    with warnings.catch_warnings():
        loaded = client.load_from(path, state)
    assert torch.equal(state["w"], torch.arange(1000.0))
    assert read["bytes"] == loaded.nbytes == 4000
