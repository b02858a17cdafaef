"""Ranks on several daemons agree where these meet, over gloo and MPI, and fail together when they cannot."""

import json
import os
import re
import subprocess
import sys
import tempfile

import pytest
import torch

from ckptd_client import SaveFailedError
from tests import pythons
from tests.cluster import Node, wait_for
from tests.unit.client.daemon.test_launchers import torchrun

BIN = os.path.dirname(sys.executable)
GATHER = """
import json, os, sys, time
import ckptd_client

settings, scenarios, group = sys.argv[1:4]
if group == "gloo":
    import torch
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
else:
    from mpi4py import MPI
    rank = MPI.COMM_WORLD.Get_rank()
out = {}
for name, per_rank in json.loads(scenarios).items():
    began = time.monotonic()
    try:
        arguments = {"start": False, "connect_timeout_s": 20.0, **per_rank[rank]}
        with ckptd_client.connect(name, **arguments) as client:
            link, found = client._link, client._link.rendezvous
            out[name] = [found.peer.node, link.nodes, str(found.scheme), found.set_size, list(link.ranks_here)]
    except ckptd_client.CkptdError as error:
        out[name] = [type(error).__name__, str(error)]
    out[name].append(time.monotonic() - began)
with open(f"{settings}/{rank}.json", "w") as file:
    json.dump(out, file)
if group == "gloo":
    torch.distributed.destroy_process_group()
"""
LAUNCHES = {
    "gloo": torchrun(2),
    "mpi": [os.path.join(BIN, "mpiexec"), "-iface", "lo", "-n", "2", sys.executable],
}


@pytest.fixture(scope="module")
def daemons(tmp_path_factory):
    """Two nodes, and a third daemon that calls itself like the first. All are on this host."""
    store = str(tmp_path_factory.mktemp("store"))
    with Node(store) as left, Node(store) as right, Node(store) as twin:
        for node, name in ((left, "left"), (right, "right"), (twin, "left")):
            node.start(CKPTD_NODE=name, CKPTD_PEER_ADDRESS="127.0.0.1", CKPTD_REDUNDANCY="double")
        yield left, right, twin


@pytest.fixture(scope="module")
def nobody():
    """An arena that no daemon serves."""
    with tempfile.TemporaryDirectory(prefix="ckptd-test-", dir="/dev/shm") as path:
        yield path


def both(left, right, **settings):
    return [{"arena": left, **settings}, {"arena": right, **settings}]


@pytest.mark.parametrize("group", LAUNCHES)
def test_ranks_agree_on_where_they_run_or_fail_together(group, daemons, nobody, tmp_path):
    left, right, twin = (node.arena for node in daemons)
    scenarios = {
        "two-nodes": both(left, right),
        "told": both(left, right, redundancy="xor", set_size=2),
        "swapped": both(right, left, redundancy="none"),
        "one-node": both(left, left),
        "disagree": [{"arena": left, "redundancy": "xor"}, {"arena": right, "redundancy": "double"}],
        "twins": both(left, twin),
        "no-daemon": both(left, nobody, connect_timeout_s=2.0),
        "bad-store": [{"arena": left}, {"arena": right, "store": "~nobody-here"}],
        "bad-timeout": [{"arena": left, "save_timeout_s": -1}, {"arena": right}],
        "afterwards": both(left, right),
    }
    script = tmp_path / "gather.py"
    script.write_text(GATHER)
    command = [*LAUNCHES[group], str(script), str(tmp_path), json.dumps(scenarios), group]
    environ = {"HYDRA_IFACE": "lo", "FI_PROVIDER": "tcp", "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"}
    daemons[0].complete(*command, timeout_s=120, **environ)
    one, other = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    seconds = {name: max(one[name].pop(), other[name].pop()) for name in scenarios}

    for name in ("two-nodes", "told", "swapped", "one-node", "afterwards"):
        ranks = [one[name].pop(), other[name].pop()]
        assert ranks == ([[0, 1]] * 2 if name == "one-node" else [[0], [1]])
        assert one[name] == other[name], "every rank comes to the same"
    assert one["two-nodes"] == one["afterwards"] == ["left", 2, "double", 8]
    assert one["told"] == ["left", 2, "xor", 2]
    assert one["swapped"] == ["right", 2, "none", 8]
    assert one["one-node"] == ["left", 1, "double", 8]

    for name, kind, words in (
        ("disagree", "UsageError", "rank 0 connects with redundancy='xor', set_size=None, rank 1 with"),
        ("twins", "ConfigError", "two daemons call themselves node 'left'"),
        ("no-daemon", "ConnectError", f"no daemon listens at {nobody}"),
        ("bad-store", "ConfigError", "no home directory ~nobody-here"),
        ("bad-timeout", "ConfigError", "save_timeout_s=-1"),
    ):
        assert one[name][0] == other[name][0] == kind
        assert words in one[name][1]
        assert words in other[name][1]
        assert seconds[name] < 10, name
    assert "rank 1 on" in one["bad-store"][1], "it is told whose fault it is"


def test_a_lone_rank_is_a_node_of_its_own_whatever_its_address(tmp_path, job, join):
    with Node(str(tmp_path)) as node:
        node.start(CKPTD_PEER_ADDRESS="127.0.0.1", CKPTD_NODE="alone")
        link = join(on=node, redundancy="double", set_size=3)._link
        assert (link.nodes, link.ranks_here, link.rendezvous.peer.node) == (1, (0,), "alone")
        assert (link.rendezvous.scheme, link.rendezvous.set_size) == ("double", 3)
        assert link.rendezvous.ticket == b"", "no other daemon is accepted"
        assert [text[:34] for text in node.job(job).degraded] == ["redundancy double protects nothing"]


def test_the_status_shows_the_node_and_its_ranks(node, job, join):
    client = join()
    shown = node.job(job)
    (here,) = shown.nodes
    assert (here.node, here.ranks, here.reachable) == (shown.coordinator, [0], True)
    table = node.complete(sys.executable, "-m", "ckptd", "status", "--nodes", timeout_s=30)
    assert f"{shown.coordinator} " in table.split("parity state")[1]
    client.close()


SAVING = """
import os, sys, time
import torch
import ckptd_client

folder, rank = sys.argv[1], int(sys.argv[2])
torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
with ckptd_client.connect("pair", start=False, drain_every=100, redundancy="xor") as client:
    client.save({"w": torch.full((4,), float(rank))}, 0).wait("staged", 60)
    print("staged", flush=True)
    sys.stdin.readline()
os._exit(0)
"""


def test_any_daemon_shows_the_nodes_of_its_job_and_rank_0s_all_of_them(daemons, tmp_path):
    left, right, _ = daemons
    ranks = [
        pythons.Popen(
            [sys.executable, "-c", SAVING, str(tmp_path), str(rank)],
            env=node.environ(GLOO_SOCKET_IFNAME="lo"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for rank, node in enumerate((left, right))
    ]
    try:
        assert [process.stdout.readline() for process in ranks] == [b"staged\n"] * 2
        shown = left.job("pair")
        assert [(n.node, n.ranks, n.reachable, n.set_index) for n in shown.nodes] == [
            ("left", [0], True, 0),
            ("right", [1], True, 0),
        ]
        assert (shown.coordinator, shown.scheme, shown.checkpoints[0].step) == ("left", "xor", 0)
        assert right.job("pair").coordinator == "left"
        ask = (sys.executable, "-m", "ckptd", "status", "--nodes")
        for one in (left, right):
            table = one.complete(*ask, timeout_s=30)
            assert "2 nodes · xor in 1 set" in table  # with how many answered, which takes time on a busy machine
            assert re.search(r"^ +left +0 +0 ", table, re.MULTILINE)
            assert re.search(r"^ +right +0 +1 ", table, re.MULTILINE)
        for process in ranks:
            process.stdin.write(b"\n")
            process.stdin.close()
            assert process.wait(30) == 0
    finally:
        for process in ranks:
            process.kill()
            process.wait()
            process.stdout.close()


DYING = """
import os, sys, time
import torch
import ckptd_client

path, rank, dies = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.distributed.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
torch.distributed.barrier()
if rank == dies:
    os._exit(3)
began = time.monotonic()
try:
    ckptd_client.connect("dying", start=False, connect_timeout_s=5)
except ckptd_client.CkptdError as error:
    print(type(error).__name__, time.monotonic() - began < 10, error, flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("dies", [0, 1])
def test_a_rank_that_died_before_connect_is_named_in_time(dies, node, tmp_path):
    ranks = [
        node.run(DYING, str(tmp_path / "meet"), str(rank), str(dies), GLOO_SOCKET_IFNAME="lo") for rank in range(2)
    ]
    out, err = ranks[1 - dies].communicate(timeout=120)
    assert out.startswith(b"ConnectError True"), (out, err)
    assert f"rank {dies} of 2 did not call connect within 5 s".encode() in out


def test_a_restarted_daemon_receives_the_same_rendezvous(tmp_path, job, join):
    with Node(str(tmp_path)) as node:
        node.start("--log-level", "debug")
        client = join(on=node)
        assert client.steps() == []
        before = attachments(node)
        node.kill()
        node.start("--log-level", "debug")
        assert client.steps() == []
        first, again = wait_for(lambda: len(attachments(node)) == 2 and attachments(node))
        assert before == [first]
        assert f"Rendezvous({client._link.rendezvous.peer.node} at " in first
        assert first.partition("rendezvous=")[2] == again.partition("rendezvous=")[2] != "None)"


def attachments(node):
    return [line for line in node.log_text().splitlines() if "event RankAttached" in line]


def test_protected_is_out_of_reach_at_once_where_nothing_protects_and_no_drain_is_due(join):
    client = join(drain_every=10, redundancy="xor")
    drained, kept = client.save({"w": torch.zeros(4)}, 0), client.save({"w": torch.zeros(4)}, 1)
    assert drained.wait("protected", 60).milestone == "durable"
    for wait in (kept.wait, client.wait):
        with pytest.raises(SaveFailedError, match="all ranks of the job run on one node") as caught:
            wait("protected", 20)
        assert "client.wait('durable')" in caught.value.hint
    assert client.wait("durable", 60) is kept
    assert kept.wait("protected", 60).milestone == "durable"


def test_none_is_said_to_be_the_reason(join):
    client = join(drain_every=10, redundancy="none")
    client.save({"w": torch.zeros(4)}, 0).wait("durable", 60)
    with pytest.raises(SaveFailedError, match="redundancy is none"):
        client.save({"w": torch.zeros(4)}, 1).wait("protected", 60)
