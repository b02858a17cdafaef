"""What the ranks of a test have of tensors that are sharded: meshes, and which elements are whose."""

import functools
import math

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from tests.unit.client.same import difference


@functools.cache
def cpu_mesh(shape, names=None):
    """init_device_mesh on CPUs, once: each makes a group of processes for each of its dimensions, with its threads."""
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


@functools.cache
def _numbers(shape, mesh, placements):
    """The number of each element that this rank has, counted in the whole tensor; compared with what a gather gives."""
    whole = torch.arange(math.prod(shape)).view(shape)
    numbers = distribute_tensor(whole, mesh, placements, src_data_rank=None)
    assert torch.equal(numbers.full_tensor(), whole), placements
    return numbers.to_local()


def unlike(value, whole, where):
    """Where a value differs from what it should be, empty when it is the same to the bit.

    Of a DTensor a rank compares what it has: a gather of each costs more than all else that a test does.
    """
    if not isinstance(value, DTensor) or not isinstance(whole, torch.Tensor) or value.shape != whole.shape:
        return difference(value, whole, where)
    numbers = _numbers(tuple(value.shape), value.device_mesh, tuple(value.placements))
    return difference(value.to_local(), whole.reshape(-1)[numbers], where)
