"""What each rank of the test of gathers runs; on CPUs with gloo but for the last.

    gather_ranks.py layouts <layout>   a model and its optimizer as tests/interop/mesh_ranks.py shards them
    gather_ranks.py odd                dtypes, uneven and empty shards, placements that no module has, flat parts, ties
    gather_ranks.py disagree           what ranks must not do differently
    gather_ranks.py stops              a loop that is left early; then a rank that ends
    gather_ranks.py cuda               shards on devices

Each way to gather, compared to the bit with what was sharded, and with full_tensor() where torch has it right.
"""

import os
import re
import sys
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import ckptd_client
from ckptd_client._gather import Gathering, Groups, Order
from ckptd_client._state.tensors import is_tensor
from ckptd_client._state.tree import flatten
from tests.interop.box_ranks import COLUMNS, listed, wrapped
from tests.interop.mesh_ranks import Trainer
from tests.unit.client.same import difference

GROUPS = Groups()


def gather(state, **how):
    return Gathering(state, Order(**how), GROUPS)


def rank():
    return dist.get_rank()


def check(how, found, whole):
    assert found.keys() == whole.keys(), (how, found.keys() ^ whole.keys())
    for name, tensor in found.items():
        assert type(tensor) is torch.Tensor, (how, name, type(tensor))
        assert not tensor.requires_grad
        different = difference(tensor, whole[name], name)
        assert not different, f"{how}: {different}"


def tensors(state):
    if state is None:
        return {}
    found = flatten(state, is_tensor)
    return {name: value for name, value in zip(found.names, found.values, strict=True) if is_tensor(value)}


def every_way(state, whole, small):
    """By the client's own method, in small buckets, by all-gathers, to one rank, as a stream."""
    with ckptd_client.connect(f"gather-{dist.get_world_size()}", start=False) as client:
        check("gather", tensors(client.gather(state).wait()), whole)
        check("stream", dict(client.gather(state, bucket_nbytes=small)), whole)
    last = dist.get_world_size() - 1
    for how in ({"bucket_nbytes": small}, {"collective": True}, {"collective": True, "bucket_nbytes": small}):
        check(how, tensors(gather(state, **how).wait()), whole)
        alone = gather(state, to=last, **how).wait()
        if rank() == last:
            check(f"to one, {how}", tensors(alone), whole)
        else:
            assert alone is None
        streamed = dict(gather(state, to=[0], **how))
        check(f"stream to one, {how}", streamed, whole if rank() == 0 else {})


def layouts(layout):
    trainer = Trainer(layout, 1)
    state, whole = trainer.state(), trainer.reference()
    every_way(state, whole, small=300)
    for name, value in tensors(state).items():
        if isinstance(value, DTensor) and not any(hasattr(p, "split_factor") for p in value.placements):
            assert not difference(value.full_tensor().detach(), whole[name], name), name


def shard(tensor, mesh, *placements):
    """The DTensor whose local tensor torch.chunk gives, without a word to the other ranks."""
    local = tensor
    for size, mine, placement in zip(mesh.shape, mesh.get_coordinate(), placements, strict=True):
        if isinstance(placement, Shard):
            parts = local.chunk(size, placement.dim)
            nothing = local.narrow(placement.dim, 0, 0)
            local = parts[mine] if mine < len(parts) else nothing
    local = local.contiguous()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride())


def random_bits(shape, dtype):
    """Of every kind of bits, signalling NaN too."""
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), dtype=torch.uint8)
    return raw.view(dtype).view(shape)


def odd():
    ranks = dist.get_world_size()
    torch.manual_seed(5)
    line = init_device_mesh("cpu", (ranks,))
    whole = {}
    state = {}
    for name in (
        "bfloat16",
        "float16",
        "float32",
        "float64",
        "float8_e4m3fn",
        "float8_e5m2",
        "complex64",
        "complex128",
    ):
        whole[f"dtype.{name}"] = random_bits((7, 3), getattr(torch, name))
    for name in ("bool", "uint8", "int16", "int64", "float4_e2m1fn_x2"):
        if hasattr(torch, name):
            whole[f"dtype.{name}"] = random_bits((5, 4), getattr(torch, name))
    state["dtype"] = {name[6:]: shard(value, line, Shard(0)) for name, value in whole.items()}

    loose = {
        "one": (torch.randn(1, 9), Shard(0)), "columns": (torch.randn(6, 7), Shard(1)),
        "none": (torch.empty(0, 4), Shard(0)),
        "scalar": (torch.tensor(2.5), Replicate()), "replica": (torch.randn(3, 3), Replicate()),
        "thin": (torch.randn(2, 0, 3), Shard(0)), "deep": (torch.randn(3, 5, 2, 4), Shard(2)),
        "large": (torch.randn(1030, 300), Shard(0)), "wide": (torch.randn(300, 1001), Shard(1)),
    }  # fmt: skip
    state["loose"] = {name: shard(value, line, placement) for name, (value, placement) in loose.items()}
    whole |= {f"loose.{name}": value for name, (value, _) in loose.items()}
    if ranks == 4:
        state["mesh"], more = on_a_square()
        whole |= more

    flat_whole = torch.randn(5, 7)
    long = -(-35 // ranks)
    padded = torch.cat([flat_whole.view(-1), torch.full((ranks * long - 35,), 9.0)])
    local = padded[rank() * long : (rank() + 1) * long]
    state["flat"] = [ckptd_client.FlatPart(local, (5, 7), rank() * long)]
    whole["flat.0"] = flat_whole
    if ranks != 3:
        state["boxes"] = {"listed": listed(lambda start, width: COLUMNS[:, start : start + width].clone())}
        state["boxes"]["wrapped"] = wrapped(lambda start, width: COLUMNS[:, start : start + width].clone())
        whole |= {"boxes.listed": COLUMNS, "boxes.wrapped": COLUMNS}
    weight = state["loose"]["large"]
    state["tied"] = (weight, weight.detach(), state["flat"][0])
    whole |= {"tied.0": whole["loose.large"], "tied.1": whole["loose.large"], "tied.2": flat_whole}
    state["plain"] = {"here": torch.arange(3.0, requires_grad=True), "step": 7, "none": {}}
    whole["plain.here"] = torch.arange(3.0)
    every_way(state, whole, small=20_000)

    found = gather(state).wait()
    assert found["plain"]["step"] == 7
    assert found["plain"]["none"] == {}
    assert found["tied"][0] is found["tied"][1] is found["loose"]["large"]
    assert found["tied"][2] is found["flat"][0]
    assert found["plain"]["here"].data_ptr() == state["plain"]["here"].data_ptr()
    own = {value._local_tensor.untyped_storage().data_ptr() for value in state["loose"].values()} - {0}
    built = {tensor.untyped_storage().data_ptr() for tensor in found["loose"].values()} - {0}
    assert not own & built
    bounded(state)


def on_a_square():
    """2 by 2 ranks, in another order than that of their numbers, and what only two of them hold."""
    mesh = init_device_mesh("cpu", (2, 2))
    turned = dist.device_mesh.DeviceMesh("cpu", torch.tensor([[3, 1], [0, 2]]))
    values = {
        "both": (torch.randn(6, 10), mesh, (Shard(0), Shard(1))),
        "twice": (torch.randn(11, 3), mesh, (Shard(0), Shard(0))),
        "replicas": (torch.randn(6, 5), mesh, (Replicate(), Shard(0))),
        "other": (torch.randn(6, 5), mesh, (Shard(0), Replicate())),
        "turned": (torch.randn(7, 5), turned, (Shard(0), Shard(1))),
        "few": (torch.randn(3, 3), turned, (Shard(1), Shard(1))),
    }  # fmt: skip
    state = {name: shard(value, on, *placements) for name, (value, on, placements) in values.items()}
    whole = {f"mesh.{name}": value for name, (value, _, _) in values.items()}
    row = torch.randn(8, 4)
    half, part = mesh.get_coordinate()
    local = torch.cat([piece.chunk(2)[half] for piece in row.chunk(2)]).chunk(2, 1)[part].contiguous()
    placements = [_StridedShard(0, split_factor=2), Shard(1)]
    state["dealt"] = DTensor.from_local(local, mesh, placements, run_check=False, shape=row.shape, stride=row.stride())
    whole["mesh.dealt"] = row
    return state, whole


def bounded(state):
    """How much is built at a time, and how large the buffers are."""
    for how in ({}, {"collective": True}):
        run = gather(state, bucket_nbytes=64 << 10, **how)
        most = 0
        for _ in run:
            most = max(most, sum(built.tensor.nbytes for built in run._built.values()))
        assert most <= (1030 + 1001) * 300 * 4 + 3 * (64 << 10), (
            most
        )  # of two tensors larger than a bucket a part may be there
        ranks = dist.get_world_size()
        for transport in run._transports.values():
            assert transport.nbytes <= 3 * ((64 << 10) * (1 + 1 / ranks) + 1024 * ranks), transport.nbytes


def disagree():
    ranks = dist.get_world_size()
    last = ranks - 1
    mine = rank() == last
    line = init_device_mesh("cpu", (ranks,))

    def state(rows=6, dtype=torch.float32, placement=None, **more):
        value = torch.arange(float(rows * 4)).view(rows, 4).to(dtype)
        return {"a": shard(torch.ones(5), line, Shard(0)), "w": shard(value, line, placement or Shard(0))} | more

    odd = shard(torch.ones(4), line, Shard(0))
    partial = DTensor.from_local(torch.ones(4), line, [Partial()])
    wrong = DTensor.from_local(torch.ones(3), line, [Shard(0)], run_check=False, shape=(4,), stride=(1,))
    cases = {
        "rows": (state(7 if mine else 6), r"'w' is \[7, 4\] .* on rank 1, and \[6, 4\] .* on rank 0"),
        "dtype": (state(dtype=torch.float64 if mine else torch.float32), r"'w' is .*float64 .*, and .*float32"),
        "placement": (state(placement=Shard(1) if mine else Shard(0)), r"dim=1.* on rank 1, and .*dim=0"),
        "replica": (state(placement=Replicate() if mine else None), r"'w' is .*Replicate.* on rank 1"),
        "more": (state(**({"x": odd} if mine else {})), r"'x' is \[4\] .* on rank 1, and not there, or not sharded"),
        "less": (state(**({} if mine else {"x": odd})), r"'x' is not there, or not sharded on rank 1"),
        "plain": (state(x=torch.ones(4) if mine else odd), r"'x' is not there, or not sharded on rank 1"),
        "only": ({"x": odd} if mine else {}, r"not there, or not sharded"),
        "order": (dict(reversed(state().items())) if mine else state(), "the order of their tensors"),
        "partial": (state(x=partial if mine else odd), "partial placement"),
        "shape": (state(x=wrong if mine else odd), "local tensor of"),
        "flat": (state(x=ckptd_client.FlatPart(torch.ones(2), (2 * ranks,), 2 * rank() + mine)), "do not make it up"),
    }  # fmt: skip
    if ranks > 2:
        cases = {name: (state, text.replace("rank 1", f"rank {last}")) for name, (state, text) in cases.items()}
    with ckptd_client.connect("disagree", start=False) as client:
        for name, (given, text) in cases.items():
            with pytest.raises(ckptd_client.UsageError) as caught:
                client.gather(given)
            assert re.search(text, str(caught.value)), (name, str(caught.value))
            assert caught.value.hint, name
        for how in ({"to": last if mine else 0}, {"bucket_nbytes": 1000 + mine}, {"cpu_offload": mine}):
            with pytest.raises(ckptd_client.UsageError, match=f"rank {last} gathers with"):
                client.gather(state(), **how)
        for how in ({"to": ranks}, {"to": []}, {"bucket_nbytes": 0}):
            with pytest.raises(ckptd_client.UsageError, match=r"names no rank|holds nothing"):
                client.gather(state(), **how)
        if ranks == 4:
            halves = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["b"]
            stage = {f"stage{rank() // 2}": shard(torch.ones(4), halves, Shard(0))}  # each two ranks have their own
            with pytest.raises(ckptd_client.UsageError, match="lies on no rank that it is gathered to"):
                client.gather(stage, to=0)
            found = client.gather(stage, to=[1, 2]).wait()
            assert (found is None) == (rank() in {0, 3})
            assert found is None or torch.equal(found.popitem()[1], torch.ones(4))
        under_way = client.gather(state(), to=0)  # the bytes of two gathers would meet
        with pytest.raises(ckptd_client.UsageError, match="still on its way"):
            client.gather(state(), to=0)
        assert (under_way.wait() is None) == (rank() != 0)
        check(
            "after all that",
            tensors(client.gather(state()).wait()),
            {"a": torch.ones(5), "w": torch.arange(24.0).view(6, 4)},
        )


def stops():
    ranks = dist.get_world_size()
    line = init_device_mesh("cpu", (ranks,))
    whole = {f"w{i}": torch.full((50, 40), float(i)) for i in range(20)}
    state = {name: shard(value, line, Shard(0)) for name, value in whole.items()}
    for how in ({}, {"collective": True}):
        for _ in gather(state, bucket_nbytes=8000, **how):
            if rank() == 0:
                break
        check("after a loop that was left", gather(state, **how).wait(), whole)
        run = gather(state, **how)
        run.wait()
        with pytest.raises(ckptd_client.UsageError, match="before"):
            run.wait()
    dist.barrier()
    if rank() == ranks - 1:
        gather(state, bucket_nbytes=8000)
        sys.stdout.flush()
        os._exit(0)
    began = time.monotonic()
    with pytest.raises(ckptd_client.GatherError, match="broke off"):
        for _ in gather(state, bucket_nbytes=8000):
            pass
    assert time.monotonic() - began < 60
    os._exit(0)


def cuda():
    """Shards on devices, onto CPUs and where they are, while the devices have other work."""
    device = torch.device("cuda", rank())
    torch.cuda.set_device(device)
    line = init_device_mesh("cuda", (dist.get_world_size(),))
    torch.manual_seed(5)
    whole = {f"w{i}": random_bits((257 + i, 300), torch.bfloat16) for i in range(20)} | {"wide": torch.randn(30, 501)}
    state = {name: shard(value.to(device), line, Shard(name == "wide")) for name, value in whole.items()}
    for how in ({}, {"bucket_nbytes": 50_000}, {"cpu_offload": False}, {"cpu_offload": False, "bucket_nbytes": 50_000}):
        for _ in range(2):  # the second time with memory that the first has left
            run = gather(state, **how)
            torch.cuda._sleep(2_000_000_000)  # what training does meanwhile, about a second
            done = torch.cuda.Event()
            done.record()
            found = run.wait()
        if how.get("cpu_offload", True):
            assert not done.query(), "waited for the training's stream"
        else:
            assert {tensor.device for tensor in found.values()} == {device}
        check(how, {name: tensor.cpu() for name, tensor in found.items()}, whole)
    alone = gather(state, to=0).wait()
    check("to one", alone or {}, whole if rank() == 0 else {})


def main():
    command, *args = sys.argv[1:]
    dist.init_process_group("cpu:gloo,cuda:nccl" if command == "cuda" else "gloo")
    {"layouts": layouts, "odd": odd, "disagree": disagree, "stops": stops, "cuda": cuda}[command](*args)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # FSDP2 with gloo now and then aborts at the end of the interpreter, when all is done


if __name__ == "__main__":
    main()
