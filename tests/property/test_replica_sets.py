"""Meshes of any part of a job: the sets of replicas divide the mesh, and their slices each tensor, each row once."""

import math
from types import SimpleNamespace

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard

from ckptd.shared.format.rank_members import members_of, ranks_in
from ckptd_client._state.replica_slices import slices_of, stream_of
from ckptd_client._state.replicas import _Meshes


@st.composite
def meshes(draw):
    """A mesh of some ranks of a job, in any order, as torch has it on each of them: ranks by place."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    job = draw(st.permutations(range(math.prod(shape) + draw(st.integers(0, 8)))))
    if draw(st.booleans()):
        job = sorted(job)
    return torch.tensor(job[: math.prod(shape)]).view(shape)


def on(mesh, rank, placements):
    """What of a DTensor says where it lies, on a rank of the mesh."""
    place = (mesh == rank).nonzero()[0].tolist()
    device_mesh = SimpleNamespace(mesh=mesh, ndim=mesh.ndim, get_coordinate=lambda: place)
    return SimpleNamespace(device_mesh=device_mesh, placements=placements)


@given(mesh=meshes(), data=st.data(), sizes=st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_the_slices_of_each_set_cover_each_tensor_once(mesh, data, sizes):
    placements = [data.draw(st.sampled_from([Replicate(), Shard(0)])) for _ in mesh.shape]
    everyone = sorted(mesh.flatten().tolist())
    sets = {rank: _Meshes().of(on(mesh, rank, placements)) for rank in everyone}
    assert {held for _, held in sets.values()} == {tuple(everyone)}
    replicas = math.prod(n for n, placement in zip(mesh.shape, placements, strict=True) if placement.is_replicate())
    for rank, (ranks, _) in sets.items():
        assert rank in ranks
        assert len(ranks) == replicas
        assert all(sets[other][0] == ranks for other in ranks)
        assert ranks_in(members_of(ranks)) == ranks
    names = [f"t{i}" for i in range(len(sizes))]
    values = [torch.empty(size, 2, device="meta") for size in sizes]
    for ranks in {ranks for ranks, _ in sets.values()}:
        stream = stream_of(ranks, range(len(sizes)), names, values)
        rows = [[] for _ in sizes]
        for rank in ranks:
            own, absent = slices_of([stream], rank)
            assert own.keys().isdisjoint(absent)
            for position, found in own.items():
                rows[position] += range(found.first, found.stop)
        assert [sorted(one) for one in rows] == [[*range(size if size > 1 else 2)] for size in sizes]
