"""What each rank of test_training.py runs: saves beside the collectives of a training, and of shards of any size.

training_ranks.py counted             collectives of saves, waits and loads are counted: there are none
training_ranks.py interleaved         one thread saves while another all-reduces, in another order on each rank
training_ranks.py uneven              overlapped saves of uneven and empty shards
training_ranks.py forks               DataLoader workers are forked while late copies run
training_ranks.py raises <folder>     a rank leaves between save and step; the values saved into the folder
training_ranks.py after <folder>      the same job, started again, compared with them
"""

import copy
import os
import random
import sys
import threading
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import ckptd_client
from ckptd_client._save.late.thread import Overlap
from tests.unit.client.same import difference

JOB = {"after": "raises"}.get(sys.argv[1], sys.argv[1])
REDUCTIONS = 300
SAVES = 20


def collectives():
    """How many this rank has begun in its group, and how many groups there are."""
    groups = dist.distributed_c10d._world.pg_map
    return sum(group._get_sequence_number_for_group() for group in groups), len(groups)


def counted():
    net = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)))
    optimizer = torch.optim.AdamW(net.parameters())
    state = {"net": net, "optimizer": optimizer, "step": 0}

    def train():
        net(torch.randn(4, 64)).sum().backward()
        optimizer.step()
        state["step"] += 1

    train()
    with ckptd_client.connect(JOB, start=False) as client:
        client.attach(optimizer, verify="samples")
        during = 0
        for _ in range(6):
            before = collectives()
            handle = client.save(state)
            during += collectives()[0] - before[0]
            train()
        before = collectives()
        handle.wait("durable", 60)
        state["more"] = torch.ones(5)  # another structure: a new plan
        client.prepare(state)
        client.save(state).wait("staged", 60)
        client.load(state)
        assert collectives() == before
        assert during == 0
        assert client.stats().plans == 2
    dist.barrier()
    assert collectives()[0] > before[0], "they are counted"


def interleaved():
    rank, size = dist.get_rank(), dist.get_world_size()
    chance = random.Random(rank)
    problems = []

    def save():
        try:
            for step in range(SAVES):
                state["w"].fill_(step * size + rank)
                handle = client.save(state, step)
                time.sleep(chance.random() / 50)
            handle.wait("durable", 60)
        except Exception as error:
            problems.append(error)

    state = {"w": torch.zeros(100_000)}
    with ckptd_client.connect(JOB, start=False) as client:
        saver = threading.Thread(target=save)
        saver.start()
        for turn in range(REDUCTIONS):
            value = torch.full((1000,), float(turn + rank))
            dist.all_reduce(value)
            assert torch.equal(value, torch.full((1000,), size * turn + size * (size - 1) / 2)), turn
            time.sleep(chance.random() / 500)
        saver.join(60)
        assert not saver.is_alive()
        assert not problems, problems
        state["w"].zero_()
        assert client.load(state).step == SAVES - 1
        assert torch.equal(state["w"], torch.full((100_000,), float((SAVES - 1) * size + rank)))


def uneven():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    net = nn.Sequential(nn.Linear(5, 7), nn.Linear(5, 1), nn.Linear(5, 4, dtype=torch.bfloat16))
    fully_shard(net, mesh=mesh)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, foreach=False)
    state = {"net": net, "optimizer": optimizer}

    def step():
        for parameter in net.parameters():
            parameter.grad = torch.full_like(parameter, 0.5)
        optimizer.step()

    def parts():
        tensors = [*net.parameters(), *(t for s in optimizer.state.values() for t in s.values())]
        return copy.deepcopy([t.to_local() if hasattr(t, "to_local") else t for t in map(torch.Tensor.detach, tensors)])

    step()
    sizes = {part.numel() for part in parts()}
    assert dist.get_rank() == 0 or 0 in sizes, sizes
    with ckptd_client.connect(JOB, start=False) as client:
        client.attach(optimizer, verify="samples")
        for _ in range(6):
            expected = parts()
            handle = client.save(state)
            step()
        assert client.stats().last_late_nbytes
        handle.wait("durable", 60)
        for _ in range(2):  # from memory; the next start of the job, from the store
            client.load(state)
            assert not difference(expected, parts()), difference(expected, parts())
            step()
    dist.barrier()
    with ckptd_client.connect(JOB, start=False) as client:
        client.load(state)
        assert not difference(expected, parts()), difference(expected, parts())


def forks():
    running, go, copy_now = threading.Event(), threading.Event(), Overlap._copy
    Overlap._copy = lambda overlap: (running.set(), go.wait(20), copy_now(overlap))
    training = Lone()
    with ckptd_client.connect(JOB, start=False) as client:
        client.attach(training.optimizer, verify="samples")
        batches = 0
        for step in range(5):
            training.step()
            expected = copy.deepcopy(training.plain())
            go.clear()
            running.clear()
            handle = client.save(training.state, step)
            assert running.wait(10)
            for batch in DataLoader(torch.randn(8, 50), 2, num_workers=2, multiprocessing_context="fork"):
                training.model(batch).sum().backward()
                batches += 1
            threading.Timer(0.2, go.set).start()
            training.optimizer.step()
            handle.wait("staged", 60)
        assert batches == 20
        client.load(training.state)
        assert not difference(expected, training.plain()), difference(expected, training.plain())


class Lone:
    """A training that knows of no other rank but by its saves."""

    def __init__(self):
        self.model = nn.Linear(50, 50)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.state = {"model": self.model, "optimizer": self.optimizer}
        self.path = os.path.join(*sys.argv[2:3], f"expected-{dist.get_rank()}.pt")

    def step(self):
        self.model(torch.randn(3, 50)).sum().backward()
        self.optimizer.step()

    def plain(self):
        return {name: value.state_dict() for name, value in self.state.items()}


def raises():
    """Late copies take half a second; rank 1 leaves, as by an error, before they are done."""
    copy_now = Overlap._copy
    Overlap._copy = lambda overlap: (time.sleep(0.5), copy_now(overlap))
    training, client = Lone(), ckptd_client.connect(JOB, start=False)
    training.step()
    client.attach(training.optimizer, verify="samples")
    for step in range(4):
        client.save(training.state, step)
        training.step()
    torch.save(training.plain(), training.path)
    handle = client.save(training.state, 4)
    assert client._saving.overlapping.running
    print(f"rank {dist.get_rank()} did it", flush=True)
    if dist.get_rank() == 1:
        raise SystemExit  # neither step nor close
    training.step()
    handle.wait("staged", 60)
    raise SystemExit


def after():
    training = Lone()
    training.step()
    with ckptd_client.connect(JOB, start=False) as client:
        assert client.load(training.state).step == 4
    expected = torch.load(training.path, weights_only=True)
    assert not difference(expected, training.plain()), difference(expected, training.plain())


if __name__ == "__main__":
    dist.init_process_group("gloo")
    globals()[sys.argv[1]]()
    print(f"rank {dist.get_rank()} did it")
    dist.barrier()
    dist.destroy_process_group()
