"""Some ranks call connect and others do not: those that came name, in time, those that did not; then all connect."""

import os
import re
import subprocess
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

import ckptd_client
from ckptd_client import ConfigError
from ckptd_client._local.rank import find_group
from tests import pythons
from tests.cluster import Node
from tests.ports import free_port

BIN = os.path.dirname(sys.executable)
SCRIPT = """
import os, sys, time
import torch
import torch.distributed as dist
import ckptd_client

folder, how, comers = sys.argv[1], sys.argv[2], sys.argv[3].split(",")
seconds, world = float(sys.argv[4]), int(sys.argv[5])
if how == "mpiexec":
    from mpi4py import MPI
    rank = MPI.COMM_WORLD.Get_rank()
else:
    rank = int(os.environ["RANK"])
if how == "gloo":
    dist.init_process_group("gloo")
if how == "file":
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world)
if str(rank) in comers:
    began = time.monotonic()
    try:
        ckptd_client.connect("job", start=False, connect_timeout_s=seconds)
    except ckptd_client.ConnectError as error:
        text = str(error).replace("\\n", " ")
        line = f"rank {rank} after {time.monotonic() - began:.1f} s: {text}\\n"
        os.write(1, line.encode())  # at once, with its end: print is two calls under torchrun, between which others are
open(f"{folder}/tried-{rank}", "w").close()
while sum(name.startswith("tried-") for name in os.listdir(folder)) < world:
    time.sleep(0.02)
for step in (1, 2):
    with ckptd_client.connect("job", start=False) as client:
        client.save({"w": torch.ones(4)}, step).wait("durable", 60)
print(f"rank {rank} is good", flush=True)
if dist.is_initialized():
    dist.destroy_process_group()
"""
LONG = os.environ.get("FAULTS") == "long"
WORLD = 3
CASES = [
    ("gloo", "0", "ranks 1-2", 7.0),
    ("gloo", "1,2", "rank 0", 3.0),
    ("file", "0,2", "rank 1", 3.0),
    ("torchrun", "0", "ranks 1-2", 3.0),
    ("torchrun", "1,2", "rank 0", 3.0),
    ("by hand", "0,1", "rank 2", 3.0),
    ("mpiexec", "0", "ranks 1-2", 7.0),
    ("mpiexec", "0,2", "rank 1", 3.0),
    ("mpiexec", "1,2", "rank 0", 3.0),
]
SOME = [CASES[number] for number in (0, 4, 5, 7)]  # each way but a file, which is a process group like another


def launched(node: Node, how: str, *arguments: str) -> tuple[str, str]:
    """Output and errors of all ranks, which must end well."""
    words = (arguments[0] + "/ranks.py", arguments[0], how, *arguments[1:], str(WORLD))
    shared = {"PYTHONWARNINGS": "ignore", "GLOO_SOCKET_IFNAME": "lo", "HYDRA_IFACE": "lo", "FI_PROVIDER": "tcp"}
    commands: list[tuple[list[str], dict[str, str]]] = []
    if how == "mpiexec":
        commands = [([os.path.join(BIN, "mpiexec"), "-iface", "lo", "-n", str(WORLD), sys.executable], {})]
    elif how == "torchrun":
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORLD)]
        commands = [(launcher, {})]
    else:
        shared |= {"WORLD_SIZE": str(WORLD), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        shared |= {"TORCHELASTIC_RUN_ID": uuid.uuid4().hex, "LOCAL_WORLD_SIZE": str(WORLD)}
        commands = [([sys.executable], {"RANK": str(rank)}) for rank in range(WORLD)]
    running = [
        pythons.Popen(
            [*command, *words],
            env=node.environ(**shared, **own),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for command, own in commands
    ]
    node.children += running  # a rank that hangs is ended with the node
    done = [process.communicate(timeout=120) for process in running]
    output, errors = ("".join(parts) for parts in zip(*done, strict=True))
    assert [process.returncode for process in running] == [0] * len(running), errors[-3000:]
    return output, errors


@pytest.mark.timeout(100)
@pytest.mark.parametrize(("how", "comers", "missing", "seconds"), CASES if LONG else SOME)
def test_those_that_came_name_those_that_did_not_and_then_all_connect(tmp_path, how, comers, missing, seconds):
    (tmp_path / "ranks.py").write_text(SCRIPT)
    (tmp_path / "store").mkdir()
    with Node(str(tmp_path / "store")) as node:
        node.start()
        output, errors = launched(node, how, str(tmp_path), comers, str(seconds))
    found = re.findall(r"rank (\d) after (\S+) s: (.*)", output)
    assert sorted(rank for rank, _, _ in found) == comers.split(",")
    for _, took, text in found:
        assert seconds - 0.5 <= float(took) < seconds + 4
        assert text.startswith(f"{missing} of 3 did not call connect within {seconds:g} s")
        assert "every rank must call connect; one rank alone: connect(alone=True)" in text
    assert output.count("is good") == WORLD
    waits = f"connect waits, up to {seconds:g} s, for {missing} of 3: every rank must call connect"
    assert (waits in errors) is (seconds > 5)
    assert "waitForInput" not in errors, "torch's store would say so each second"


@pytest.mark.parametrize("seconds", [float("nan"), -1, 0, float("inf"), "soon", None])
def test_a_time_that_is_none_is_refused_in_one_line(seconds):
    with pytest.raises(ConfigError, match=r"^connect_timeout_s=.*seconds above 0\n.*connect\(connect_timeout_s=60\)$"):
        ckptd_client.connect("job", connect_timeout_s=seconds)


@pytest.mark.parametrize(("name", "value"), [("WORLD_SIZE", "two"), ("RANK", "x")])
def test_a_launchers_variable_that_is_no_number_is_named(monkeypatch, name, value):
    for variable, text in {"WORLD_SIZE": "2", "RANK": "0", "TORCHELASTIC_RUN_ID": "r", name: value}.items():
        monkeypatch.setenv(variable, text)
    with pytest.raises(ckptd_client.UsageError, match=f"{name} is '{value}'"):
        ckptd_client.connect("job")


@pytest.fixture(name="torchrun_variables")
def fixture_torchrun_variables(monkeypatch):
    """What torchrun sets, for a store that nobody serves."""
    port = free_port()
    variables = {"WORLD_SIZE": "2", "RANK": "0", "TORCHELASTIC_RUN_ID": "r", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, text in {**variables, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, text)
    return port


def test_a_launcher_that_is_gone_is_named_in_time(torchrun_variables):
    began = time.monotonic()
    with pytest.raises(ckptd_client.ConnectError, match=f"MASTER_PORT={torchrun_variables} within 1 s") as error:
        find_group(1.0)
    assert time.monotonic() - began < 20
    assert "unset MASTER_ADDR MASTER_PORT RANK WORLD_SIZE" in error.value.hint


def test_a_port_that_cannot_be_is_named(torchrun_variables, monkeypatch):
    monkeypatch.setenv("MASTER_PORT", "99999")
    with pytest.raises(ckptd_client.ConnectError, match="MASTER_PORT=99999"):
        find_group(0.5)


def test_a_launcher_that_comes_late_is_found(torchrun_variables):
    def serve():
        time.sleep(1)
        stores.append(dist.TCPStore("127.0.0.1", torchrun_variables, is_master=True, wait_for_workers=False))

    stores = []
    with ThreadPoolExecutor(1) as pool:
        served = pool.submit(serve)
        with pytest.raises(ckptd_client.ConnectError, match="rank 1 of 2 did not call connect"):
            find_group(3.0)
        served.result()


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({}, "RANK, MASTER_ADDR and MASTER_PORT are not set"),
        ({"RANK": "0", "MASTER_ADDR": "here"}, "MASTER_PORT is not set"),
        ({"RANK": "0", "MASTER_ADDR": "here", "MASTER_PORT": "1"}, "there is no process group"),
    ],
)
def test_a_world_size_without_the_rest_says_what_is_not_set(monkeypatch, variables, named):
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, text in {"WORLD_SIZE": "2", **variables}.items():
        monkeypatch.setenv(name, text)
    with pytest.raises(ckptd_client.UsageError, match=named) as error:
        find_group(1.0)
    assert "unset WORLD_SIZE, or connect(alone=True)" in error.value.hint
