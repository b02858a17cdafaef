"""What each rank of a DCP plug-in test runs.

    dcp_ranks.py save <folder> <layouts>   a few steps, then dcp.save in each layout; values as reference
    dcp_ranks.py load <folder> <pairs>     saved>wanted layouts, joined by commas
    dcp_ranks.py staged <layout>           asynchronous saves in it
    dcp_ranks.py <case>                    a case of its own, see the functions below

Layouts: fsdp, ddp, hsdp, tp, fsdp_tp. Run by tests/interop/launch.py on CPUs with gloo.
"""

import io
import os

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ckptd_client
from ckptd_client.dcp import CkptdReader, CkptdStager, CkptdWriter
from tests.interop.rank_program import carry_out
from tests.interop.ranks import Trainer, check, flat, is_tensor, whole
from tests.interop.shards import cpu_mesh

TENSOR_PARALLEL = ("tp", "fsdp_tp")


class Wide(nn.Module):
    """Two layers that tensor parallelism splits by columns and by rows, unevenly on the way."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(6, 12)
        self.down = nn.Linear(12, 6)

    def forward(self, x):
        return self.down(self.up(x).relu())


class Parallel:
    """Wide, tensor parallel or both ways parallel, with AdamW."""

    def __init__(self, layout, seed):
        torch.manual_seed(seed)
        self.model = Wide()
        ranks = dist.get_world_size()
        shape, names = ((2, ranks // 2), ("dp", "tp")) if layout == "fsdp_tp" else ((ranks,), ("tp",))
        mesh = cpu_mesh(shape, names)
        parallelize_module(self.model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if layout == "fsdp_tp":
            fully_shard(self.model, mesh=mesh["dp"])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, fused=True)

    def step(self):
        self.optimizer.zero_grad()
        self.model(torch.ones(3, 6)).square().mean().backward()
        self.optimizer.step()

    def state(self, step=-1):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": step}


def trainer(layout, seed):
    return Parallel(layout, seed) if layout in TENSOR_PARALLEL else Trainer(layout, seed)


def job(layout):
    return f"dcp-{layout}"


def gathered(value):
    everybody = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, value)
    return everybody


# --- save and load, also by other worlds


def save(folder, layouts):
    for layout in layouts.split(","):
        its = trainer(layout, 1)
        for _ in range(2):
            its.step()
        state = its.state(7)
        with ckptd_client.connect(job(layout), start=False) as client:
            writer = CkptdWriter(client, wait="durable")
            dcp.save(state, storage_writer=writer, checkpoint_id="run/step-7")
            assert writer.handle.step == 7
            name = writer.handle.save_id.dirname
        dcp.save(state, checkpoint_id=f"{folder}/{layout}-dcp")
        tensors = {name: value for name, value in flat(state).items() if is_tensor(value)}
        dcp.save(tensors, storage_writer=dcp.HuggingFaceStorageWriter(f"{folder}/{layout}-hf", save_distributed=True))
        ranks = gathered(whole(state))
        if dist.get_rank() == 0:
            torch.save({"ranks": ranks, "dirname": name}, f"{folder}/{layout}.pt")


def load(folder, pairs):
    for pair in pairs.split(","):
        saved, wanted = pair.split(">")
        reference = torch.load(f"{folder}/{saved}.pt", weights_only=False)
        ranks, directory = reference["ranks"], os.path.join(os.environ["CKPTD_STORE"], job(saved), reference["dirname"])
        with ckptd_client.connect(job(saved), start=False) as client:
            reader = CkptdReader(client)
            read(wanted, f"{pair}: CkptdReader(client)", ranks, storage_reader=reader)
            assert (reader.step, reader.tier) == (7, "pfs")
        ways = {"CkptdReader(path)": {"storage_reader": CkptdReader(directory)}}
        ways["CkptdReader()"] = {"storage_reader": CkptdReader(), "checkpoint_id": directory}
        ways["dcp.load"] = {"checkpoint_id": directory}
        for name, how in ways.items():
            read(wanted, f"{pair}: {name}", ranks, go_on=False, **how)
        with ckptd_client.connect(job(saved), start=False) as client:
            state = trainer(wanted, 5).state()
            client.load(state)
            assert check(f"{pair}: client.load", state, ranks) == set(ranks[0])
            for path in (directory, f"{folder}/{saved}-dcp"):
                state = trainer(wanted, 6).state()
                client.load_from(path, state)
                assert check(f"{pair}: load_from {path}", state, ranks) == set(ranks[0])
            tensors = {name: value for name, value in flat(trainer(wanted, 7).state()).items() if is_tensor(value)}
            client.load_from(f"{folder}/{saved}-hf", tensors)
            assert check(f"{pair}: load_from safetensors", tensors, ranks) == set(tensors)


def read(layout, reader, ranks, *, go_on=True, **how):
    """By dcp.load into a new trainer; then, if it is to go on, set_state_dict and a step, as in a training."""
    its = trainer(layout, 3)
    state = its.state()
    dcp.load(state, **how)
    assert check(reader, state, ranks) == set(ranks[0])
    same_world = dist.get_world_size() == len(ranks)
    if "plain" in state and isinstance(how.get("storage_reader"), CkptdReader):
        assert state["plain"]["rank"] == (dist.get_rank() if same_world else 0), reader
    if not go_on:
        return
    set_state_dict(its.model, its.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    model, optimizer = get_state_dict(its.model, its.optimizer)
    check(f"{reader}, set_state_dict", {"model": model, "optimizer": optimizer}, ranks)
    its.step()


# --- cases of their own


def arena():
    """Nothing is drained: each rank reads the other ranks' slots, since DCP left each replica to one of them."""
    its = trainer("fsdp", 1)
    its.step()
    state = its.state(1)
    with ckptd_client.connect("arena", start=False, drain_every=1000) as client:
        writer = CkptdWriter(client)
        dcp.save(its.state(0), storage_writer=writer)  # the first is drained
        dcp.save(state, storage_writer=writer)
        reader = CkptdReader(client)
        read("fsdp", "arena", gathered(whole(state)), storage_reader=reader)
        assert (reader.step, reader.tier) == (1, "arena")
        assert not os.path.exists(os.path.join(client_directory("arena"), writer.handle.save_id.dirname))


def client_directory(name):
    return os.path.join(os.environ["CKPTD_STORE"], name)


def staged(layout):
    """Asynchronous saves in one copy: what is saved is what there was when async_save returned."""
    group = dist.new_group(backend="gloo")
    its = trainer(layout, 1)
    with ckptd_client.connect(f"staged-{layout}", start=False) as client:
        writer = CkptdWriter(client)
        stager = CkptdStager(writer)
        for step in range(2):
            its.step()
            state = its.state(step)
            reference = gathered(whole(state))
            done = dcp.async_save(
                state, storage_writer=writer, async_stager=stager, process_group=group, checkpoint_id=f"{step}"
            )
            spoil(state)
            done.result(60)
            assert writer.handle.step == step
            writer.handle.wait("staged", 60)  # the coordinator waited; the others may hear of it a moment later
            restored = trainer(layout, 4).state()
            dcp.load(restored, storage_reader=CkptdReader(client), checkpoint_id=f"{step}")
            assert check(f"staged, {layout}", restored, reference) == set(reference[0])
            its = trainer(layout, step)
        stager.close()
        client.wait("durable", 60)
        directory = os.path.join(client_directory(client.job), writer.handle.save_id.dirname)
    restored = trainer(layout, 4).state()
    dcp.load(restored, checkpoint_id=directory)
    assert check(f"staged, {layout}, dcp.load", restored, reference) == set(reference[0])


def spoil(state):
    """What training does while the save is under way, and worse."""
    for value in state.values():
        if isinstance(value, dict):
            spoil(value)
        elif is_tensor(value):
            (value.to_local() if isinstance(value, DTensor) else value).fill_(77)


def sharded(step, extra):
    mesh = cpu_mesh((dist.get_world_size(),))
    whole_one = torch.arange(40.0).reshape(10, 4) + step
    state = {
        "rows": distribute_tensor(whole_one, mesh, [Shard(0)]),
        "columns": distribute_tensor(whole_one.t().contiguous(), mesh, [Shard(0)]),
        "copies": distribute_tensor(whole_one * 2, mesh, [Replicate()]),
        "plain": torch.arange(6) + step,
        "bytes": io.BytesIO(b"step %d" % step),
        "nested": {"lr": 0.1 * step, "betas": [0.9, step]},
    }
    if extra:
        state["late"] = distribute_tensor(torch.ones(3, 3) * step, mesh, [Shard(1)])
        state[f"only on {dist.get_rank()}"] = step
    return state


def caching():
    """Three saves and a change of structure, of all ranks and of one, with DCP's plan cache and without."""
    for caches in (False, True):
        with ckptd_client.connect(f"caching-{caches}", start=False) as client:
            for step, extra in enumerate((False, False, True, True, dist.get_rank() == 1, False)):
                state = sharded(step, extra=False)
                if extra:
                    state["own"] = {f"of {dist.get_rank()}": torch.ones(2) * step, "leaf": step}
                planner = DefaultSavePlanner(enable_plan_caching=caches)
                dcp.save(state, storage_writer=CkptdWriter(client), planner=planner)
                wanted = sharded(100, extra=False)
                if extra:
                    wanted["own"] = {f"of {dist.get_rank()}": torch.zeros(2), "leaf": None}
                dcp.load(wanted, storage_reader=CkptdReader(client))
                assert check(f"caching {caches}, {step}", wanted_bytes(wanted), [whole(wanted_bytes(state))])
            SavePlanner._cached_save_plan.clear()


def wanted_bytes(state):
    return {k: v.getvalue() if isinstance(v, io.BytesIO) else v for k, v in state.items()}


def leaves_of_one():
    """A value that only rank 1 has is found by plain dcp.load too."""
    with ckptd_client.connect("leaves", start=False) as client:
        writer = CkptdWriter(client, wait="durable")
        dcp.save(sharded(3, extra=True), storage_writer=writer)
        directory = os.path.join(client_directory("leaves"), writer.handle.save_id.dirname)
        for how in ({"storage_reader": CkptdReader(client)}, {"checkpoint_id": directory}):
            state = sharded(0, extra=False) | {"only on 1": None}
            dcp.load(state, **how)
            assert state["only on 1"] == 3
            assert state["bytes"].getvalue() == b"step 3"


def errors():
    """What one rank does wrong is an exception on all, naming it, and the next save works."""
    rank = dist.get_rank()
    with ckptd_client.connect("errors", start=False) as client:
        writer = CkptdWriter(client)
        stager = CkptdStager(writer)
        bad = sharded(1, extra=False) | ({"wrong": object()} if rank == 1 else {})
        for _ in range(2):
            with pytest.raises(CheckpointException, match=r"wrong.*no safe encoding"):
                dcp.save(bad, storage_writer=writer)
            with pytest.raises(CheckpointException, match=r"wrong.*no safe encoding"):
                dcp.async_save(bad, storage_writer=writer, async_stager=stager).result(60)
            assert writer.handle.end in ("failed", "abandoned", "skipped") or writer.handle.milestone is None
        dcp.save(sharded(2, extra=False), storage_writer=writer, checkpoint_id="30")
        with pytest.raises(CheckpointException, match="already saved"):
            dcp.save(sharded(2, extra=False), storage_writer=CkptdWriter(client, step=30))
        with pytest.raises(CheckpointException, match="Missing key in checkpoint state_dict: late"):
            dcp.load(sharded(0, extra=True), storage_reader=CkptdReader(client))
        partial = sharded(0, extra=True)
        dcp.load(partial, storage_reader=CkptdReader(client), planner=DefaultLoadPlanner(allow_partial_load=True))
        assert partial["plain"].tolist() == [2, 3, 4, 5, 6, 7]
        assert partial[f"only on {rank}"] == 0
        with pytest.raises(CheckpointException, match=r"Size mismatch between saved .* for plain"):
            dcp.load({"plain": torch.zeros(7)}, storage_reader=CkptdReader(client))
        with pytest.raises(CheckpointException, match="no checkpoint of step 5"):
            dcp.load(sharded(0, extra=False), storage_reader=CkptdReader(client, step=5))
        dcp.save(sharded(9, extra=False), storage_writer=writer)
        state = sharded(0, extra=False)
        dcp.load(state, storage_reader=CkptdReader(client))
        assert state["plain"][0] == 9


if __name__ == "__main__":
    cases = (save, load, arena, staged, caching, leaves_of_one, errors)
    carry_out({case.__name__: case for case in cases})
