"""What cannot be meant is refused at the call, before a daemon is looked for: one line, and what to type."""

import math
import os
import pickle
import re
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckptd_client
from ckptd_client import CkptdError, ConfigError, UsageError
from ckptd_client.client import find_of
from ckptd_client.dcp import CkptdStager, CkptdWriter

ARENA = "/dev/shm/ckptd-test-of-nobody"
NAN, INF = math.nan, math.inf

ARGUMENTS = {  # what is given, the error, what it says, and what to type
    "job: a number": ({"job": 3}, ConfigError, "3 is no name for a job", "'run-3'"),
    "job: bytes": ({"job": b"llama"}, ConfigError, "b'llama' is no name for a job", "'llama-7b'"),
    "job: 0": ({"job": 0}, ConfigError, "0 is no name for a job", "'run-0'"),
    "store: nobody's": ({"store": "~nobody-here/c"}, ConfigError, "no home directory ~nobody-here", "./~nobody-here/c"),
    "store: s3": ({"store": "s3://bucket/a"}, ConfigError, "'s3://bucket/a' is an address", "mount it"),
    "store: gs": ({"store": "gs://bucket"}, ConfigError, "'gs://bucket' is an address", "connect(store=...)"),
    "store: file": ({"store": "file:///scratch/a"}, ConfigError, "is an address, not a path", "'/scratch/a'"),
    "store: a number": ({"store": 3}, ConfigError, "store=3 (from connect) is not allowed", "pathlib.Path"),
    "store: bytes": ({"store": b"/scratch"}, ConfigError, "store=b'/scratch' (from connect) is not", "connect(store="),
    "store: NUL": ({"store": "/a\0b"}, ConfigError, "is not allowed: it must be a path", "connect(store="),
    "arena: a number": ({"arena": 3}, ConfigError, "arena=3 (from connect) is not allowed", "pathlib.Path"),
    "arena: relative": ({"arena": "none/arena"}, ConfigError, f"'{os.getcwd()}/none/arena'", "/dev/shm"),
    "arena: address": ({"arena": "shm://a"}, ConfigError, "arena 'shm://a' is an address", "connect(arena=...)"),
    "arena: a file": ({"arena": __file__}, ConfigError, "it is a file of uid", "/dev/shm/ckptd-"),
    "arena: no memory": ({"arena": "/etc/ckptd-arena"}, ConfigError, "which is no memory", "/dev/shm/ckptd-"),
    "arena: no parent": ({"arena": "/dev/shm/none/a"}, ConfigError, "no directory /dev/shm/none", "mkdir it"),
    "arena: not to be made": ({"arena": "/proc/arena"}, ConfigError, "'/proc/arena'", "/dev/shm/ckptd-"),
    "start: text": ({"start": "no"}, ConfigError, "start='no'", "connect(start=True), or connect(start=False)"),
    "takeover: text": ({"takeover": "false"}, ConfigError, "takeover='false'", "takeover=False"),
    "alone: a number": ({"alone": 1}, ConfigError, "alone=1", "alone=True"),
    "balance: a list": ({"balance": []}, ConfigError, "balance=[]", '"rows"'),
    "layout: a list": ({"layout": []}, ConfigError, "layout=[]", '"dual"'),
    "redundancy: a dict": ({"redundancy": {}}, ConfigError, "redundancy={}", '"xor"'),
    "key file: a number": ({"integrity_key_file": 3}, ConfigError, "integrity_key_file=3 (from connect)", "a path"),
    "misspelt": ({"drain_evry": 3}, UsageError, "connect has no option 'drain_evry'", "did you mean drain_every?"),
    "another's": ({"frobnicate": 3}, UsageError, "connect has no option 'frobnicate'", "it has job, store, arena"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith("CKPTD_")]:
        monkeypatch.delenv(name)
    yield
    assert not os.path.exists(ARENA), "nothing was made"


def refused(kind, **given):
    """The error of a connect that cannot be meant, at once."""
    began = time.monotonic()
    with pytest.raises(CkptdError) as error:
        ckptd_client.connect(**{"job": "job", "store": "/scratch", "arena": ARENA, "start": False, **given})
    assert time.monotonic() - began < 10, "no wait of connect, of 60 s, was begun"
    assert isinstance(error.value, kind), repr(error.value)
    assert "\n" not in error.value.message
    return error.value


@pytest.mark.parametrize("what", ARGUMENTS)
def test_an_argument_that_cannot_be_meant(what):
    given, kind, told, typed = ARGUMENTS[what]
    error = refused(kind, **given)
    assert any(part in error.message for part in told.split("|")), error
    assert typed in f"{error.message}\n{error.hint}", error


@pytest.mark.parametrize("name", ["save_timeout_s", "connect_timeout_s"])
@pytest.mark.parametrize("value", [NAN, INF, -INF, -1, 0, True, "60", "soon", [1], 1j], ids=repr)
def test_a_time_that_is_none(name, value):
    error = refused(ConfigError, **{name: value})
    said = f"{name}={value!r} (from connect) is not allowed: it must be a number of seconds above 0"
    assert error.message == said
    assert error.hint.startswith(f"connect({name}=")


@pytest.mark.parametrize("value", ["nan", "inf", "-1", "soon", "0"])
def test_a_time_in_the_environment_that_is_none(value, monkeypatch):
    monkeypatch.setenv("CKPTD_SAVE_TIMEOUT_S", value)
    error = refused(ConfigError)
    assert re.match(f"save_timeout_s='?{value}(.0)?'? \\(from CKPTD_SAVE_TIMEOUT_S\\) is not allowed", error.message)
    assert error.hint == "CKPTD_SAVE_TIMEOUT_S=10"


def test_what_is_not_given_by_name():
    with pytest.raises(UsageError, match=r"connect: too many positional arguments\n.*by name, such as store=") as error:
        ckptd_client.connect("job", "/scratch")
    assert "connect(job, ...)" in error.value.hint


@pytest.mark.parametrize(
    ("name", "near"),
    [("CKPTD_STOER", "CKPTD_STORE"), ("CKPTD_JOBS", "CKPTD_JOB"), ("CKPTD_SLOT_PER_RANK", "CKPTD_SLOTS_PER_RANK"),
     ("CKPTD_NOAUTOSTART", "CKPTD_NO_AUTOSTART")],
)  # fmt: skip
def test_a_variable_that_is_misspelt_is_reported_also_where_a_daemon_runs(name, near, monkeypatch, node, job):
    monkeypatch.setenv(name, "x")
    error = refused(ConfigError, job=job, store=node.store, arena=node.arena)
    assert error.message == f"unknown setting {name} in the environment"
    assert error.hint == f"did you mean {near}?"


def test_a_link_is_no_arena(tmp_path, node):
    link = tmp_path / "link"
    link.symlink_to(node.arena)
    error = refused(ConfigError, arena=link, store=node.store)
    assert "is a symbolic link" in error.message
    assert node.arena in error.hint


def test_an_arena_that_others_may_use(tmp_path, node):
    os.chmod(node.arena, 0o755)  # noqa: S103 - that is what is refused
    try:
        error = refused(ConfigError, arena=node.arena, store=node.store)
    finally:
        os.chmod(node.arena, 0o700)
    assert "with mode 0755" in error.message
    assert f"chmod 700 {node.arena}" in error.hint


# --- steps and times of a client

STEPS = [NAN, INF, 1.0, -1, True, "7", 1 << 70, [1], b"1", torch.tensor([1, 2]), np.float32(3)]


@pytest.mark.parametrize("step", STEPS, ids=repr)
def test_a_step_that_is_none_is_refused_by_each_call_that_takes_one(step, join):
    client, state = join(), {"w": torch.zeros(4)}
    calls = {
        "save": lambda: client.save(state, step),
        "load": lambda: client.load(state, step),
        "save_files": lambda: client.save_files({"a": b"bytes"}, step),
        "load_files": lambda: client.load_files(step),
        "find": lambda: find_of(client, step),
        "free_step": lambda: client.free_step(step),
        "a writer": lambda: CkptdWriter(client, step=step),
    }
    for name, call in calls.items():
        with pytest.raises(UsageError, match="step must be an int from 0 to") as error:
            call()
        assert "an int such as 100" in error.value.hint, name
    assert client.save(state, 1).wait("staged", 60).step == 1


@pytest.mark.parametrize("step", [np.int64(3), torch.tensor(3)], ids=repr)
def test_any_integer_is_a_step(step, join):
    assert join().save({"w": torch.zeros(4)}, step).step == 3


@pytest.mark.parametrize("seconds", [NAN, -1, "5", True, [1]], ids=repr)
def test_a_wait_of_no_time_is_refused(seconds, join):
    client = join()
    handle = client.save({"w": torch.zeros(4)}, 1)
    for wait in (handle.wait, client.wait):
        with pytest.raises(UsageError, match="timeout_s=") as error:
            wait("durable", seconds)
        assert "a number of seconds, or None" in error.value.message
        assert error.value.hint == "wait(timeout_s=60), or wait(timeout_s=None)"
    assert handle.wait("durable", np.float64(20)).end == "durable"
    assert client.wait("durable", INF) is handle


# --- other processes


def test_a_client_is_not_sent_to_another_process(join):
    client = join()
    for what in (client, CkptdWriter(client), client.save({"a": 1})):
        with pytest.raises(UsageError, match=rf"of the process that connected, {os.getpid()}") as error:
            pickle.dumps(what)
        assert "connect there" in error.value.hint


@pytest.mark.parametrize("staged", [False, True])
def test_dcp_s_background_process_is_refused_at_the_call(staged, join, lone_group):
    client, state = join(), {"w": torch.arange(4.0)}
    writer = CkptdWriter(client, step=1)
    stager = {"async_stager": CkptdStager(writer)} if staged else {}
    kind = dcp.state_dict_saver.AsyncCheckpointerType.PROCESS
    began = time.monotonic()
    with pytest.raises(UsageError, match="PROCESS gives the CkptdWriter to another process") as error:
        dcp.async_save(state, storage_writer=writer, async_checkpointer_type=kind, **stager)
    assert time.monotonic() - began < 10
    assert "leave async_checkpointer_type out" in error.value.hint
    del error
    for step in range(2, 6):  # the slot that was staged in is free again
        writer = CkptdWriter(client, step=step)
        stager = {"async_stager": CkptdStager(writer)} if staged else {}
        dcp.async_save(state, storage_writer=writer, **stager).result(30)
        writer.handle.wait("durable", 60)


def test_dcp_s_background_process_serves_other_writers(tmp_path: Path, lone_group):
    kind = dcp.state_dict_saver.AsyncCheckpointerType.PROCESS
    executors = pytest.importorskip("torch.distributed.checkpoint._async_process_executor")
    writer = dcp.FileSystemWriter(str(tmp_path / "stock"))
    dcp.async_save({"w": torch.arange(4.0)}, storage_writer=writer, async_checkpointer_type=kind).result(120)
    executors._CHECKPOINT_PROCESS = None  # ends it
    back = {"w": torch.zeros(4)}
    dcp.load(back, checkpoint_id=str(tmp_path / "stock"))
    assert torch.equal(back["w"], torch.arange(4.0))
