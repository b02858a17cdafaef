"""A trainer's own files: staged as bytes, read back by name from every tier, and published where the trainer looks."""

import io
import json
import os
import shutil
import tempfile

import pytest
import safetensors.torch
import torch

from ckptd.checkpoint.verify import verify_path
from ckptd.shared.base.ids import MAX_PARTS
from ckptd_client import DamagedError, UsageError
from ckptd_client.files import SafetensorsFile, TorchFile
from tests.cluster import wait_for
from tests.unit.client.same import bits

BIG = 40 << 20  # more than two blocks


def trained():
    """A module and its optimizer after a step, as trainers have them."""
    torch.manual_seed(7)
    model = torch.nn.Linear(33, 65)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 33)).square().mean().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3, "args": {1: (2, None)}}


def some_files(seed=0):
    torch.manual_seed(seed)
    return {
        "state.pt": TorchFile({**trained(), "seed": seed}),
        "deep/er/weights.safetensors": SafetensorsFile(
            {"w": torch.randn(7, 3), "b": torch.randn(5).half()}, {"a": "b"}
        ),
        "empty": b"",
        "big": bytes([seed % 256]) * BIG,
        "latest.json": json.dumps({"seed": seed}).encode(),
        "last, and empty": b"",
    }


def check(files, seed=0):
    """Everything as some_files made it."""
    wanted = some_files(seed)
    assert files.names == sorted(wanted)
    for name in ("empty", "big", "latest.json", "last, and empty"):
        assert files.read(name) == wanted[name], name
    weights = wanted["deep/er/weights.safetensors"]
    assert files.read("deep/er/weights.safetensors") == safetensors.torch.save(dict(weights.tensors), weights.metadata)
    state = files.torch_load("state.pt")
    assert state["seed"] == seed
    same_state(state, trained())


def same_state(found, wanted):
    assert found["args"] == wanted["args"]
    assert found["model"].keys() == wanted["model"].keys()
    for name, value in wanted["model"].items():
        assert bits(found["model"][name]) == bits(value)
    for number, state in wanted["optimizer"]["state"].items():
        assert {k: bits(v) for k, v in state.items()} == {
            k: bits(v) for k, v in found["optimizer"]["state"][number].items()
        }
    assert found["optimizer"]["param_groups"] == wanted["optimizer"]["param_groups"]


@pytest.mark.parametrize("route", ["arena", "pfs"])
def test_files_come_back(route, node, join, emptied):
    client = join()
    client.save_files(some_files(1), 4)
    handle = client.save_files(some_files(2), 5)
    handle.wait("durable" if route == "pfs" else "staged")
    client.close()
    if route == "pfs":
        emptied()
    again = join()
    with again.load_files() as files:
        assert (files.step, files.tier, files.notes) == (5, route, [])
        check(files, 2)


def test_an_older_step_comes_back(node, join):
    client = join()
    for step in (1, 2):
        client.save_files(some_files(step), step).wait("durable")
    with client.load_files(step=1) as files:
        assert files.step == 1
        check(files, 1)


def test_there_may_be_nothing(join):
    assert join().load_files() is None


def test_a_job_may_save_states_too(join):
    client = join()
    client.save_files(some_files(), 1).wait("staged")
    state = {"w": torch.arange(5.0)}
    client.save(state, 2).wait("staged")
    state["w"].zero_()
    assert client.load(state).step == 2
    assert state["w"].tolist() == [0, 1, 2, 3, 4]
    client.save_files(some_files(3), 3).wait("durable")
    with client.load_files() as files:
        check(files, 3)


def test_what_was_saved_may_change_afterwards(join):
    client = join()
    tensor = torch.arange(6.0)
    client.save_files({"t.pt": TorchFile(tensor)}, 1)
    tensor.zero_()
    with client.load_files() as files:
        assert files.torch_load("t.pt").tolist() == [0, 1, 2, 3, 4, 5]


def test_a_slot_with_other_bytes_is_used_again(node, join):
    """Between files lie zeros, whatever an earlier save had there: digests of slot and of files agree."""
    client = join()
    for step in range(1, 9):
        files = {"a": os.urandom(5000 * step), "b": os.urandom(99999 // step), "c": b""}
        client.save_files(files, step).wait("durable")
        assert verify_path(os.path.join(node.store, client.job, f"step-{step:09d}.i0001")).problems == []


def test_they_are_published(node, join, tmp_path):
    out = tmp_path / "run" / "global_step5"
    client = join()
    handle = client.save_files(some_files(), 5, directory=out, pointer=(tmp_path / "run" / "latest", "global_step5"))
    handle.wait("durable")
    state = torch.load(out / "state.pt", weights_only=True)
    same_state(state, trained())
    weights = safetensors.torch.load_file(out / "deep/er/weights.safetensors")
    assert bits(weights["w"]) == bits(some_files()["deep/er/weights.safetensors"].tensors["w"])
    assert (out / "big").read_bytes() == some_files()["big"]
    assert (out / "empty").read_bytes() == b""
    assert (tmp_path / "run" / "latest").read_text() == "global_step5"
    origin = json.loads((out / ".ckptd").read_text())
    checkpoint = os.path.join(node.store, client.job, origin["checkpoint"])
    assert origin["job"] == client.job
    assert os.stat(out / "big").st_nlink == 2, "no byte is written twice"
    assert not os.path.exists(os.path.join(checkpoint, "UNPUBLISHED"))
    assert verify_path(checkpoint).problems == []
    with client.load_files() as files:
        assert files.directory == str(out)


def test_what_is_published_outlives_retention(node, join, tmp_path):
    client = join()
    for step in range(1, 7):
        client.save_files(some_files(step), step, directory=tmp_path / f"step{step}").wait("durable")
    folder = os.path.join(node.store, client.job)
    wait_for(lambda: "step-000000001.i0001" not in os.listdir(folder))
    assert sorted(os.listdir(tmp_path)) == [f"step{step}" for step in range(1, 7)]
    assert torch.load(tmp_path / "step1" / "state.pt")["seed"] == 1
    shutil.rmtree(tmp_path / "step6")  # and the other way round
    with client.load_files() as files:
        check(files, 6)


def test_what_is_published_as_links_outlives_retention_until_the_trainer_removes_it(node, join):
    """On another file system than the store, as /dev/shm is here."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as out:
        client = join()
        for step in range(1, 6):
            client.save_files(some_files(step), step, directory=f"{out}/step{step}").wait("durable")
        folder = os.path.join(node.store, client.job)
        assert os.path.islink(f"{out}/step1/state.pt")
        assert [torch.load(f"{out}/step{step}/state.pt")["seed"] for step in range(1, 6)] == [1, 2, 3, 4, 5]
        shutil.rmtree(f"{out}/step1")
        client.save_files(some_files(6), 6).wait("durable")
        wait_for(lambda: "step-000000001.i0001" not in os.listdir(folder))
        assert torch.load(f"{out}/step2/state.pt")["seed"] == 2


def test_what_is_not_published_yet_outlives_retention(node, join, tmp_path):
    (tmp_path / "file").write_text("in the way")
    client = join()
    client.save_files({"a": b"1"}, 1, directory=tmp_path / "file" / "tag").wait("durable")
    for step in range(2, 6):
        client.save_files({"a": b"2"}, step).wait("durable")
    folder = os.path.join(node.store, client.job)
    wait_for(lambda: "step-000000002.i0001" not in os.listdir(folder))
    assert "step-000000001.i0001" in os.listdir(folder)
    wait_for(lambda: "it stays until it is" in node.log_text())
    (tmp_path / "file").unlink()
    client.save_files({"a": b"2"}, 6).wait("durable")
    wait_for(lambda: "step-000000001.i0001" not in os.listdir(folder))
    assert (tmp_path / "file" / "tag" / "a").read_bytes() == b"1"


def test_a_directory_of_ours_is_replaced(join, tmp_path):
    out = tmp_path / "tag"
    client = join()
    client.save_files({"a": b"1", "only before": b"1"}, 1, directory=out).wait("durable")
    client.save_files({"a": b"2"}, 2, directory=out).wait("durable")
    assert sorted(os.listdir(out)) == [".ckptd", "a"]
    assert (out / "a").read_bytes() == b"2"
    assert os.listdir(tmp_path) == ["tag"], "nothing is left of the earlier one"


def test_of_another_users_directory_only_our_files_are_replaced(join, tmp_path):
    out = tmp_path / "tag"
    out.mkdir()
    (out / "theirs").write_text("theirs")
    (out / "a").write_text("before")
    client = join()
    client.save_files({"a": b"now", "deep/b": b"b"}, 1, directory=out).wait("durable")
    assert {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()} == {
        "theirs": b"theirs", "a": b"now",
    }  # fmt: skip
    assert (out / "deep" / "b").read_bytes() == b"b"


def test_single_files_are_put_into_a_directory(join, tmp_path):
    client = join()
    for step in (1, 2):
        client.save_files({f"epoch={step}.ckpt": TorchFile(step)}, step, directory=tmp_path, whole=False).wait(
            "durable"
        )
    assert sorted(os.listdir(tmp_path)) == ["epoch=1.ckpt", "epoch=2.ckpt"]
    assert [torch.load(tmp_path / f"epoch={step}.ckpt") for step in (1, 2)] == [1, 2]


def test_a_place_that_cannot_be_is_reported_and_made_good(node, join, tmp_path):
    """The checkpoint is durable all the same, and published by the next daemon that looks."""
    (tmp_path / "file").write_text("in the way")
    client = join()
    client.save_files({"a": b"1"}, 1, directory=tmp_path / "file" / "tag").wait("durable")
    folder = os.path.join(node.store, client.job, "step-000000001.i0001")
    assert "UNPUBLISHED" in os.listdir(folder)
    wait_for(lambda: "was not published" in node.log_text())
    (tmp_path / "file").unlink()
    with client.load_files() as files:  # a daemon looks at the store at each load
        assert files.step == 1
    wait_for((tmp_path / "file" / "tag" / "a").exists)
    wait_for(lambda: "UNPUBLISHED" not in os.listdir(folder))


def test_damage_is_found(node, join, emptied):
    client = join()
    client.save_files(some_files(), 1).wait("durable")
    client.close()
    emptied()
    folder = os.path.join(node.store, client.job, "step-000000001.i0001")
    with open(os.path.join(folder, "files.json")) as file:
        path = os.path.join(folder, json.load(file)["files"]["big"])
    with open(path, "r+b") as file:
        file.seek(20 << 20)
        file.write(b"?")
    assert [problem.path for problem in verify_path(folder).problems] == [path]
    with join().load_files() as files, pytest.raises(DamagedError, match="does not match its digest"):
        files.read("big")


@pytest.mark.parametrize("name", ["", "/absolute", "../out", "a/../b", "a//b", "./a", "a\nb", "a/", "x" * 600])
def test_names_that_lead_elsewhere(name, join):
    with pytest.raises(UsageError, match="is no path of a file"):
        join().save_files({name: b""}, 1)


@pytest.mark.parametrize("names", [[".ckptd"], ["a", "a/b"], ["deep/er/est/x", "deep/er"]])
def test_names_that_cannot_be_beside_each_other(names, join):
    with pytest.raises(UsageError, match=r"lies below it|of ckptd's own"):
        join().save_files(dict.fromkeys(names, b""), 1)


@pytest.mark.parametrize("place", ["", "tag", "deep/tag"])
def test_a_directory_among_ckptds_own(place, node, join):
    """There DeepSpeed's latest and ckptd's would be one."""
    client = join()
    own = os.path.join(node.store, client.job)
    with pytest.raises(UsageError, match="what is its own of job"):
        client.save_files({"a": b""}, 1, directory=os.path.join(own, place))
    with pytest.raises(UsageError, match="what is its own of job"):
        client.save_files({"a": b""}, 1, directory=f"{own}-2/tag", pointer=(f"{own}/latest", "tag"))
    client.save_files({"a": b""}, 1, directory=f"{own}-2/tag").wait("durable")


def test_other_misuse(join, tmp_path):
    client = join()
    with pytest.raises(UsageError, match="a file cannot be made of dict"):
        client.save_files({"a": {"w": 1}}, 1)
    with pytest.raises(UsageError, match=f"at most {MAX_PARTS - 1}"):
        client.save_files({str(number): b"" for number in range(MAX_PARTS)}, 2)
    with pytest.raises(UsageError, match="give a directory"):
        client.save_files({"a": b""}, 3, pointer=(tmp_path / "latest", "x"))
    client.save_files({"a": b""}, 4).wait("staged")
    with client.load_files() as files, pytest.raises(UsageError, match="has no file 'b'"):
        files.read("b")


def test_as_many_files_as_there_may_be(join):
    client = join()
    files = {f"layer_{number:03d}.pt": str(number).encode() for number in range(MAX_PARTS - 1)}
    client.save_files(files, 1).wait("durable")
    with client.load_files() as found:
        assert {name: found.read(name) for name in found.names} == files


def test_torch_file_is_torch_save_to_torch_load():
    base = torch.randn(1000)
    value = {
        "view": base[10:20],
        "again": base[10:20],
        "column": base.view(10, 100)[:, 3],
        "expanded": torch.ones(1).expand(5, 5),
        "module": torch.nn.Linear(2, 3),
        "bf16": torch.randn(4).bfloat16(),
        "f8": torch.randn(4).to(torch.float8_e4m3fn),
        "u16": torch.arange(4).to(torch.uint16),
        "empty": torch.empty(0, 3),
        "channels last": torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        "conj": torch.randn(3, dtype=torch.complex64).conj(),
        "parameter": torch.nn.Parameter(torch.randn(3)),
        "storage": torch.arange(3.0)._typed_storage(),
        "sparse": torch.eye(3).to_sparse(),
        "other": {1: (2, "x"), None: [1.5], "size": torch.Size([1, 2]), "dtype": torch.float16},
    }
    laid = TorchFile(value).lay_out()
    data = bytearray(laid.nbytes)
    for at, known in laid.known:
        data[at : at + len(known)] = known
    for at, flat in laid.copies:
        data[at : at + flat.numel()] = bytes(flat.numpy())
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    found, wanted = torch.load(io.BytesIO(data), weights_only=False), torch.load(buffer, weights_only=False)
    for name, tensor in wanted.items():
        if isinstance(tensor, torch.Tensor) and name != "sparse":
            ours = found[name]
            assert bits(ours) == bits(tensor), name
            said = (type(ours), ours.stride(), ours.dtype, ours.requires_grad)
            assert said == (type(tensor), tensor.stride(), tensor.dtype, tensor.requires_grad), name
    assert found["sparse"].to_dense().equal(wanted["sparse"].to_dense())
    assert found["other"] == wanted["other"]
    assert bits(found["module"].weight) == bits(value["module"].weight)
    assert bytes(found["storage"]._untyped_storage) == bytes(wanted["storage"]._untyped_storage)
    assert found["view"].data_ptr() == found["again"].data_ptr(), "what was one stays one"
    assert found["view"].untyped_storage().nbytes() == 40, "of a large storage only what is seen"
