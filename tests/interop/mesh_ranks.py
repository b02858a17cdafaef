"""What each rank of the test of shardings runs: states whose every element is known before they are sharded.

    mesh_ranks.py save <folder> <layout>    a durable checkpoint, and reference.pt in the folder
    mesh_ranks.py load <folder> <layouts>   by every reader, compared to the bit; layouts joined by commas

Layouts: tp (2 by n/2: FSDP2 over tensor parallelism), fsdp, hsdp, ddp. Nothing is trained: that would need layers that
divide, and here they don't. Run by tests/interop/launch.py on CPUs with gloo.
"""

import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel

import ckptd_client
from tests.interop.rank_program import carry_out
from tests.interop.ranks import flat, is_tensor
from tests.interop.shards import cpu_mesh
from tests.unit.client.same import difference

JOB = "mesh"
TP = {"up": ColwiseParallel(), "down": RowwiseParallel(), "odd": ColwiseParallel(), "few": ColwiseParallel()}


class Model(nn.Module):
    """Rows and columns that 2 and 4 ranks share evenly, unevenly, and not at all."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(12, 16)
        self.down = nn.Linear(16, 12)
        self.odd = nn.Linear(5, 9)  # 9 rows over 2 ranks, and what each has over 2 more
        self.few = nn.Linear(5, 3)
        self.norm = nn.LayerNorm(7)  # known to no tensor parallel plan
        self.one = nn.Linear(3, 1, dtype=torch.bfloat16)
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x):
        return x


def sharded(model, layout):
    ranks = dist.get_world_size()
    if layout == "ddp":
        return DistributedDataParallel(model)
    shape = {"fsdp": (ranks,), "hsdp": (2, ranks // 2), "tp": (2, ranks // 2)}[layout]
    names = {"fsdp": ("shard",), "hsdp": ("replicate", "shard"), "tp": ("shard", "tp")}[layout]
    mesh = cpu_mesh(shape, names)
    if layout == "tp":
        parallelize_module(model, mesh["tp"], TP)
        mesh = mesh["shard"]
    fully_shard(model.odd, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def loose(layout):
    """Tensors of no module: of no dimension, of no element, replicated, and, where a mesh is, as no module has them."""
    whole = {"scalar": torch.tensor(2.5), "none": torch.empty(0, 4), "replica": torch.arange(6.0)}
    whole |= {"strided": torch.arange(66.0).view(11, 6), "rows": torch.arange(14.0).view(7, 2).to(torch.complex128)}
    if layout == "ddp":
        return whole, whole
    mesh = cpu_mesh((dist.get_world_size(),))
    placed = {name: Replicate() for name in whole} | {"none": Shard(0), "rows": Shard(0)}
    return whole, {name: distribute_tensor(tensor.clone(), mesh, [placed[name]]) for name, tensor in whole.items()}


def interleaved(tensor):
    """The tensor as DTensor whose shard on each rank is several boxes: rows by 3 and columns by 2 of a mesh."""
    ranks = dist.get_world_size()
    if ranks != 4:
        return tensor
    mesh = cpu_mesh((2, 2))
    row, column = mesh.get_coordinate()
    part = torch.cat([piece.chunk(2)[row] for piece in tensor.chunk(3)])
    part = torch.cat([piece.chunk(2, 1)[column] for piece in part.chunk(2, 1)], 1)
    placements = [_StridedShard(0, split_factor=3), _StridedShard(1, split_factor=2)]
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride())


class Trainer:
    """A model in a layout and its AdamW, all of a seed; and what each of its tensors is as a whole."""

    def __init__(self, layout, seed):
        torch.manual_seed(seed)
        model = Model()
        model.count.fill_(seed)
        self.whole = {f"model.{name}": value.clone() for name, value in model.state_dict().items()}
        self.model = sharded(model, layout)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, foreach=False)
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self._fill(seed)
        self.layout, self.seed = layout, seed
        loose_whole, self.loose = loose(layout)
        self.whole |= {f"loose.{name}": value for name, value in loose_whole.items()}

    def _fill(self, seed):
        """Optimizer state that is a function of the parameter, exact on any machine."""
        for group in self.optimizer.param_groups:
            group["lr"] = 0.01 * seed
        for parameter in self.model.parameters():
            mine = local(parameter.detach())
            state = {"step": torch.tensor(float(seed))}
            for name, factor in (("exp_avg", 2.0), ("exp_avg_sq", 4.0)):
                state[name] = torch.zeros_like(parameter.detach())
                local(state[name]).copy_(mine * factor)
            self.optimizer.state[parameter] = state
        for name, value in list(self.whole.items()):
            if name != "model.count":
                own = name.removeprefix("model.")
                self.whole[f"optimizer.state.{own}.step"] = torch.tensor(float(seed))
                self.whole[f"optimizer.state.{own}.exp_avg"] = value * 2.0
                self.whole[f"optimizer.state.{own}.exp_avg_sq"] = value * 4.0

    def state(self):
        """By names that are the same in every layout, and the optimizer's own by number."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        loose = dict(self.loose, strided=interleaved(self.whole["loose.strided"].clone()))
        return {"model": model, "optimizer": optimizer, "own": self.optimizer.state_dict(), "loose": loose}

    def reference(self):
        """{name: whole tensor} of state()."""
        names = [name for name, _ in self.model.named_parameters()]
        own = {}
        for number, name in enumerate(names):
            for key in ("step", "exp_avg", "exp_avg_sq"):
                clean = name.removeprefix("module.")
                own[f"own.state.{number}.{key}"] = self.whole[f"optimizer.state.{clean}.{key}"]
        return self.whole | own


def boxes(tensor):
    """(offsets and sizes, values) of what this rank has."""
    return [(chunk.box, chunk.local) for chunk in ckptd_client._state.tensors.shard_of(tensor, "").chunks]


def check(reader, state, reference, but=()):
    """Every tensor of the state is, box for box, that of the reference. Returns their names."""
    found = {name: value for name, value in flat(state).items() if is_tensor(value)}
    for name, value in found.items():
        if name in but:
            continue
        assert value.shape == reference[name].shape, (reader, name, value.shape)
        for (offsets, sizes), values in boxes(value):
            part = reference[name][tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]
            different = difference(values, part.clone(), name)
            assert not different, f"{reader}: {offsets} {sizes}: {different}"
    return set(found)


def save(folder, layout):
    trainer = Trainer(layout, 1)
    state = trainer.state()
    check("what was built", state, trainer.reference())
    with ckptd_client.connect(JOB, start=False) as client:
        handle = client.save(state, 3)
        client.wait("durable", 60)
        stats = client.stats()
        assert (stats.plans, stats.failed) == (1, 0), stats
    if dist.get_rank() == 0:
        torch.save({"whole": trainer.reference(), "dirname": handle.save_id.dirname}, f"{folder}/{layout}.pt")


def load(folder, saved, layouts):
    reference = torch.load(f"{folder}/{saved}.pt", weights_only=True)
    whole = reference["whole"]
    directory = os.path.join(os.environ["CKPTD_STORE"], JOB, reference["dirname"])
    for layout in layouts.split(","):
        state = Trainer(layout, 2).state()
        with ckptd_client.connect(JOB, start=False) as client:
            restored = client.load(state)
        # Its optimizers are given as dicts.
        unexpected = [note for note in restored.notes if "state_dict()" not in note]
        assert (restored.step, unexpected) == (3, []), restored
        assert check("client.load", state, whole) == set(whole)
        assert state["own"]["param_groups"][0]["lr"] == 0.01

        # torch takes an interleaved shard for one run of rows, so it cannot be its target.
        state = Trainer(layout, 2).state()
        state["loose"]["strided"] = torch.zeros(11, 6)
        dcp.load(state, checkpoint_id=directory)
        assert check("dcp.load", state, whole) == set(whole)
        assert state["own"]["param_groups"][0]["lr"] == 0.01

        # It holds complex128 as pairs, no plain value, and of tied tensors one: "own" is tied to "optimizer".
        state = flat(Trainer(layout, 2).state())
        state = {name: v for name, v in state.items() if is_tensor(v) and not name.startswith("own.")}
        state |= {"loose.strided": torch.zeros(11, 6), "loose.rows": torch.zeros(7, 2, 2, dtype=torch.float64)}
        dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(directory))
        pairs = whole | {"loose.rows": torch.view_as_real(whole["loose.rows"])}
        assert check("HuggingFaceStorageReader", state, pairs) == {
            name for name in whole if not name.startswith("own.")
        }


if __name__ == "__main__":
    carry_out({"save": save, "load": load})
