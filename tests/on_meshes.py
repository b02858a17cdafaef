"""Committed checkpoints of tensors on meshes: one process is each rank in turn, without a daemon."""

import contextlib
import math
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from ckptd.shared.base.ids import JobKey
from ckptd.shared.format.placement import REPLICATED, Mesh, box_at
from ckptd.store.posix.commit import commit
from ckptd.store.posix.scan import Place
from ckptd.system.files import FileLayer
from tests.checkpoints import SAVE, image_of, put_image, put_vote


@contextlib.contextmanager
def rank_of(rank, world_size):
    """torch.distributed as this rank has it."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def values(name, shape):
    """Of a tensor: each element another one."""
    count = math.prod(shape)
    return (torch.arange(count, dtype=torch.float32) + sum(map(ord, name)) * 10_000).reshape(shape)


def spread(name, shape, ranks, mesh_shape, cuts, *, empty=False):
    """This rank's DTensor of a tensor on a mesh."""
    mesh = DeviceMesh("cpu", torch.tensor(ranks).reshape(mesh_shape))
    place = mesh.get_coordinate()
    offsets, sizes = box_at(shape, Mesh(mesh_shape, tuple(place)), cuts)
    part = values(name, shape)[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]
    local = torch.full(sizes, -1.0) if empty else part.clone()
    placements = [Replicate() if cut == REPLICATED else Shard(cut) for cut in cuts]
    stride = torch.empty(shape).stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride), part


def write(store, world_size, state_of, *, per_node=1, replicated=None):
    """A committed checkpoint of what each rank makes; nodes of so many ranks."""
    os.makedirs(store, exist_ok=True)
    place = Place(JobKey(str(store), "demo"), SAVE)
    records = []
    for rank in range(world_size):
        with rank_of(rank, world_size):
            image, record, _ = image_of(state_of(rank), SAVE, rank=rank, world_size=world_size, replicated=replicated)
        put_image(place, record, image)
        records.append(record)
    for first in range(0, world_size, per_node):
        put_vote(place, records[first : first + per_node], world_size=world_size, node=f"n{first:04}", objects=None)
    commit(FileLayer(), place.key, SAVE, "test")
    return place.final


def rows(world_size, *, empty=False):
    """A state of one tensor of 64 rows that are divided among the ranks."""

    def state_of(rank):
        tensor, part = spread("w", (64, 2), list(range(world_size)), (world_size,), (0,), empty=empty)
        return ({"w": tensor}, {"w": part}) if empty else {"w": tensor}

    return state_of


def many_and_few(_rank):
    """Of each of 8 ranks: its rows of a tensor, and of one that has a row for three of them."""
    mesh = list(range(8)), (8,), (0,)
    return {"w": spread("w", (64, 2), *mesh)[0], "few": spread("few", (3, 2), *mesh)[0]}
