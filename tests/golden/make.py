"""Makes the golden checkpoints anew. Only for a change of the format that is meant:

    PYTHONPATH=.:client python -m tests.golden.make tests/golden/files

Four of them: one rank with everything a state can hold; one rank with every dtype; two ranks sharded by FSDP2; one
rank that said something of its save. Their values are made by arithmetic, not by a generator, so that every release of
torch makes the same.
"""

import contextlib
import datetime as dt
import shutil
import sys
from collections import OrderedDict, deque
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.format.manifest import decode_objects
from ckptd.store.posix.commit import commit
from ckptd.store.posix.scan import Place
from ckptd.system.files import FileLayer
from ckptd_client._state.tensors import DTYPE_OF
from tests import forks
from tests.checkpoints import image_of, put_image, put_vote
from tests.runs import RUN

SAVES = {"plain": SaveId(1, 1, 10, RUN), "dtypes": SaveId(1, 2, 20, RUN), "fsdp2": SaveId(1, 3, 30, RUN)}
SAVES["said"] = SaveId(1, 4, 40, RUN)
SAID = {"loss": 0.5, "epoch": 3, "best": True, "run": "é", "grad_norm": None}
PACKED = getattr(torch, "float4_e2m1fn_x2", None)
RANKS = {"plain": 1, "dtypes": 1, "fsdp2": 2, "said": 1}


def filled(*shape, dtype=torch.float32):
    """0, 1, 2, .. below 2, or 100."""
    count = torch.Size(shape).numel()
    if dtype == PACKED:  # torch can make it, and copy it, by its bytes alone
        return torch.arange(count, dtype=torch.uint8).view(dtype).reshape(shape)
    return (torch.arange(count) % (2 if dtype == torch.bool else 100)).to(dtype).reshape(shape)


def plain():
    weight = filled(3, 4)
    moments = {0: {"step": torch.tensor(7.0), "exp_avg": filled(3, 4) / 8}}
    return {
        "model": OrderedDict(weight=weight, bias=filled(3, dtype=torch.bfloat16), empty=torch.empty(0, 2)),
        "tied": weight,
        "optimizer": {"state": moments, "param_groups": [{"lr": 0.125, "betas": (0.9, 0.95), "params": [0]}]},
        "epoch": 3,
        "plain": [None, True, -(2**70), "é", b"\0\xff", 1 + 2j, float("inf"), -0.0],
        "more": ({1, 2}, deque([1], 3), dt.date(2026, 1, 2), torch.Size([2]), torch.float16),
        "list": [filled(2), {"deep": (filled(1), "leaf")}],
    }


def dtypes():
    """Every one that this torch has, of no dimension, of three, and as a strided view."""
    return {
        code: {
            "zero": filled(dtype=dtype),
            "three": filled(2, 3, 2, dtype=dtype),
            "view": filled(4, 6, dtype=dtype).t() if dtype != PACKED else filled(4, 6, dtype=dtype),
        }
        for code, dtype in DTYPE_OF.items()
    }


class Model(nn.Module):
    """Rows that two ranks share evenly, unevenly, and not at all."""

    def __init__(self):
        super().__init__()
        self.even, self.odd, self.one = nn.Linear(4, 6), nn.Linear(6, 5), nn.Linear(5, 1)
        for parameter in self.parameters():
            parameter.data.copy_(filled(*parameter.shape))
        self.register_buffer("count", torch.tensor(5))


@contextlib.contextmanager
def sharded(rank):
    """The state of one of two ranks, while it is that rank."""
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415 - only newer releases have it

    dist.init_process_group("fake", rank=rank, world_size=2, store=FakeStore())
    try:
        model = Model()
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        moments = {name: torch.full_like(p.detach(), 0.25) for name, p in model.named_parameters()}
        yield {"model": dict(model.state_dict()), "exp_avg": moments, "rank": rank, "lr": 0.5}
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def state_of(name, rank):
    """The state of a rank."""
    if name == "fsdp2":
        with sharded(rank) as state:
            yield state
    else:
        yield {"plain": plain, "dtypes": dtypes, "said": lambda: {"weight": filled(2, 3)}}[name]()


def made(name, rank):
    """What a rank leaves in its slot."""
    with state_of(name, rank) as state:
        said = SAID if name == "said" else None
        return image_of(state, SAVES[name], rank=rank, world_size=RANKS[name], metadata=said)


def make(name, store):
    """The checkpoint of that name in the store."""
    place = Place(JobKey(str(store), "golden"), SAVES[name])
    for rank in range(RANKS[name]):
        with ProcessPoolExecutor(1, mp_context=forks.context) as one:  # who is rank 0 stays it
            image, record, objects = one.submit(made, name, rank).result()
        put_image(place, record, image)
        found = decode_objects(objects, where="objects") if objects else None
        put_vote(place, [record], world_size=RANKS[name], node=f"node{rank}", objects=found)
    commit(FileLayer(), place.key, place.save, "golden")
    return Path(place.final)


def main(folder):
    folder = Path(folder).absolute()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name in SAVES:
        print(make(name, folder))
    (folder / "golden/latest").unlink()
    (folder / "torch").write_text(torch.__version__.split("+")[0] + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
