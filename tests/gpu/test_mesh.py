"""DTensors on a mesh of CUDA devices, with NCCL, this process alone."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.unit.client.same import difference


@pytest.fixture
def mesh(tmp_path, device):
    if not dist.is_nccl_available():
        pytest.skip("needs NCCL")
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1, device_id=device)
    yield init_device_mesh("cuda", (1,))
    dist.destroy_process_group()


def test_dtensors_come_back(mesh, join, device):
    whole = {"rows": torch.randn(300, 40, device=device), "all": torch.randn(30, device=device)}
    state = {
        "rows": distribute_tensor(whole["rows"], mesh, [Shard(0)]),
        "all": distribute_tensor(whole["all"], mesh, [Replicate()]),
    }
    client = join()
    client.save(state, 1).wait("staged", 30)
    for tensor in state.values():
        tensor.to_local().zero_()
    client.load(state)
    assert not difference(whole, {name: tensor.full_tensor() for name, tensor in state.items()})
