"""The programs of examples/, as they stand there: killed, and compared with a run that nobody disturbed."""

import glob
import os
import signal
import subprocess
import sys

import pytest
from safetensors.torch import load_file

from tests.cluster import ROOT, Node
from tests.interop.launch import TIMEOUT_S
from tests.unit.client.same import difference

pytestmark = pytest.mark.timeout(300)
STEPS = 60


@pytest.fixture
def node(fresh_node):
    return fresh_node


def example(name, node):
    """A copy with the node's store; its path."""
    with open(os.path.join(ROOT, "examples", name), encoding="utf-8") as file:
        code = file.read()
    assert code.count('store="/tmp/ckpt"') == 1
    path = os.path.join(node.temporary, name)
    with open(path, "w", encoding="utf-8") as file:
        file.write(code.replace('store="/tmp/ckpt"', f"store={node.store!r}"))
    return path


def torchrun(node, script, *, restarts=0):
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", str(restarts)]
    process = subprocess.Popen(
        [sys.executable, *command, script],
        env=node.environ(STEPS=str(STEPS), PYTHONWARNINGS="ignore"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    node.children.append(process)
    return process


def children(pid):
    with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
        return [int(child) for child in file.read().split()]


def last_tensors(node, job):
    """What the last checkpoint holds, by name of file and tensor."""
    directory = os.path.join(node.store, job, "latest")
    assert os.path.basename(os.path.realpath(directory)).startswith(f"step-{STEPS - 1:09d}.")
    found = {}
    for path in sorted(glob.glob(os.path.join(directory, "*.safetensors"))):
        tensors = {name: value for name, value in load_file(path).items() if not name.startswith("__ckptd_pad__")}
        found |= {f"{os.path.basename(path)} {name}": value for name, value in tensors.items()}
    return found


def test_fsdp2_goes_on_to_the_bit_when_a_rank_is_killed(node, tmp_path_factory):
    process = torchrun(node, example("fsdp2.py", node), restarts=1)
    said = []
    for line in process.stdout:
        said.append(line)
        if line.startswith("rank 1 step 29 "):
            ranks = children(process.pid)
            assert len(ranks) == 2, said
            os.kill(ranks[0], signal.SIGKILL)
    assert process.wait(TIMEOUT_S) == 0, "".join(said)
    text = "".join(said)
    assert text.count("starting at step 0, from nothing\n") == 2, text
    assert text.count("starting at step 30, from arena\n") == 2 or text.count("starting at step 20, from arena\n") == 2

    with Node(str(tmp_path_factory.mktemp("undisturbed"))) as other:
        other.start()
        undisturbed, _ = torchrun(other, example("fsdp2.py", other)).communicate(timeout=TIMEOUT_S)
        assert "step 59" in undisturbed, undisturbed
        assert sorted(set(undisturbed.splitlines())) == sorted(
            {line for line in text.splitlines() if line in undisturbed}
        )
        expected, found = last_tensors(other, "fsdp2-example"), last_tensors(node, "fsdp2-example")
        assert len(expected) > 50
        assert not difference(expected, found), difference(expected, found)
