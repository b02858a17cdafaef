"""What each rank of test_dcp_replicas.py runs: saves through DCP of replicas that differ in some of them.

dcp_replica_ranks.py save <way> <verify_replicas>   way: sync, new (a writer for each save), cached, staged, or
                                                    sharded: nothing is held twice
dcp_replica_ranks.py load <way> <steps>             the notes of each reader; steps: of which replicas differ
"""

import glob
import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.tensor import DTensor, Replicate, Shard

import ckptd_client
from ckptd_client.dcp import CkptdReader, CkptdStager, CkptdWriter
from tests.interop.shards import cpu_mesh

DRIFTS = {2: "plain.b", 4: "line", 5: "all"}  # by step; what differs on the last rank
STEPS = 6


def state_of(way, step):
    ranks, rank = dist.get_world_size(), dist.get_rank()
    drift = DRIFTS.get(step) if rank == ranks - 1 else None
    numbers = torch.arange(24_000.0) + step
    flat = cpu_mesh((ranks,))
    mine = DTensor.from_local(numbers.chunk(ranks)[rank].clone(), flat, [Shard(0)], run_check=False)
    state = {"mine": mine, "step": step, "rng": torch.full((5,), float(rank))}
    if way == "sharded":
        return state
    lines = cpu_mesh((2, ranks // 2))
    line = numbers.chunk(ranks // 2)[lines.get_coordinate()[1]] + (drift == "line")
    return state | {
        "plain": {name: numbers + (drift in {f"plain.{name}", "all"}) for name in "abc"},
        "whole": DTensor.from_local(numbers + (drift == "all"), flat, [Replicate()], run_check=False),
        "line": DTensor.from_local(line, lines, [Replicate(), Shard(0)], run_check=False),
    }


def save(way, verify):
    verify = int(verify) if verify.isdigit() else verify
    with ckptd_client.connect(
        f"dcp-{way}-{verify}", start=False, replicated=["plain.*"], per_rank=["rng"], verify_replicas=verify
    ) as client:
        writer = CkptdWriter(client, wait="durable")
        for step in range(1, STEPS + 1):
            state = state_of(way, step)
            if way == "staged":
                dcp.async_save(
                    state, storage_writer=writer, async_stager=CkptdStager(writer), checkpoint_id=str(step)
                ).result()
                continue
            writer = CkptdWriter(client, wait="durable") if way == "new" else writer
            cached = way in {"cached", "new"}
            dcp.save(
                state, storage_writer=writer, checkpoint_id=str(step),
                planner=DefaultSavePlanner(enable_plan_caching=cached),
            )  # fmt: skip


def load(way, steps):
    wanted = {int(step) for step in steps.split(",")}
    told = {}
    for path in sorted(glob.glob(os.path.join(os.environ["CKPTD_STORE"], f"dcp-{way}-drained", "step-*"))):
        state = state_of(way, 0)
        reader = CkptdReader(path)
        dcp.load(state, storage_reader=reader)
        told[state["step"]] = reader.notes
    assert sorted(told) == [*range(1, STEPS + 1)], told
    assert {step for step, notes in told.items() if any("its replicas differed" in n for n in notes)} == wanted, told
    with ckptd_client.connect(f"dcp-{way}-drained", start=False, replicated=["plain.*"], per_rank=["rng"]) as client:
        for step in (STEPS, max(wanted)):
            reader = CkptdReader(client, step=step)
            dcp.load(state_of(way, 0), storage_reader=reader)
            assert any("its replicas differed" in note for note in reader.notes) == (step in wanted), reader.notes


if __name__ == "__main__":
    dist.init_process_group("cpu:gloo")
    {"save": save, "load": load}[sys.argv[1]](*sys.argv[2:])
    print(f"rank {dist.get_rank()} did it")
    dist.barrier()
    dist.destroy_process_group()
