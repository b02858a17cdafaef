"""What each rank of a stock reader test runs: trains and saves, or reads by every reader and compares to the bit.

    ranks.py save <folder>            a few steps, a durable checkpoint, and each rank's values as reference.pt
    ranks.py load <folder> <layouts>  layouts: fsdp, ddp, hsdp, joined by commas
    ranks.py dcp <folder> <layouts> <directory>  by dcp.load alone, from there

Run by tests/interop/launch.py on CPUs with gloo.
"""

import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import ckptd_client
from ckptd_client.dcp import CkptdReader
from tests.interop.rank_program import carry_out
from tests.interop.shards import cpu_mesh, unlike

JOB = "stock"


class Model(nn.Module):
    """Rows that 4 ranks share evenly, unevenly and not at all; a buffer of no dimension, and bfloat16."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(17, 8)
        self.norm = nn.BatchNorm1d(8)
        self.wide = nn.Linear(8, 7)
        self.one = nn.Linear(7, 1)
        self.short = nn.Linear(7, 3, dtype=torch.bfloat16)

    def forward(self, words):
        hidden = self.wide(self.norm(self.embedding(words)))
        return self.one(hidden).square().mean() + self.short(hidden.bfloat16()).float().square().mean()


class Trainer:
    """A model in a layout, with everything that goes with it."""

    def __init__(self, layout, seed):
        torch.manual_seed(seed)
        self.model = wrapped(Model(), layout)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, amsgrad=True, fused=True)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 100)
        torch.manual_seed(100 * seed + dist.get_rank())

    def step(self):
        self.optimizer.zero_grad()
        self.model(torch.randint(0, 17, (5,))).backward()
        self.optimizer.step()
        self.scheduler.step()

    def state(self, step=-1):
        """By names that are the same in every layout, as DCP users write it."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        rng = torch.get_rng_state()
        plain = {"step": step, "history": [0.5 * step, {"best": (step, "a")}], "when": None, "rank": dist.get_rank()}
        return {"model": model, "optimizer": optimizer, "scheduler": self.scheduler, "rng": rng, "plain": plain}


def wrapped(model, layout):
    ranks = dist.get_world_size()
    if layout == "ddp":
        return DistributedDataParallel(model)
    shape, names = ((2, ranks // 2), ("replicate", "shard")) if layout == "hsdp" else ((ranks,), ("shard",))
    mesh = cpu_mesh(shape, names)
    fully_shard(model.wide, mesh=mesh)
    fully_shard(model.short, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def flat(state, prefix=""):
    """{dotted name: value} of dicts, as DCP names what is in them; everything else is a value."""
    if hasattr(state, "state_dict"):
        state = state.state_dict()
    if not isinstance(state, dict) or not state:
        return {prefix: state}
    return {
        name: value
        for key, item in state.items()
        for name, value in flat(item, f"{prefix}.{key}" if prefix else key).items()
    }


def whole(state):
    """Like flat, of copies, with DTensors gathered."""
    found = {name: v.full_tensor() if isinstance(v, DTensor) else v for name, v in flat(state).items()}
    return {name: value.clone() if is_tensor(value) else value for name, value in found.items()}


def is_tensor(value):
    return isinstance(value, torch.Tensor)


# --- the two commands


def save(folder):
    trainer = Trainer("fsdp", 1)
    with ckptd_client.connect(JOB, start=False) as client:
        client.save(trainer.state(0), 0)  # of another plan: the optimizer has no state yet
        for _ in range(3):
            trainer.step()
        state = trainer.state(3)
        handle = client.save(state, 3)
        reference = whole(state)
        trainer.step()  # goes on while the drain runs
        client.wait("durable", 60)
    per_rank = [None] * dist.get_world_size()
    dist.all_gather_object(per_rank, reference)
    if dist.get_rank() == 0:
        torch.save({"ranks": per_rank, "dirname": handle.save_id.dirname}, f"{folder}/reference.pt")


def load(folder, layouts):
    reference = torch.load(f"{folder}/reference.pt", weights_only=False)
    directory = os.path.join(os.environ["CKPTD_STORE"], JOB, reference["dirname"])
    for layout in layouts.split(","):
        read_by_client(layout, reference["ranks"], directory)
        read_by_plugin(layout, reference["ranks"], directory)
        read_by_dcp(layout, reference["ranks"], directory)
        read_by_huggingface(layout, reference["ranks"], directory)


def load_dcp(folder, layouts, directory):
    ranks = torch.load(f"{folder}/reference.pt", weights_only=False)["ranks"]
    for layout in layouts.split(","):
        read_by_dcp(layout, ranks, directory)


def check(reader, state, reference):
    """The state is, name for name, what one of the ranks in reference had. A DTensor was the same whole on all."""
    found = flat(state)
    for name, value in found.items():
        differences = (unlike(value, rank[name], name) for rank in reference)
        first = next(differences)
        assert not first or not all(differences), f"{reader}: {first}"
    return set(found)


def own(reference):
    """What this rank gets of what each rank had of its own: its own in a job of the same size, else rank 0's."""
    return [reference[dist.get_rank() if dist.get_world_size() == len(reference) else 0]]


def read_by_client(layout, reference, directory):
    """By load and by load_from.

    Everybody gets back what was its own: generators, and the buffers of BatchNorm, which no one synchronises.
    """
    state = Trainer(layout, 2).state()
    with ckptd_client.connect(JOB, start=False) as client:
        restored = client.load(state)
        other = Trainer(layout, 5).state()
        loaded = client.load_from(directory, other)
    assert (restored.step, restored.tier) == (3, "pfs"), restored
    # Its optimizer is given as a dict; in a job of another size each rank's own number and generator are named.
    expected = ("state_dict()", "'rank'", "'rng'")
    said = (*restored.notes, *loaded.notes)
    unexpected = [note for note in said if not any(word in note for word in expected)]
    assert (loaded.step, unexpected) == (3, []), (restored, loaded)
    assert check("client.load_from", other, [reference[dist.get_rank()]]) == set(reference[0])
    assert check("client.load", state, [reference[dist.get_rank()]]) == set(reference[0])


def read_by_plugin(layout, reference, directory):
    """CkptdReader, through an open client and of the directory."""
    with ckptd_client.connect(JOB, start=False) as client:
        for reader in (CkptdReader(client), CkptdReader(directory)):
            state = Trainer(layout, 6).state()
            dcp.load(state, storage_reader=reader)
            assert (reader.step, reader.tier) == (3, "pfs")
            assert check("CkptdReader", state, own(reference)) == set(reference[0])


def read_by_dcp(layout, reference, directory):
    """No reader argument: what every tool does that knows nothing of ckptd. What ranks had of their own is rank 0's."""
    state = Trainer(layout, 3).state()
    dcp.load(state, checkpoint_id=directory)
    assert check("dcp.load", state, reference[:1]) == set(reference[0])


def read_by_huggingface(layout, reference, directory):
    """Cannot hold plain values; what ranks had of their own is anyone's."""
    state = {name: value for name, value in flat(Trainer(layout, 4).state()).items() if is_tensor(value)}
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(directory))
    tensors = {name for name, value in reference[0].items() if is_tensor(value)}
    assert check("HuggingFaceStorageReader", state, reference) == tensors


if __name__ == "__main__":
    carry_out({"save": save, "load": load, "dcp": load_dcp})
