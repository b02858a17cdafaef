"""What the layout of a rank says of meshes: of DTensors their own, of replicated plain tensors all ranks."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from ckptd.shared.format.holders import holders_in
from ckptd.shared.format.packed_layout import Known, decode_layout, layout_in, parted
from ckptd_client._image.plan import make_plan

RANKS = 8


def layout_of(rank, make, **options):
    """The parts of the layout of a state that a rank makes."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=RANKS)
    try:
        plan = make_plan(make(), rank=rank, world_size=RANKS, **options)
        assert decode_layout(plan.layout, where="x").rank == rank
        return parted(plan.layout, "x")
    finally:
        dist.destroy_process_group()


def ranks_for(parts, name, offsets, sizes):
    found = holders_in(parts, where="x", known=Known()).of(name, offsets, sizes)
    return None if found is None else [one.rank for one in found]


def turned(rank):
    """A tensor of 6 rows on a mesh whose ranks no strides give: replicas along one dimension, rows along the other."""
    mesh = DeviceMesh("cpu", torch.tensor([[3, 1, 0, 2], [4, 7, 6, 5]]))
    at = mesh.get_coordinate()[1]
    rows = max(0, min(2, 6 - 2 * at))
    local = torch.ones(rows, 3)
    return {"w": DTensor.from_local(local, mesh, [Replicate(), Shard(0)], run_check=False, shape=(6, 3), stride=(3, 1))}


@pytest.mark.parametrize("rank", [0, 2, 5])
@pytest.mark.parametrize("replicated", [None, ()], ids=["each saves all", "slices of replicas"])
def test_any_rank_names_the_ranks_of_a_mesh_in_any_order(rank, replicated):
    """Ranks 2 and 5 have no row of the tensor."""
    parts = layout_of(rank, lambda: turned(rank), replicated=replicated)
    assert ranks_for(parts, "w", (2, 0), (1, 3)) == [1, 7]
    assert ranks_for(parts, "w", (1, 0), (4, 3)) == [3, 1, 0, 4, 7, 6]


def test_a_part_of_the_job_names_its_own_ranks():
    """Of pipeline stages, each with a mesh of its own."""

    def stage():
        mesh = DeviceMesh("cpu", torch.arange(RANKS).reshape(2, 4), mesh_dim_names=("stage", "dp"))["dp"]
        return {"w": DTensor.from_local(torch.ones(1, 2), mesh, [Shard(0)], run_check=False)}

    first, second = layout_of(1, stage), layout_of(6, stage)
    assert ranks_for(first, "w", (2, 0), (2, 2)) == [2, 3]
    assert ranks_for(second, "w", (2, 0), (2, 2)) == [6, 7]
    assert first.form == second.form


@pytest.mark.parametrize("rank", [0, 3, 6])
def test_rows_that_are_sharded_on_two_meshes_one_within_the_other_lie_on_a_mesh_too(rank):
    """As FSDP2 over tensor parallelism has them."""

    def state():
        mesh = DeviceMesh("cpu", torch.arange(RANKS).reshape(4, 2))
        placements = [_StridedShard(0, split_factor=2), Shard(0)]
        local = torch.ones(2, 2)
        return {"w": DTensor.from_local(local, mesh, placements, run_check=False, shape=(16, 2), stride=(2, 1))}

    parts = layout_of(rank, state)
    (box,) = layout_in(parts, where="x", known=Known()).tensors
    assert box.offsets == ({0: 0, 3: 10, 6: 6}[rank], 0)
    found = holders_in(parts, where="x", known=Known()).of("w", (2, 0), (3, 2))
    assert [(one.rank, one.offsets, one.sizes) for one in found] == [(2, (2, 0), (2, 2)), (4, (4, 0), (2, 2))]


def test_a_replicated_plain_tensor_is_sought_on_all_ranks_and_any_other_on_this_one():
    def state():
        return {"common": torch.ones(4), "own": torch.ones(4)}

    parts = layout_of(5, state, replicated=["common"])
    assert ranks_for(parts, "common", (0,), (1,)) == list(range(RANKS))
    assert ranks_for(parts, "own", (0,), (1,)) == [5]
