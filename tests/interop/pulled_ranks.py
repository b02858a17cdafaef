"""What each rank of test_pulled.py runs: a sharded model and its AdamW, saved in memory, loaded by other ranks.

pulled_ranks.py save <folder> <job> <milestone>
pulled_ranks.py load <folder> <job> <tier> <few>      few: layouts are read of the ranks that hold something, not of all
pulled_ranks.py save_parts <folder> <job> <milestone>    two halves of the job hold a tensor of one name each
pulled_ranks.py load_parts <folder> <job>                as few as may be; a name of two tensors is refused

The store gets none of it. Run by tests/interop/launch.py on CPUs with gloo.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ckptd_client import MismatchError, RestoreError
from ckptd_client._load import pulled_fit
from tests.interop.off_store import STEP, connect, keep_off_the_store
from tests.interop.rank_program import carry_out
from tests.interop.shards import cpu_mesh
from tests.unit.client.same import difference

ROWS, COLUMNS = 4099, 256


def drawn(seed, *shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Training:
    """FSDP2 shards of rows, columns of tensor parallelism, a replica, plain tensors, and what an optimizer made."""

    def __init__(self, seed):
        mesh = cpu_mesh((dist.get_world_size(),))
        whole = {
            "rows": (drawn(seed, ROWS, COLUMNS), Shard(0)),
            "few": (drawn(seed + 1, 3, 5, dtype=torch.bfloat16), Shard(0)),
            "columns": (drawn(seed + 2, 64, 1030), Shard(1)),
            "replica": (drawn(seed + 3, 7), Replicate()),
        }
        self.model = {name: distribute_tensor(one, mesh, [how]) for name, (one, how) in whole.items()}
        weights = [torch.nn.Parameter(self.model[name]) for name in ("rows", "columns")]
        self.optimizer = torch.optim.AdamW(weights, lr=0.01 * seed, foreach=False)
        for weight in weights:
            weight.grad = weight.detach() * 0.5
        self.optimizer.step()
        self.model |= {
            "rows": weights[0],
            "columns": weights[1],
            "plain": drawn(seed + 4, 33),
            "step": torch.tensor(seed),
        }
        self.state = {"model": self.model, "optimizer": self.optimizer, "epoch": seed}

    def whole(self):
        """Of all ranks."""
        found = {f"model.{name}": full(value) for name, value in self.model.items()}
        for number, held in self.optimizer.state_dict()["state"].items():
            found |= {f"optimizer.{number}.{name}": full(value) for name, value in held.items()}
        return found | {"epoch": self.state["epoch"], "lr": self.optimizer.param_groups[0]["lr"]}


def full(value):
    value = value.detach() if isinstance(value, torch.Tensor) else value
    return value.full_tensor() if isinstance(value, DTensor) else value


def save(folder, job, milestone):
    training, client = Training(1), connect(job)
    client.save({"first": torch.zeros(3)}, 1).wait("durable", 60)  # the cadence counts from here
    whole = training.whole()
    if dist.get_rank() == 0:
        keep_off_the_store(client, job)
        torch.save(whole, f"{folder}/{job}.pt")
    client.save(training.state, STEP).wait(milestone, 60)


def load(folder, job, tier, few):
    if few == "few":
        pulled_fit.ALL_UP_TO = 0
    expected = torch.load(f"{folder}/{job}.pt", weights_only=False)
    training, client = Training(2), connect(job)
    restored = client.load(training.state)
    assert (restored.step, restored.tier) == (STEP, tier), restored
    whole = training.whole()
    assert whole.keys() == expected.keys()
    for name, value in expected.items():
        found = whole[name]
        assert not difference(value, found) if isinstance(value, torch.Tensor) else value == found, name
    said = "layouts of" in " ".join(restored.notes)
    assert said == (few == "few"), restored.notes
    print(f"rank {dist.get_rank()} notes {restored.notes}", flush=True)


def half(fill):
    """A tensor on a mesh of this rank's half of the job."""
    size = dist.get_world_size() // 2
    meshes = [DeviceMesh("cpu", list(range(first, first + size))) for first in (0, size)]
    mesh = meshes[dist.get_rank() // size]
    return distribute_tensor(torch.full((64, 8), fill), mesh, [Shard(0)], src_data_rank=None)


def save_parts(folder, job, milestone):
    client = connect(job)
    client.save({"first": torch.zeros(3)}, 1).wait("durable", 60)
    if dist.get_rank() == 0:
        keep_off_the_store(client, job)
    half_of = 2 * dist.get_rank() // dist.get_world_size()
    client.save({"w": half(1.0 + half_of)}, STEP).wait(milestone, 60)


def load_parts(folder, job):
    pulled_fit.ALL_UP_TO = 0
    state = {"w": torch.zeros(64, 8)}
    try:
        restored = connect(job).load(state)
    except (MismatchError, RestoreError) as error:  # its own finding, or that of a rank that was faster
        print(f"rank {dist.get_rank()} refused: {error}", flush=True)
    else:
        raise AssertionError(f"rank {dist.get_rank()} took {state['w'].unique()} of two tensors: {restored}")


if __name__ == "__main__":
    carry_out({"save": save, "load": load, "save_parts": save_parts, "load_parts": load_parts})
