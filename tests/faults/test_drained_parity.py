"""Real daemons drain their parity with the images; a file of the checkpoint that is lost comes back to the bit."""

import os
import shutil

import pytest
import torch

from ckptd.checkpoint.verify import verify_path
from ckptd.cli import invoke
from ckptd_client._load.rounds import read_checkpoint
from ckptd_client._local.rank import Group
from tests.cluster import Node, wait_for
from tests.flips import flip
from tests.ports import free_port
from tests.stored import parity_of, records_of

pytestmark = [pytest.mark.faults, pytest.mark.timeout(120)]

RANKS = 3
RANK = """
import sys, torch, torch.distributed as dist
rank, port = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method="tcp://127.0.0.1:" + port, rank=rank, world_size=3)
import ckptd_client
client = ckptd_client.connect(job="j")
state = {"w": torch.arange(70_000 + 5 * rank) * (rank + 1), "lr": 0.5, "name": f"rank {rank}"}
for step in (10, 20):
    handle = client.save(state, step, drain=True)
    handle.wait("protected", 40)
    handle.wait("durable", 40)
    print("durable", flush=True)
sys.stdin.read()
"""


FILES = """
import os, sys, torch, torch.distributed as dist
rank, port, out = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method="tcp://127.0.0.1:" + port, rank=rank, world_size=3)
import ckptd_client
from ckptd_client.files import TorchFile
client = ckptd_client.connect(job="j")
files = {f"{rank}/state.pt": TorchFile({"w": torch.arange(2_200_000 + 5 * rank)}), f"{rank}/empty": b""}
files |= {f"{rank}/small{i}": bytes([i]) * (4090 + i) for i in range(12)}
handle = client.save_files(files, 10, drain=True, directory=out)
handle.wait("protected", 40)
handle.wait("durable", 40)
print("durable", flush=True)
sys.stdin.read()
"""


def loaded(final, rank):
    state = {"w": torch.zeros(70_000 + 5 * rank, dtype=torch.int64), "lr": 0.0, "name": ""}
    fitted, _, notes = read_checkpoint(str(final), state, group=Group(rank, RANKS, "test"))
    fitted.finish(state)
    assert notes == ()
    assert (state["w"] == torch.arange(70_000 + 5 * rank) * (rank + 1)).all()
    assert (state["lr"], state["name"]) == (0.5, f"rank {rank}")


def run_on_three_nodes(directory, code, *args, saves):
    """Nodes that drain their parity, with a rank each; they and their memory are lost when so many are durable."""
    nodes = [Node(str(directory)) for _ in range(RANKS)]
    try:
        for name, node in zip("abc", nodes, strict=True):
            node.start(CKPTD_NODE=name, CKPTD_PEER_ADDRESS="127.0.0.1", CKPTD_DRAIN_PARITY="true")
        number = str(free_port())
        ranks = [node.run(code, str(rank), number, *args) for rank, node in enumerate(nodes)]
        for rank in ranks:
            said = [rank.stdout.readline() for _ in range(saves)]
            assert said == [b"durable\n"] * saves, rank.stderr.read()
    finally:
        for node in nodes:
            node.__exit__(None, None, None)


def test_an_image_is_lost_from_the_store_after_all_nodes_are(tmp_path, capsys):
    run_on_three_nodes(tmp_path, RANK, saves=2)
    wait_for(lambda: len(list((tmp_path / "j").glob("step-*"))) == 2)
    for final in sorted((tmp_path / "j").glob("step-*")):
        assert len(parity_of(final)) == RANKS, "every node's vote names its parity"
        assert verify_path(str(final)).ok
    whole = {path: path.read_bytes() for path in final.rglob("*") if path.is_file()}
    lost, kept = final / "r00001-p00.safetensors", final / "r00000-p00.safetensors"
    parity = final / next(vote.parity.place for vote in records_of(final).votes() if vote.files[0].rank == 2)

    for damage in (lost.unlink, lambda: flip(lost, 70_000), lambda: flip(parity, 99), parity.unlink):
        damage()
        assert invoke(["verify", str(final)]) == 1
        assert invoke(["rebuild", str(final)]) == 0, capsys.readouterr()
        assert "1 file rebuilt" in capsys.readouterr().out
        assert {path: path.read_bytes() for path in final.rglob("*") if path.is_file()} == whole
        assert invoke(["verify", str(final)]) == 0
    for rank in range(RANKS):
        loaded(final, rank)

    lost.unlink()
    kept.unlink()
    shutil.copytree(final, tmp_path / "left")
    assert invoke(["rebuild", str(final)]) == 1
    assert "bears the loss of 1 (xor) and lacks" in capsys.readouterr().out
    assert sorted(os.listdir(final)) == sorted(os.listdir(tmp_path / "left"))


def test_trainers_files_are_lost_from_the_store_after_all_nodes_are(tmp_path, capsys):
    """Each file of a raw image by itself, zeros between them, and links in the trainer's directory beside them."""
    run_on_three_nodes(tmp_path, FILES, str(tmp_path / "out"), saves=1)
    final = next((tmp_path / "j").glob("step-*"))
    assert verify_path(str(final)).ok
    whole = {path: path.read_bytes() for path in final.rglob("*") if path.is_file()}
    raw = sorted(final.glob("r00001-p*.bin"))
    assert len(raw) == 14
    large = max(raw, key=lambda path: path.stat().st_size)
    damages = [large.unlink, lambda: [path.unlink() for path in final.glob("r00001-p*")]]
    damages += [lambda: flip(large, 17_200_000), lambda: flip(raw[5], 7)]
    for damage in damages:
        damage()
        assert not verify_path(str(final)).ok
        assert invoke(["rebuild", str(final)]) == 0, capsys.readouterr()
        assert {path: path.read_bytes() for path in final.rglob("*") if path.is_file()} == whole
        assert verify_path(str(final)).ok
    w = torch.load(tmp_path / "out" / "1" / "state.pt", mmap=True)["w"]
    assert torch.equal(w, torch.arange(2_200_005))
