"""What each rank of test_stages.py runs: pipeline stages that use the same names, and replicas within each stage.

    stage_ranks.py save <folder> <milestone>     a save of which each rank writes its slice; what it was, in the folder
    stage_ranks.py load <folder> <tiers>         compared to the bit; tiers of the ranks, joined by commas, or of all
    stage_ranks.py fewer <folder>                on another number of ranks, where names mean several tensors
    stage_ranks.py differ <folder>               replicas of one stage that are none

Half of the ranks are the first stage. A stage's mesh is 2 by n/4: replicas by shards. Run by tests/interop/launch.py on
CPUs with gloo.
"""

import copy
import os
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

import ckptd_client
from ckptd_client import MismatchError, SaveFailedError
from tests.interop.off_store import STEP, keep_off_the_store
from tests.interop.shards import cpu_mesh
from tests.unit.client.same import difference

JOB = {"differ": "differ"}.get(sys.argv[1], "stages")
ROWS, COLUMNS = 600, 30


class Training:
    """A stage under DDP and one under HSDP, each with AdamW, and tensors on a part of a mesh. All names are alike."""

    def __init__(self, seed):
        ranks = dist.get_world_size()
        mesh = cpu_mesh((2, 2, ranks // 4), ("stage", "replicate", "shard"))
        halves = [range(ranks // 2), range(ranks // 2, ranks)]
        groups = [dist.new_group(list(half)) for half in halves]
        self.stage = int(dist.get_rank() >= ranks // 2)
        self.noise = torch.Generator().manual_seed(dist.get_rank())
        torch.manual_seed(100 * seed + self.stage)
        self.ddp = DistributedDataParallel(nn.Linear(COLUMNS, ROWS), process_group=groups[self.stage])
        self.hsdp = nn.Linear(COLUMNS, ROWS)
        fully_shard(self.hsdp, mesh=mesh["replicate", "shard"])
        self.optimizers = [torch.optim.AdamW(net.parameters(), foreach=True) for net in (self.ddp, self.hsdp)]
        self.loose = {
            "line": self._placed(mesh["replicate", "shard"], [Replicate(), Shard(0)]),
            "all": self._placed(mesh["replicate", "shard"], [Replicate(), Replicate()]),
            "shards": self._placed(mesh["shard"], [Shard(0)]),
        }
        self.own = torch.full((5,), float(dist.get_rank()))

    def _placed(self, mesh, placements):
        """This rank's part of a tensor that is its stage's."""
        local = torch.arange(float(ROWS)) + 1000 * (self.stage + 1)
        for dim, placement in enumerate(placements):
            local = local.chunk(mesh.shape[dim])[mesh.get_coordinate()[dim]] if placement.is_shard() else local
        return DTensor.from_local(local.clone(), mesh, placements, run_check=False, shape=(ROWS,), stride=(1,))

    def step(self):
        for net, optimizer in zip((self.ddp, self.hsdp), self.optimizers, strict=True):
            optimizer.zero_grad()
            net(torch.randn(8, COLUMNS, generator=self.noise)).square().mean().backward()
            optimizer.step()

    def state(self):
        ddp, hsdp = self.optimizers
        return {"ddp": self.ddp, "d": ddp, "hsdp": self.hsdp, "h": hsdp, "loose": dict(self.loose), "own": self.own}

    def plain(self):
        """All that this rank has, as plain tensors."""
        local = torch.utils._pytree.tree_map(
            lambda value: value.to_local() if isinstance(value, DTensor) else value,
            {"ddp": self.ddp.state_dict(), "hsdp": self.hsdp.state_dict(), "loose": self.loose, "own": self.own}
            | {name: self.optimizers[i].state_dict() for i, name in enumerate("dh")},
        )
        return copy.deepcopy(local)


def connect(**options):
    return ckptd_client.connect(JOB, start=False, **options)


def nbytes_of(tree):
    leaves, _ = torch.utils._pytree.tree_flatten(tree)
    return sum(value.nbytes for value in leaves if isinstance(value, torch.Tensor))


def kept(folder, rank):
    return os.path.join(folder, f"rank-{rank}.pt")


def save(folder, milestone):
    training = Training(1)
    training.step()
    with connect(drain_every=1000, verify_replicas=1) as client:
        client.save({"first": torch.zeros(3)}, 1).wait("durable", 60)  # the cadence counts from here
        if milestone != "durable" and dist.get_rank() == 0:
            keep_off_the_store(client, JOB)
        before = client.stats().nbytes
        client.save(training.state(), STEP, drain=milestone == "durable").wait(milestone, 60)
        expected = training.plain()
        whole, saved, shared = nbytes_of(expected), client.stats().nbytes - before, dist.get_world_size() // 2
        # DDP's and "all" by the ranks of a stage, HSDP's and "line" by two, "shards" and "own" by no other.
        assert saved < whole / (2 if shared == 2 else 3) + 5 * ROWS + 40_000, (saved, whole)
        torch.save(expected, kept(folder, dist.get_rank()))
        if milestone == "durable":
            check(client, "arena", expected)


def check(client, tier, expected):
    """Loads into a training of other values; compared to the bit."""
    training = Training(9)
    training.step()
    for tensor in training.loose.values():
        tensor.to_local().fill_(-1)
    restored = client.load(training.state())
    assert (restored.step, restored.tier) == (STEP, tier), restored
    assert not restored.notes, restored.notes
    different = difference(expected, training.plain())
    assert not different, f"rank {dist.get_rank()}: {different}"


def load(folder, tiers):
    told = tiers.split(",")
    with connect() as client:
        check(client, told[dist.get_rank() % len(told)], torch.load(kept(folder, dist.get_rank())))


def fewer(folder):
    """Two ranks of the same stage, as a plain job: what each name means, nothing says."""
    state = {"loose": {name: torch.zeros(ROWS) for name in ("line", "all", "shards")}}
    with connect() as client, pytest.raises(MismatchError) as caught:
        client.load(state, strict=False)
    assert "is one tensor on rank" in str(caught.value), caught.value
    assert "nothing says which of them these ranks want" in str(caught.value), caught.value


def differ(folder):
    training = Training(1)
    training.step()
    if dist.get_rank() == dist.get_world_size() - 1:
        with torch.no_grad():
            training.ddp.module.weight.add_(1)
    last = dist.get_world_size() - 1
    with connect() as client:
        handle = client.save(training.state(), 1)
        with pytest.raises(SaveFailedError, match=f"ranks {last // 2 + 1} and {last} are no replicas") as caught:
            handle.wait("staged", 60)
        assert str(handle.end) == "abandoned"
        in_stage = training.stage == 1
        assert ("ddp.module.weight" in str(caught.value)) is in_stage, caught.value
        expected = training.plain()
        client.save(training.state(), 2).wait("durable", 60)
        other = Training(9)
        other.step()
        client.load(other.state())
        assert not difference(expected, other.plain()), difference(expected, other.plain())


if __name__ == "__main__":
    dist.init_process_group("gloo")
    globals()[sys.argv[1]](*sys.argv[2:])
    print(f"rank {dist.get_rank()} did it")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # FSDP2 with gloo now and then aborts at the end of the interpreter, when all is done
