"""What a training says of a save arrives in the committed records, also when the daemon ends before the commit."""

import json
import os
import sys

import pytest
import torch

from ckptd.checkpoint.verify import verify_path
from ckptd_client import UsageError
from ckptd_client._load.rounds import read_checkpoint
from ckptd_client._local.rank import Group
from tests.checkpoints import write_checkpoint
from tests.cluster import Node, wait_for

SAID = {"loss": 1.25, "epoch": 3, "best": True, "run": "é", "nan": float("nan")}
STORED = SAID | {"nan": None}


def listed(node, job):
    told = json.loads(
        node.complete(sys.executable, "-m", "ckptd", "list", "--json", f"{node.store}/{job}", timeout_s=30)
    )
    return {row["step"]: row["metadata"] for row in told["jobs"][0]["checkpoints"]}


def test_it_is_in_the_records_and_a_save_without_it_has_none(node, join, job):
    client = join()
    state = {"w": torch.arange(1000.0), "epoch": 3}
    client.save(state, 1, metadata=SAID).wait("durable", 60)
    client.save(state, 2).wait("durable", 60)
    assert listed(node, job) == {2: {}, 1: STORED}
    assert verify_path(f"{node.store}/{job}").problems == []
    state["w"].zero_()
    assert client.load(state, step=1).step == 1
    assert state["w"][999] == 999
    assert state["epoch"] == 3


def test_a_misuse_is_raised_at_once_and_is_no_save(node, join, job):
    client = join()
    with pytest.raises(UsageError, match=r"metadata\['loss'\] is tensor"):
        client.save({"w": torch.zeros(10)}, 1, metadata={"loss": torch.tensor(1.0)})
    assert client.stats().saves == 0
    client.save({"w": torch.zeros(10)}, 1, metadata={"loss": 1}).wait("durable", 60)
    assert listed(node, job) == {1: {"loss": 1}}


def test_it_grows_from_save_to_save_without_new_slots(node, join, job):
    client = join()
    client.save({"w": torch.zeros(10)}, 1).wait("durable", 60)
    before = client._link.capacity
    client.save({"w": torch.zeros(10)}, 2, metadata={f"k{i}": "x" * 50 for i in range(64)}).wait("durable", 60)
    assert client._link.capacity == before
    assert len(listed(node, job)[2]) == 64


SAVES = """
import sys, torch, ckptd_client
client = ckptd_client.connect(sys.argv[1], start=False)
client.save({"w": torch.arange(100000.0)}, 7, metadata={"loss": 1.25, "nan": float("nan")}).wait("staged", 60)
print("staged", flush=True)
sys.stdin.read()
"""


def test_a_daemon_that_finds_the_slots_commits_it_without_the_rank(tmp_path, job):
    with Node(str(tmp_path)) as node:
        node.start("--drain-bandwidth", "1K")  # no drain ends
        rank = node.run(SAVES, job)
        assert rank.stdout.readline() == b"staged\n"
        node.kill()
        rank.kill()
        node.start()
        assert wait_for(lambda: os.path.isdir(f"{node.store}/{job}/latest"))
        assert listed(node, job) == {7: {"loss": 1.25, "nan": None}}
        assert verify_path(f"{node.store}/{job}").problems == []


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_that_saved_the_same_values_still_did(tmp_path, ranks):
    """Rank 0's leaves have other bytes; no load takes that for another value."""
    states = [{"lr": 0.5, "w": torch.full((4,), float(rank))} for rank in range(2)]
    path = write_checkpoint(tmp_path, states, metadata=STORED)
    assert verify_path(str(path)).problems == []
    for rank in range(ranks):
        state = {"lr": 0.0, "w": torch.zeros(4)}
        fitted, _, notes = read_checkpoint(str(path), state, group=Group(rank, ranks, "test"))
        fitted.finish(state)
        assert state["lr"] == 0.5
        assert not [note for note in notes if "lr" in note]
