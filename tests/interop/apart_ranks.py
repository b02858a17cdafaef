"""What each rank of test_apart.py runs: replicas that differ save all of their own; each element says whose it is.

    apart_ranks.py save <folder>      three checkpoints: apart, alike again, apart; the first save is given up
    apart_ranks.py load <saved by> <hows> <layouts>   joined by commas

Each how (load, load_from, dcp, reader) in each layout (same, plain, sharded, crossed).

The element of a replica's tensor is its number plus APART for each step of the replica: rank 0's, or line 0's, add
nothing. ``line`` lies on a mesh of lines by columns (HSDP): ranks of one column hold the same rows.
"""

import contextlib
import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor, Replicate, Shard

import ckptd_client
from ckptd_client import SaveFailedError
from ckptd_client.dcp import CkptdReader
from tests.interop.shards import cpu_mesh

JOB = "apart"
ROWS = 64
APART = 1000.0
ALIKE_STEP, LAST_STEP = 3, 4  # of the durable ones


def mesh_of(layout):
    """Lines by columns. crossed: the same shape, and yet each rank has other rows."""
    ranks = dist.get_world_size()
    lines = 2 if ranks > 1 else 1
    mesh = cpu_mesh((lines, ranks // lines))
    return mesh, [Shard(0), Replicate()] if layout == "crossed" else [Replicate(), Shard(0)]


def dtensor(whole, mesh, placements):
    """What this rank has of its own idea of the whole; nothing is sent."""
    local = whole
    for dim, placement in enumerate(placements):
        if placement.is_shard():
            local = local.chunk(mesh.shape[dim])[mesh.get_coordinate()[dim]]
    return DTensor.from_local(local.clone(), mesh, placements, run_check=False, shape=whole.shape, stride=(1,))


def numbers():
    return torch.arange(float(ROWS))


def state_of(layout, replica=0.0, line=0.0):
    mesh, placements = mesh_of(layout)
    flat = cpu_mesh((dist.get_world_size(),))
    sharded = layout in {"sharded", "crossed"}
    plain = numbers() + APART * replica
    return {
        "plain": dtensor(plain, flat, [Shard(0)]) if sharded else plain,
        "line": numbers() + APART * line
        if layout == "plain"
        else dtensor(numbers() + APART * line, *((flat, [Shard(0)]) if layout == "sharded" else (mesh, placements))),
        "own": torch.full((3,), float(dist.get_rank())),
    }


def save(_folder):
    mesh, _ = mesh_of("same")
    replica, line = dist.get_rank(), mesh.get_coordinate()[0]
    with ckptd_client.connect(JOB, start=False, replicated=["plain"]) as client:
        for step, drifts in ((1, True), (2, True), (ALIKE_STEP, False), (LAST_STEP, True)):
            state = state_of("same", replica * drifts, line * drifts)
            handle = client.save(state, step)
            if step == 1:
                with contextlib.suppress(SaveFailedError):
                    handle.wait("durable", 60)
                assert str(handle.end) == "abandoned", handle.end
            else:
                handle.wait("durable", 60)
            dist.barrier()


def is_as_saved(layout, saved_by):
    """Whether all is held as it was saved. Two ranks are two lines of one column: each holds all of the line."""
    ranks = dist.get_world_size()
    return ranks == saved_by and (layout == "same" or (layout == "plain" and ranks == 2))


def check(state, layout, how, saved_by):
    """Each its own in the layout that was saved, else everywhere those of the lowest ranks."""
    rank, saved_so = dist.get_rank(), is_as_saved(layout, saved_by)
    line = mesh_of("same")[0].get_coordinate()[0]
    expected = state_of(layout, rank, line) if saved_so else state_of(layout)
    for name in ("plain", "line"):
        got, want = (t.to_local() if isinstance(t, DTensor) else t for t in (state[name], expected[name]))
        assert torch.equal(got, want), f"{how} {layout}: rank {rank} has {got.tolist()} of {name}"
    if how not in {"dcp", "reader"} or dist.get_world_size() == saved_by:
        assert state["own"][0] == (rank if rank < saved_by else 0), "what nobody called a replica is each rank's own"


def load(saved_by, hows, layouts):
    for how in hows.split(","):
        for layout in layouts.split(","):
            load_one(how, layout, int(saved_by))


def load_one(how, layout, saved_by):
    directory = os.path.join(os.environ["CKPTD_STORE"], JOB, "latest")
    state = state_of(layout)
    for value in (state["plain"], state["line"], state["own"]):
        (value.to_local() if isinstance(value, DTensor) else value).fill_(-1)
    with ckptd_client.connect(JOB, start=False, replicated=["plain"]) as client:
        if how == "load":
            notes = client.load(state).notes
        elif how == "load_from":
            notes = client.load_from(directory, state).notes
        else:
            reader = CkptdReader(client if how == "dcp" else directory)
            dcp.load(state, storage_reader=reader)
            notes = reader.notes
        check(state, layout, how, saved_by)
        assert any("its replicas differed" in note for note in notes), (how, layout, notes)
        taken = [note for note in notes if "were taken" in note]
        assert bool(taken) != is_as_saved(layout, saved_by), (how, layout, notes)
        if taken:
            told = " ".join(sorted(taken))
            assert "plain" in told, taken
            assert "line" in told, taken
            assert "the bytes of rank 0 were taken, on every rank; those of other ranks differed" in told, taken
            assert ("the bytes of ranks 0 to 1 were taken" in told) == (saved_by == 4), taken
        dist.barrier()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    {"save": save, "load": load}[sys.argv[1]](*sys.argv[2:])
    print(f"rank {dist.get_rank()} did it")
    dist.barrier()
    dist.destroy_process_group()
