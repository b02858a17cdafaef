"""What each rank of test_balance.py runs: replicas that save slices of what they all hold.

balance_ranks.py save <folder>         a durable checkpoint of DDP, and reference.pt in the folder
balance_ranks.py load <folder>         in memory and from the store, compared to the bit, with any number of ranks
balance_ranks.py hsdp <folder>         replicated DTensors
balance_ranks.py diverged <folder>     replicas that are none
balance_ranks.py lying <folder>        replicas whose memory is ordered otherwise from rank to rank
balance_ranks.py structure <folder>    a structure that changes on one rank only
balance_ranks.py off <folder>          every rank saves all of its own
"""

import copy
import os
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ckptd_client
from ckptd_client import SaveFailedError
from tests.unit.client.same import difference

JOB = {"load": "save"}.get(sys.argv[1], sys.argv[1])  # each test has a job of its own


def model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Embedding(8000, 32), nn.Linear(32, 96), nn.ReLU(), nn.Linear(96, 32), nn.BatchNorm1d(32), nn.Linear(32, 3)
    )


class Training:
    """DDP with AdamW, and a tensor of this rank's own."""

    def __init__(self, seed=0):
        self.model = DistributedDataParallel(model(seed))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, foreach=True)
        self.own = torch.full((5,), float(dist.get_rank()))
        self.noise = torch.Generator().manual_seed(dist.get_rank())

    def step(self):
        self.optimizer.zero_grad()
        self.model(torch.randint(0, 8000, (8,), generator=self.noise)).square().mean().backward()
        self.optimizer.step()

    def state(self):
        return {"model": self.model, "optimizer": self.optimizer, "own": self.own}

    def plain(self):
        return copy.deepcopy(
            {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "own": self.own}
        )


def connect(**options):
    return ckptd_client.connect(JOB, start=False, **options)


def save(folder):
    training = Training()
    training.step()
    with connect() as client:
        for step in range(3):
            training.step()
            handle = client.save(training.state(), step).wait("staged", 60)
        handle.wait("durable", 60)
        sizes = [None] * dist.get_world_size()
        dist.all_gather_object(sizes, client.stats().nbytes / 3)
        assert max(sizes) / (sum(sizes) / len(sizes)) < 1.1, sizes  # headers and BatchNorm's statistics are everybody's
        expected = training.plain()
        torch.save(expected, os.path.join(folder, f"reference-{dist.get_rank()}.pt"))
        other = Training(9)
        other.step()
        restored = client.load(other.state())
        assert (restored.step, restored.tier) == (2, "arena"), restored
        assert not difference(expected, other.plain()), difference(expected, other.plain())


def load(folder):
    rank = dist.get_rank()
    first = torch.load(os.path.join(folder, "reference-0.pt"))
    with connect() as client:
        training = Training(9)
        training.step()
        assert client.load(training.state()).step == 2
        found = training.plain()
        assert not difference(first["optimizer"], found["optimizer"])
        for name, value in first["model"].items():
            if "running" not in name:
                assert not difference(value, found["model"][name]), name
        assert rank or not difference(first, found), difference(first, found)


def hsdp(_):
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    net = model()
    fully_shard(net, mesh=mesh)
    with connect() as client:
        state = {"net": net}
        expected = copy.deepcopy({k: v.to_local() for k, v in net.state_dict().items() if hasattr(v, "to_local")})
        client.save(state, 1).wait("durable", 60)
        mine = client.stats().nbytes
        whole = sum(t.nbytes for t in expected.values())
        assert mine < 0.75 * whole + 20_000, (mine, whole)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.zero_()
        client.load(state)
        for name, value in expected.items():
            assert not difference(value, net.state_dict()[name].to_local()), name


def diverged(_):
    training = Training()
    training.step()
    if dist.get_rank() == 1:
        with torch.no_grad():
            training.model.module[1].weight.add_(1)
    with connect() as client:
        handle = client.save(training.state(), 1)
        with pytest.raises(SaveFailedError, match="no replicas"):
            handle.wait("staged", 60)
        assert str(handle.end) == "abandoned"
        expected = training.plain()
        client.save(training.state(), 2).wait("staged", 60)
        other = Training(9)
        other.step()
        client.load(other.state())
        assert not difference(expected, other.plain()), difference(expected, other.plain())


def lying(_):
    generator = torch.Generator().manual_seed(3)
    kernel = torch.randn(301, 3, 100, 101, generator=generator)  # more than a digest reads at a time
    matrix = torch.randn(1501, 1601, generator=generator)
    state = {"kernel": kernel.clone(), "matrix": matrix.clone()}
    if dist.get_rank() == 1:
        state = {"kernel": kernel.to(memory_format=torch.channels_last), "matrix": matrix.t().contiguous().t()}
    with connect(replicated=["*"]) as client:
        client.save(state, 1).wait("durable", 60)
        assert client.stats().nbytes < 0.6 * (kernel.nbytes + matrix.nbytes)
        for tensor in state.values():
            tensor.zero_()
        client.load(state)
        assert not difference({"kernel": kernel, "matrix": matrix}, state)


def structure(_):
    training = Training()
    training.step()
    with connect() as client:
        client.save(training.state(), 1).wait("staged", 60)
        # Values that are this rank's alone change nothing for the others.
        state = training.state() | ({"more": torch.ones(7)} if dist.get_rank() == 1 else {})
        client.save(state, 2).wait("staged", 60)
        # One replica more or less of a tensor does: that save ends for all, the next is whole.
        if dist.get_rank() == 1:
            training.optimizer.state[training.model.module[1].weight]["extra"] = torch.ones(400)
        handle = client.save(training.state(), 3)
        with pytest.raises(SaveFailedError, match="different tensors"):
            handle.wait("staged", 60)
        expected = training.plain()
        client.save(training.state(), 4).wait("staged", 60)
        other = Training(9)
        other.step()
        if dist.get_rank() == 1:
            other.optimizer.state[other.model.module[1].weight]["extra"] = torch.zeros(400)
        client.load(other.state())
        assert not difference(expected, other.plain()), difference(expected, other.plain())


def stages(_):
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    torch.manual_seed(rank // 2)
    net = DistributedDataParallel(nn.Linear(100, 400), process_group=groups[rank // 2])
    with connect() as client:
        expected = copy.deepcopy(net.state_dict())
        client.save({"net": net}, 1).wait("durable", 60)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.zero_()
        client.load({"net": net})
        assert not difference(expected, net.state_dict()), "two stages were mixed"


def off(_):
    training = Training()
    training.step()
    whole = sum(t.nbytes for t in training.model.state_dict().values())
    with connect(balance="off") as client:
        client.save(training.state(), 1).wait("staged", 60)
        assert client.stats().nbytes > whole
    plain = {"w": torch.arange(100_000.0)}
    with connect(replicated=["w"]) as client:
        client.save(plain, 2).wait("staged", 60)
        assert client.stats().nbytes < 0.6 * plain["w"].nbytes
        plain["w"].zero_()
        assert client.load(plain).step == 2
        assert not difference(torch.arange(100_000.0), plain["w"])


if __name__ == "__main__":
    dist.init_process_group("gloo")
    globals()[sys.argv[1]](sys.argv[2])
    print(f"rank {dist.get_rank()} did it")
    dist.barrier()
    dist.destroy_process_group()
