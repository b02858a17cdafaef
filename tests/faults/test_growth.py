"""Descriptors and memory do not grow: not with the number of tensors, not with the number of saves."""

import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import Node
from tests.faults.ranks import told

pytestmark = [pytest.mark.faults, pytest.mark.timeout(120)]

SAVES = 200
TENSORS = 2000
OF_A_TRAINING = 64  # descriptors that it may have
OF_A_DAEMON = 256
LIMIT_MB = 6  # of growth over SAVES; each save is of 8 MB

# Prints what this process has after a few saves, and at the end.
TRAINING = """
import gc, os, sys, resource
import torch, ckptd_client
from torch import nn

def now():
    gc.collect()
    with open("/proc/self/status") as file:
        anonymous = next(int(line.split()[1]) / 1024 for line in file if line.startswith("RssAnon"))
    return anonymous, len(os.listdir("/proc/self/fd"))

saves, tensors, descriptors = map(int, sys.argv[1:4])
resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))
torch.set_num_threads(1)
each = (1 << 20) // tensors
model = nn.ParameterList(nn.Parameter(torch.full((each,), float(i))) for i in range(tensors))
optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5 if tensors < 100 else 0)
with ckptd_client.connect("growth", start=False, save_timeout_s=60) as client:
    client.attach(optimizer, verify="samples")
    state = {"model": model, "optimizer": optimizer, "step": 0}
    for state["step"] in range(1, saves + 1):
        for parameter in model:
            parameter.grad = torch.ones_like(parameter)
        handle = client.save(state)
        optimizer.step()
        if state["step"] % 20 == 0 or saves < 20:
            handle.wait("durable", 60)
        if state["step"] == min(saves, 40):
            print("begun", *now(), flush=True)
            sys.stdin.readline()
    handle.wait("durable", 60)
    print("done", *now(), flush=True)
    sys.stdin.readline()
    expected = [parameter.detach().clone() for parameter in model]
    optimizer.step()
    assert client.load(state).step is not None
    optimizer.step()
print("closed", flush=True)
"""


@pytest.fixture(name="node")
def fixture_node(tmp_path: Path) -> Iterator[Node]:
    with told(str(tmp_path)) as node:
        node.start()
        assert node.daemon is not None
        resource.prlimit(node.daemon.pid, resource.RLIMIT_NOFILE, (OF_A_DAEMON, OF_A_DAEMON))
        yield node


def anonymous_mb(pid: int) -> float:
    """Memory that is the process's alone; slots are not."""
    with open(f"/proc/{pid}/status", encoding="utf-8") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith("RssAnon"))


def kept_descriptors(pid: int) -> int:
    """The fewest of half a second: a request that is carried out has some, which it gives back."""
    return min(_descriptors_after_a_while(pid) for _ in range(10))


def _descriptors_after_a_while(pid: int) -> int:
    time.sleep(0.05)
    return len(os.listdir(f"/proc/{pid}/fd"))


class Training:
    """A run of TRAINING, and what its daemon's processes have meanwhile."""

    def __init__(self, node: Node, *args: int) -> None:
        self._node = node
        self._process = node.run(TRAINING, *map(str, args))

    def at(self, word: str) -> dict[str, tuple[float, int]]:
        """(MB, descriptors) of each process when the training says the word, before it goes on."""
        line = self._process.stdout.readline().decode().split()
        assert line[:1] == [word], self._process.communicate(timeout=20)[1].decode()
        found = {"training": (float(line[1]), int(line[2]))}
        assert self._node.daemon is not None
        pids = {"daemon": self._node.daemon.pid} | {f"worker {w.pid}": w.pid for w in self._node.status().workers}
        for name, pid in pids.items():
            found[name] = (anonymous_mb(pid), kept_descriptors(pid))
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()
        return found

    def end(self) -> None:
        """It ends well."""
        out, errors = self._process.communicate(timeout=60)
        assert b"closed" in out, errors.decode()
        assert self._process.returncode == 0, errors.decode()


def test_saves_leave_neither_memory_nor_descriptors_behind(node: Node):
    training = Training(node, SAVES, 8, OF_A_TRAINING)
    begun, done = training.at("begun"), training.at("done")
    training.end()
    assert begun.keys() == done.keys(), "no worker was lost"
    for name, (mb, descriptors) in done.items():
        assert mb - begun[name][0] < LIMIT_MB, (name, begun, done)
        assert descriptors <= begun[name][1] + 1, (name, begun, done)
    assert node.slots() == []


def test_thousands_of_tensors_need_a_handful_of_descriptors(node: Node):
    training = Training(node, 2, TENSORS, OF_A_TRAINING)
    for word in ("begun", "done"):
        for name, (_, descriptors) in training.at(word).items():
            assert descriptors < OF_A_TRAINING, name
    training.end()
