"""The programs of examples/, as they stand there: killed, and compared with a run that nobody disturbed."""

import glob
import os
import re
import signal
import subprocess
import sys

import pytest
from safetensors.torch import load_file

from tests import pythons
from tests.cluster import ROOT, Node
from tests.interop.launch import TIMEOUT_S
from tests.unit.client.same import difference

# Under torchrun a gloo group that is started again may hang by itself, and what torchrun leaves holds its pipe.
pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(os.environ.get("FAULTS") != "long", reason="FAULTS=long"),
]
STEPS = 60
_OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # else a restarted rank may find another's former address
_LOSS_RE = re.compile(r"rank \d step \d+ loss \d+\.\d{4}")  # two ranks may print into one line


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
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", str(restarts)]
    return start(node, *launcher, script)


def start(node, *arguments):
    process = pythons.Popen(
        [sys.executable, *arguments],
        env=node.environ(STEPS=str(STEPS), PAUSE_S="0.02", PYTHONWARNINGS="ignore", PYTHONUNBUFFERED="", **_OWN_STORE),
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
    said, killed = [], False
    for line in process.stdout:
        said.append(line)
        if "rank 1 step 29 " in line and not killed:
            ranks, killed = children(process.pid), True
            assert len(ranks) == 2, said
            os.kill(ranks[0], signal.SIGKILL)
    assert process.wait(TIMEOUT_S) == 0, "".join(said)
    text = "".join(said)
    assert text.count("starting at step 0, from nothing") == 2, text
    assert 2 in {text.count(f"starting at step {step}, from arena") for step in (20, 30)}, text

    with Node(str(tmp_path_factory.mktemp("undisturbed"))) as other:
        other.start()
        undisturbed, _ = torchrun(other, example("fsdp2.py", other)).communicate(timeout=TIMEOUT_S)
        assert "step 59" in undisturbed, undisturbed
        losses = set(_LOSS_RE.findall(undisturbed))
        assert len(losses) == 2 * STEPS // 10
        missed = {line.rpartition(" loss ")[0] for line in losses ^ set(_LOSS_RE.findall(text))}
        assert missed <= {"rank 0 step 29"}, missed  # the rank was killed before it told
        expected, found = last_tensors(other, "fsdp2-example"), last_tensors(node, "fsdp2-example")
        assert len(expected) > 50
        assert not difference(expected, found), difference(expected, found)


def command_of(pid):
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        return file.read().decode().split("\0")


def test_a_replaced_rank_is_filled_while_the_others_keep_their_state(node, tmp_path_factory):
    """Twice: a rank, and then the one whose daemon would coordinate. No survivor trains any step twice."""
    process = start(node, example("replace_rank.py", node))
    said, doomed = [], {"rank 2 step 25\n": "1", "rank 1 step 45\n": "0"}
    for line in process.stdout:
        said.append(line)
        if line in doomed:
            victim = doomed.pop(line)
            pid = next(pid for pid in children(process.pid) if command_of(pid)[2] == victim)
            os.kill(pid, signal.SIGKILL)
    text = "".join(said)
    assert process.wait(TIMEOUT_S) == 0, text
    met = re.findall(r"^rank (\d) had step (-?\d+), has Restored\(step=(\d+), tier='(\w+)'", text, re.MULTILINE)
    assert len(met) == 6, text
    assert {tier for *_, tier in met} == {"arena"}, text
    for first, newcomer in ((met[:3], "1"), (met[3:], "0")):
        assert {(rank, had) for rank, had, *_ in first if had == "-1"} == {(newcomer, "-1")}, text
        assert len({has for _, _, has, _ in first}) == 1, text
        assert all(0 <= int(has) - int(had) <= 1 for rank, had, has, _ in first if rank != newcomer), text  # never back
    trained = [line for line in said if re.fullmatch(r"rank 2 step \d+\n", line)]
    assert len(trained) == len(set(trained)) >= STEPS - 2, text

    with Node(str(tmp_path_factory.mktemp("undisturbed"))) as other:
        other.start()
        undisturbed, _ = start(other, example("replace_rank.py", other)).communicate(timeout=TIMEOUT_S)
        assert f"rank 0 step {STEPS - 1}\n" in undisturbed, undisturbed
        expected, found = last_tensors(other, "replace-example"), last_tensors(node, "replace-example")
        assert len(expected) > 10
        assert not difference(expected, found), difference(expected, found)
