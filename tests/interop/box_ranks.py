"""What each rank of the test of tensors in several boxes runs: DCP's plug-ins, with shards that interleave.

    box_ranks.py save <folder>   by CkptdWriter, by CkptdStager and to a plain DCP directory; whole.pt
    box_ranks.py load <folder> <job>   what one of them saved by every reader, box for box compared to the bit
    box_ranks.py refuse          what DCP's own planner makes of them is refused

FSDP2 over tensor parallelism on 2 by n/2 ranks, AdamW, a DTensor with strides in both dimensions, and objects with a
box list of their own. Run by tests/interop/launch.py on CPUs with gloo.
"""

import os

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

import ckptd_client
from ckptd_client._state.tensors import Chunk, is_tensor, shard_of
from ckptd_client.dcp import CkptdReader, CkptdSavePlanner, CkptdStager, CkptdWriter
from ckptd_client.dcp._boxes import Boxes
from tests.interop.mesh_ranks import Trainer, check
from tests.interop.rank_program import carry_out
from tests.interop.ranks import flat
from tests.interop.shards import cpu_mesh

JOB, STAGED = "boxes", "boxes-staged"
COLUMNS = torch.arange(80.0).view(5, 16)


def columns(fill):
    """Two separate groups of columns on each rank; fill: what makes a group's content of its offset and width."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    width = 8 // ranks
    return [((0, start), fill(start, width)) for start in (rank * width, 8 + rank * width)]


def wrapped(fill):
    """A DTensor over torch's LocalShardsWrapper."""
    parts = columns(fill)
    local = LocalShardsWrapper([part for _, part in parts], [offsets for offsets, _ in parts])
    mesh = cpu_mesh((dist.get_world_size(),))
    meta = TensorMeta(COLUMNS.shape, COLUMNS.stride(), COLUMNS.dtype)
    return DTensor(local, DTensorSpec(mesh, (Shard(1),), tensor_meta=meta), requires_grad=False)


def listed(fill):
    """An object that answers DCP's questions by itself."""
    chunks = [Chunk(offsets, tuple(part.shape), part) for offsets, part in columns(fill)]
    return Boxes(COLUMNS.shape, COLUMNS.dtype, chunks)


def state_of(seed):
    def fill(start, width):
        return COLUMNS[:, start : start + width].clone() if seed == 1 else torch.zeros(5, width)

    layout = "tp" if dist.get_world_size() > 1 else "fsdp"
    trainer = Trainer(layout, seed)
    state = trainer.state()
    state["loose"] |= {"wrapped": wrapped(fill), "listed": listed(fill)}
    return state, trainer.reference() | {"loose.wrapped": COLUMNS, "loose.listed": COLUMNS}


def spoil(state):
    """What training does while the save is under way."""
    for name, value in flat(state).items():
        for chunk in shard_of(value, name).chunks if is_tensor(value) else ():
            chunk.local.fill_(0)


def save(folder):
    state, whole = state_of(1)
    check("what was built", state, whole)
    names = {}
    with ckptd_client.connect(JOB, start=False) as client:
        writer = CkptdWriter(client, wait="durable")
        for caches in (False, True, True):
            planner = CkptdSavePlanner(enable_plan_caching=caches)
            dcp.save(state, storage_writer=writer, planner=planner)
        names[JOB] = writer.handle.save_id.dirname
        assert ("loose.strided", 1) in {(box.name, box.part) for box in writer._plans._plan.image.boxes}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(f"{folder}/plain"), planner=CkptdSavePlanner())
    with ckptd_client.connect(STAGED, start=False) as client:
        writer = CkptdWriter(client, wait="durable")
        stager = CkptdStager(writer)
        for _ in range(2):
            state, whole = state_of(1)
            done = dcp.async_save(state, storage_writer=writer, async_stager=stager)
            spoil(state)
            done.result(60)
        names[STAGED] = writer.handle.save_id.dirname
        stager.close()
    if dist.get_rank() == 0:
        torch.save({"whole": whole, "names": names}, f"{folder}/whole.pt")


def load(folder, job):
    reference = torch.load(f"{folder}/whole.pt", weights_only=True)
    whole = reference["whole"]
    directory = os.path.join(os.environ["CKPTD_STORE"], job, reference["names"][job])
    with ckptd_client.connect(job, start=False) as client:
        for reader in (CkptdReader(client), CkptdReader(directory)):
            state, _ = state_of(2)
            dcp.load(state, storage_reader=reader)
            assert check(f"{job}: CkptdReader", state, whole) == set(whole)
            assert state["own"]["param_groups"][0]["lr"] == 0.01
        state, _ = state_of(2)
        client.load(state)
        assert check(f"{job}: client.load", state, whole) == set(whole)
        for path in (directory, f"{folder}/plain"):
            state, _ = state_of(2)
            client.load_from(path, state)
            assert check(f"{job}: load_from {path}", state, whole) == set(whole)
    for how in ({}, {"storage_reader": CkptdReader()}):
        state, _ = state_of(2)
        state["loose"] |= {"strided": torch.zeros(11, 6), "wrapped": torch.zeros(5, 16)}
        dcp.load(state, checkpoint_id=directory, **how)
        assert check(f"{job}: dcp.load", state, whole) == set(whole)


def refuse():
    """DCP alone does not save them; were it to, the writer would refuse."""
    state = {"strided": state_of(1)[0]["loose"]["strided"]}
    with ckptd_client.connect("boxes-refuse", start=False) as client:
        writer = CkptdWriter(client)
        with pytest.raises(CheckpointException, match="validate global plan"):
            dcp.save(state, storage_writer=writer)

        class Credulous(dcp.DefaultSavePlanner):
            def create_global_plan(self, all_plans):
                self.global_plan, self.metadata = all_plans, dcp.Metadata({})
                return all_plans, self.metadata

        with pytest.raises(CheckpointException, match=r"its placements interleave(.|\n)*planner=CkptdSavePlanner"):
            dcp.save(state, storage_writer=writer, planner=Credulous())
        dcp.save(state, storage_writer=writer, planner=CkptdSavePlanner())


if __name__ == "__main__":
    carry_out({"save": save, "load": load, "refuse": refuse})
