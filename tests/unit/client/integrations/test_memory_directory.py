"""A checkpoint's files as a directory that needs no disk, and leaves no memory when its process ends."""

import os
import signal
import subprocess

import pytest
import torch

from ckptd_client import RestoreError, UsageError
from ckptd_client.files import TorchFile
from ckptd_client.integrations._kit.memory_directory import MemoryDirectory

FILES = {"state.pt": TorchFile({"w": torch.arange(9.0)}), "deep/er/small": b"s", "empty": b""}


@pytest.fixture
def client(join, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return join()


def from_the_store(client, join, emptied, at):
    """What a later run finds when nothing is left in memory."""
    client.close()
    emptied()
    again = join()
    with again.load_files() as files:
        return MemoryDirectory(files, again.group, str(at))


def test_any_process_of_the_user_reads_it(client, tmp_path):
    client.save_files(FILES, 1)
    with client.load_files() as files:
        memory = MemoryDirectory(files, client.group)
    assert torch.load(f"{memory.path}/state.pt")["w"].tolist() == list(range(9))
    said = subprocess.run(["cat", f"{memory.path}/deep/er/small"], capture_output=True, timeout=20, check=True).stdout
    assert said == b"s"
    assert all(os.path.isfile(f"{memory.path}/{name}") for name in FILES)
    memory.close()
    assert not os.path.exists(memory.path)
    memory.close()


def test_nothing_is_left_of_a_process_that_is_killed(client, node, tmp_path):
    """But links to nothing."""
    client.save_files(FILES, 1).wait("staged")
    client.close()
    code = (
        "import os, sys, ckptd_client\n"
        "from ckptd_client.integrations._kit.memory_directory import MemoryDirectory\n"
        "client = ckptd_client.connect(sys.argv[1], start=False)\n"
        "files = client.load_files()\n"
        "memory = MemoryDirectory(files, client.group)\n"
        "print(memory.path, os.path.getsize(memory.path + '/state.pt') > 0, flush=True)\n"
        "input()\n"
    )
    rank = node.run(code, client.job)
    path, sized = rank.stdout.readline().decode().split()
    assert sized == "True"
    rank.send_signal(signal.SIGKILL)
    rank.wait(60)
    assert os.path.lexists(f"{path}/state.pt")
    assert not os.path.exists(f"{path}/state.pt")


def test_what_must_be_read_from_the_store_is_read_where_it_is_published(client, join, tmp_path, emptied):
    client.save_files(FILES, 1, directory=tmp_path / "out").wait("durable")
    memory = from_the_store(client, join, emptied, tmp_path / "out")
    assert memory.path == str(tmp_path / "out")
    memory.close()
    assert (tmp_path / "out" / "state.pt").exists()


def test_a_directory_that_only_the_checkpoint_names_is_not_read(client, join, tmp_path, emptied):
    """Its files have no digests: what lies there could be anybody's."""
    client.save_files(FILES, 1, directory=tmp_path / "out").wait("durable")
    memory = from_the_store(client, join, emptied, tmp_path / "mine")
    assert memory.path != str(tmp_path / "out")
    assert torch.load(f"{memory.path}/state.pt")["w"].tolist() == list(range(9))
    memory.close()


def test_an_older_directory_that_the_newer_is_still_to_replace_is_not_read(client, join, tmp_path, emptied):
    """Here for something that is in the way; or its daemon died between commit and publication."""
    (tmp_path / "out" / "deep" / "er").mkdir(parents=True)
    (tmp_path / "out" / "deep" / "er" / "small").write_bytes(b"older")
    (tmp_path / "out" / "state.pt").mkdir()
    client.save_files(FILES, 1, directory=tmp_path / "out").wait("durable")
    memory = from_the_store(client, join, emptied, tmp_path / "out")
    with open(f"{memory.path}/deep/er/small", "rb") as file:
        assert file.read() == b"s"
    memory.close()


def test_damage_is_reported_and_nothing_is_left(client, join, node, tmp_path, emptied):
    client.save_files(FILES, 1).wait("durable")
    client.close()
    emptied()
    folder = os.path.join(node.store, client.job, "step-000000001.i0001")
    with open(max((e.path for e in os.scandir(folder) if e.name.startswith("r0")), key=os.path.getsize), "r+b") as file:
        file.seek(-100, os.SEEK_END)
        file.write(b"?" * 100)
    again = join()
    descriptors = len(os.listdir("/proc/self/fd"))
    with again.load_files() as files, pytest.raises(RestoreError, match="step 1 cannot be read"):
        MemoryDirectory(files, again.group)
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 1
    assert [name for name in os.listdir(tmp_path) if name.startswith("ckptd-load-")] == []


def test_a_file_that_there_is_not(client):
    client.save_files(FILES, 1)
    with client.load_files() as files:
        assert files.rank_of("state.pt") == 0
        with pytest.raises(UsageError, match="no file 'nothing'"):
            files.memory_file("nothing")
        with pytest.raises(UsageError, match="no file 'nothing'"):
            files.rank_of("nothing")
