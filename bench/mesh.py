"""Ways to divide the writes of replicas: one writer, layers per replica, rows. 16 ranks, 8 replicas of 2 parts.

The stage of a pipeline that DeepSpeed's source names for its parallel writing of layers, scaled down. The plans are
those of 16 ranks: each is made by the client's own code in a process group that takes this process for one rank after
another and moves nothing. 16 trainers would not fit two cores, so the save of the rank that has most to write is timed
by itself, with a daemon and a disk to itself, as on 16 nodes: the others are done before.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from bench import states
from bench.measure import Series
from bench.node import Node
from ckptd_client._image.plan import Plan, gather, make_plan

REPLICAS, PARTS = 8, 2  # data parallel, tensor parallel
RANKS = REPLICAS * PARTS
_WIDTH, _VOCABULARY = 1024, 50304
_DURABLE_TIMEOUT_S = 120.0
_SETTLED_SAVES = 3
Shapes = dict[str, tuple[int, ...]]
Layer = Callable[[], Shapes]


def _block() -> Shapes:
    """One transformer block. Matrices and vectors are cut along their first dimension."""
    return {
        "norm": (_WIDTH,),
        "qkv": (3 * _WIDTH, _WIDTH),
        "out": (_WIDTH, _WIDTH),
        "mlp_norm": (_WIDTH,),
        "up": (4 * _WIDTH, _WIDTH),
        "down": (_WIDTH, 4 * _WIDTH),
    }


def _vocabulary() -> Shapes:
    return {"weight": (_VOCABULARY, _WIDTH)}


STAGES: dict[str, list[Layer]] = {
    "8 blocks": [_block] * 8,
    "embedding, 6 blocks, head": [_vocabulary, *[_block] * 6, _vocabulary],
}
WAYS = ("one writer", "whole layers", "rows")


@dataclass(frozen=True, slots=True)
class MeshResult:
    """One way to divide a stage among 16 ranks. Bytes of a rank's file: most, mean. Seconds of the largest."""

    stage: str
    way: str
    most_nbytes: int
    mean_nbytes: float
    stall: Series
    durable: Series

    @property
    def ratio(self) -> float:
        """Most by mean."""
        return self.most_nbytes / self.mean_nbytes

    def as_json(self) -> dict[str, Any]:
        """Every number."""
        series = {"stall": self.stall.as_json(), "durable": self.durable.as_json()}
        return dataclasses.asdict(self) | series | {"ratio": self.ratio}


def measure(node: Node, repeat: int) -> Iterator[MeshResult]:
    """Every way for every stage. node runs."""
    for stage in STAGES:
        for way in WAYS:
            sizes = [_plan_nbytes(stage, way, rank) for rank in range(RANKS)]
            largest = sizes.index(max(sizes))
            stalls, durables = _timed(node, f"{way}-{largest}".replace(" ", "-"), _share(stage, way, largest), repeat)
            yield MeshResult(stage, way, max(sizes), sum(sizes) / RANKS, stalls, durables)


def _plan_nbytes(stage: str, way: str, rank: int) -> int:
    with _as_rank(rank) as mesh:
        return _plan(_saved(stage, way, rank, mesh), way, rank).nbytes


def _share(stage: str, way: str, rank: int) -> states.State:
    """The tensors that the rank writes, as a state in touched memory."""
    with _as_rank(rank) as mesh:
        state = _saved(stage, way, rank, mesh)
        for tensor in states.tensors(state):
            tensor.to_local().fill_(rank + 1)
        values = gather(_plan(state, way, rank), state)
    assert values is not None  # noqa: S101 - the plan is of this very state
    return {str(index): tensor for index, tensor in enumerate(values.tensors)}


def _plan(state: states.State, way: str, rank: int) -> Plan:
    return make_plan(state, rank=rank, world_size=RANKS, replicated=() if way == "rows" else None)


def _saved(stage: str, way: str, rank: int, mesh: DeviceMesh) -> states.State:
    """The layers that the rank hands to save, as DTensors: a weight, its master and two moments for each shape."""
    replica = rank // PARTS
    wanted = {
        "one writer": lambda _layer: replica == 0,
        "whole layers": lambda layer: layer % REPLICAS == replica,
        "rows": lambda _layer: True,
    }[way]
    return {
        f"layer{index}": {name: _tensors(shape, mesh) for name, shape in layer().items()}
        for index, layer in enumerate(STAGES[stage])
        if wanted(index)
    }


def _tensors(shape: tuple[int, ...], mesh: DeviceMesh) -> dict[str, DTensor]:
    local = (shape[0] // PARTS, *shape[1:])
    dtypes = {"weight": torch.bfloat16, "master": torch.float32, "exp_avg": torch.float32, "exp_avg_sq": torch.float32}
    return {
        name: DTensor.from_local(torch.empty(local, dtype=dtype), mesh, [Replicate(), Shard(0)], run_check=False)
        for name, dtype in dtypes.items()
    }


@contextlib.contextmanager
def _as_rank(rank: int) -> Iterator[DeviceMesh]:
    """This process as one of 16, and their mesh."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC0415 - registers "fake"

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=RANKS)
    try:
        yield init_device_mesh("cpu", (REPLICAS, PARTS))
    finally:
        dist.destroy_process_group()


def _timed(node: Node, job: str, state: states.State, repeat: int) -> tuple[Series, Series]:
    """Seconds of save, and from save until durable."""
    stalls, durables = [], []
    with node.client(job) as client:
        client.prepare(state)
        for step in range(_SETTLED_SAVES + repeat):
            start = time.perf_counter()
            handle: Any = client.save(state, step)
            stalls.append(time.perf_counter() - start)
            handle.wait("durable", _DURABLE_TIMEOUT_S)
            durables.append(time.perf_counter() - start)
    return Series("s", tuple(stalls[_SETTLED_SAVES:])), Series("s", tuple(durables[_SETTLED_SAVES:]))
