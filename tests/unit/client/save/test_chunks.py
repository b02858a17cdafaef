"""Tensors of which a rank has several boxes: which ones, and that they come back by both routes."""

import math
import os
import pickle

import msgspec
import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import Shard as ShardedTensorShard
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharding_spec import ShardMetadata
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

import ckptd_client
from ckptd.checkpoint.export.run import Order, export
from ckptd.checkpoint.verify import verify_path
from ckptd.shared.base.errors import ConfigError, UsageError
from ckptd.shared.base.ids import MAX_PARTS
from ckptd.shared.format.layout import file_layouts
from ckptd.shared.format.packed_layout import decode_layout
from ckptd.shared.torchfile.image import make_layout
from ckptd_client._image.plan import gather, make_plan
from ckptd_client._state.tensors import shard_of

PACKED = getattr(torch, "float4_e2m1fn_x2", None)  # since 2.8


@pytest.fixture
def as_rank():
    """A mesh of 2 by n seen by one of its ranks; nothing is sent."""

    def start(rank, *shape):
        if dist.is_initialized():
            dist.destroy_process_group()
        world_size = torch.Size(shape).numel()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        return init_device_mesh("cpu", shape)

    yield start
    if dist.is_initialized():
        dist.destroy_process_group()


def dtensor(local, mesh, placements, shape):
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def fsdp_over_tp(whole, dp, tp, coordinate):
    """The rows that fully_shard leaves to a rank of what parallelize_module left to it."""
    inner = whole.chunk(tp)
    part = inner[coordinate[1]] if coordinate[1] < len(inner) else whole[:0]
    outer = part.chunk(dp)
    return outer[coordinate[0]] if coordinate[0] < len(outer) else part[:0]


@pytest.mark.parametrize(("dp", "tp"), [(2, 2), (2, 3), (3, 2), (4, 2), (4, 4)])
def test_fsdp_over_tensor_parallelism_has_the_rows_that_it_has_whatever_divides(dp, tp, as_rank):
    for rank in range(dp * tp):
        mesh = as_rank(rank, dp, tp)
        coordinate = mesh.get_coordinate()
        for rows in range(1, 26):
            whole = torch.arange(rows * 2.0).view(rows, 2)
            local = fsdp_over_tp(whole, dp, tp, coordinate)
            tensor = dtensor(local, mesh, [_StridedShard(0, split_factor=tp), Shard(0)], (rows, 2))
            chunks = shard_of(tensor, "w").chunks
            assert len(chunks) == (len(local) > 0), (rank, rows)
            for chunk in chunks:
                (start, _), (count, _) = chunk.box
                assert torch.equal(whole[start : start + count], local), (rank, rows)


@pytest.mark.parametrize(("rows", "columns"), [(12, 8), (11, 6), (3, 4), (12, 1), (7, 9)])
def test_an_interleaved_shard_is_its_boxes(rows, columns, as_rank):
    whole = torch.arange(rows * columns).view(rows, columns)
    count = torch.zeros_like(whole)
    for rank in range(4):
        mesh = as_rank(rank, 2, 2)
        row, column = mesh.get_coordinate()
        placements = [_StridedShard(0, split_factor=3), _StridedShard(1, split_factor=2)]
        try:
            local = placements[0]._split_tensor(whole, 2, with_padding=False, contiguous=False)[0][row]
            local = placements[1]._split_tensor(local, 2, with_padding=False, contiguous=False)[0][column].contiguous()
        except AssertionError as error:
            assert "even sharding" in str(error) and (rows, columns) != (12, 8)  # noqa: PT017, PT018
            pytest.skip(f"torch {torch.__version__} splits no strided shard unevenly")
        for chunk in shard_of(dtensor(local, mesh, placements, (rows, columns)), "w").chunks:
            where = tuple(slice(o, o + n) for o, n in zip(*chunk.box, strict=True))
            assert torch.equal(whole[where], chunk.local)
            assert chunk.local.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
            count[where] += 1
    assert (count == 1).all()


def nested(rows, shape, coordinate, order):
    """Split by one dimension of the mesh after the other."""
    for dim in order:
        parts = rows.chunk(shape[dim])
        rows = parts[coordinate[dim]] if coordinate[dim] < len(parts) else rows[:0]
    return rows


@pytest.mark.parametrize("shape", [(2, 2, 2), (2, 3, 2), (3, 2, 2), (2, 2, 3)])
@pytest.mark.parametrize(
    ("strided", "order"),
    [((0,), (1, 2, 0)), ((0, 1), (2, 1, 0)), ((1,), (0, 2, 1))],
    ids=["fsdp over two", "strided over strided", "strided between"],
)
def test_three_cuts_of_one_dimension_have_the_rows_of_their_nesting_or_are_refused(shape, strided, order, as_rank):
    right, refused = 0, 0
    placements = [
        _StridedShard(0, split_factor=math.prod(shape[dim + 1 :])) if dim in strided else Shard(0) for dim in range(3)
    ]
    for rank in range(math.prod(shape)):
        mesh = as_rank(rank, *shape)
        for rows in range(1, 41):
            local = nested(torch.arange(rows), shape, mesh.get_coordinate(), order)
            try:
                chunks = shard_of(dtensor(local, mesh, placements, (rows,)), "state['w']").chunks
            except UsageError as error:
                assert "state['w']" in str(error)  # noqa: PT017 - or the rows are right
                assert "two ways" in str(error)  # noqa: PT017
                assert rows % math.prod(shape)
                refused += 1
                continue
            found = [torch.arange(start, start + count) for (start,), (count,) in (chunk.box for chunk in chunks)]
            assert torch.equal(torch.cat([torch.arange(0), *found]), local), (rank, rows)
            right += 1
    assert refused < right / 3


def test_a_local_tensor_that_its_placements_do_not_give_is_refused(as_rank):
    tensor = dtensor(torch.ones(5, 2), as_rank(0, 2, 2), [_StridedShard(0, split_factor=2), Shard(0)], (8, 2))
    with pytest.raises(UsageError, match=r"state\['w'\] has a local tensor of \[5, 2\]"):
        shard_of(tensor, "state['w']")


def test_more_boxes_than_files_are_refused(as_rank):
    factor = MAX_PARTS + 1
    tensor = dtensor(torch.ones(factor), as_rank(0, 2), [_StridedShard(0, split_factor=factor)], (2 * factor,))
    with pytest.raises(UsageError, match=r"state\['w'\] has 257 separate boxes") as caught:
        shard_of(tensor, "state['w']")
    assert "redistribute" in caught.value.hint


# -- the whole way, as the one rank of a job


@pytest.fixture
def places(node, job):
    """The job's directory on the store, and the arena."""
    return os.path.join(node.store, job), node.arena


def wrapped(seed, mesh):
    parts = [noise(6, 2, seed=seed), noise(6, 1, seed=seed + 1), noise(6, 4, seed=seed + 2)]
    return whole_of(LocalShardsWrapper(parts, [(0, 0), (0, 2), (0, 3)]), mesh)


def whole_of(local, mesh):
    # What from_local makes of it. Older releases (2.6) do so with one box only.
    meta = TensorMeta(torch.Size((6, 7)), (7, 1), torch.float32)
    return DTensor(local, DTensorSpec(mesh, (Replicate(),), tensor_meta=meta), requires_grad=False)


def sharded_tensor(seed, _mesh):
    places = [ShardMetadata([0, 0], [2, 5], "rank:0/cpu"), ShardMetadata([2, 0], [4, 5], "rank:0/cpu")]
    shards = [
        ShardedTensorShard(noise(*place.shard_sizes, seed=seed + place.shard_offsets[0]), place) for place in places
    ]
    properties = TensorProperties(dtype=torch.float32)
    metadata = ShardedTensorMetadata(places, torch.Size([6, 5]), properties)
    return ShardedTensor._init_from_local_shards_and_global_metadata(shards, metadata)


def noise(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def pieces(tensor):
    return [(chunk.box, chunk.local.clone()) for chunk in shard_of(tensor, "w").chunks]


def same(left, right):
    return [box for box, _ in left] == [box for box, _ in right] and all(
        torch.equal(a, b) for (_, a), (_, b) in zip(left, right, strict=True)
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [wrapped, sharded_tensor], ids=lambda make: make.__name__)
def test_several_boxes_come_back_by_both_routes(make, as_rank, join, emptied, places):
    mesh = as_rank(0, 1)
    state = {"before": noise(3, seed=1), "cut": make(10, mesh), "after": noise(2, seed=2)}
    state["tied"] = state["cut"]
    expected = pieces(state["cut"])
    client = join()
    for step in (1, 2):  # the second by the plan of the first
        handle = client.save(state, step)
        handle.wait("durable", 60)
    assert client.stats().plans == 1
    directory = os.path.join(places[0], handle.save_id.dirname)
    files = sorted(name for name in os.listdir(directory) if name.endswith(".safetensors"))
    assert files == [f"r00000-p{part:02d}.safetensors" for part in range(len(expected))]
    assert verify_path(directory).ok
    assert verify_path(places[1]).ok
    with open(os.path.join(directory, ".metadata"), "rb") as file:
        listed = pickle.load(file).state_dict_metadata  # noqa: S301 - our own
    assert {name: len(listed[name].chunks) for name in ("cut", "tied")} == dict.fromkeys(("cut", "tied"), len(expected))
    for route in ("arena", "pfs"):
        fresh = {"before": torch.zeros(3), "cut": make(20, mesh), "after": torch.zeros(2)}
        fresh["tied"] = fresh["cut"]
        assert client.load(fresh).tier == route
        assert same(pieces(fresh["cut"]), expected)
        assert torch.equal(fresh["after"], state["after"])
        client.close()
        if route == "arena":
            emptied()
            client = join()
    whole = {"before": torch.zeros(3), "cut": torch.zeros(make(1, mesh).shape), "after": torch.zeros(2)}
    whole["tied"] = whole["cut"]
    with join() as client:
        client.load(whole)
    for (offsets, sizes), values in expected:
        where = tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
        assert torch.equal(whole["cut"][where], values)


@pytest.mark.filterwarnings("ignore")
def test_exports_join_the_boxes(join, places, as_rank, tmp_path):
    mesh = as_rank(0, 1)
    state = {"cut": wrapped(3, mesh), "complex": torch.randn(4, dtype=torch.complex128)}
    if PACKED is not None:
        state["packed"] = torch.arange(5, dtype=torch.uint8).view(PACKED)
    expected = torch.cat([local for _, local in pieces(state["cut"])], 1)
    handle = join().save(state, 1).wait("durable", 60)
    source = os.path.join(places[0], handle.save_id.dirname)
    for form in ("torch", "safetensors", "dcp"):
        export(Order(source=source, out=str(tmp_path / form), format=form))
    found = torch.load(tmp_path / "torch")
    assert torch.equal(found["cut"], expected)
    assert torch.equal(found["complex"], state["complex"])
    if PACKED is not None:
        assert found["packed"].dtype == PACKED
        assert torch.equal(found["packed"].view(torch.uint8), state["packed"].view(torch.uint8))
    found = safetensors.torch.load_file(tmp_path / "safetensors" / "model.safetensors")
    assert torch.equal(found["cut"], expected)
    assert torch.equal(torch.view_as_complex(found["complex"]), state["complex"])
    target = {"cut": torch.zeros(6, 7), "complex": torch.zeros(4, dtype=torch.complex128)}
    dist.destroy_process_group()  # so that dcp.load asks no other rank, in releases too that have no no_dist
    dcp.load(target, checkpoint_id=tmp_path / "dcp")
    assert torch.equal(target["cut"], expected)
    assert torch.equal(target["complex"], state["complex"])


def test_other_boxes_need_another_plan(as_rank):
    mesh = as_rank(0, 1)
    plan = make_plan({"cut": wrapped(1, mesh)}, rank=0, world_size=1)
    assert gather(plan, {"cut": wrapped(2, mesh)}) is not None
    other = LocalShardsWrapper([noise(6, 3, seed=1), noise(6, 4, seed=2)], [(0, 0), (0, 3)])
    assert gather(plan, {"cut": whole_of(other, mesh)}) is None
    layout = decode_layout(plan.layout, where="plan")
    assert [part.nbytes % 4096 for part in layout.parts[:-1]] == [0, 0]
    assert sum(part.nbytes for part in layout.parts) == layout.image_nbytes


# -- what an image may be


def test_a_plain_layout_has_no_archives_and_is_read_by_ckptd_and_safetensors(join, emptied, places, as_rank):
    mesh = as_rank(0, 1)
    state = {"w": noise(5, seed=1), "cut": wrapped(3, mesh), "lr": 0.1}
    with join(layout="plain") as client:
        handle = client.save(state, 1)
        handle.wait("durable", 60)
    directory = os.path.join(places[0], handle.save_id.dirname)
    assert not {".metadata", "objects.pt"} & set(os.listdir(directory))
    assert verify_path(directory).ok
    emptied()
    fresh = {"w": torch.zeros(5), "cut": wrapped(9, mesh), "lr": 0.0}
    with join() as client:
        client.load(fresh)
    assert torch.equal(fresh["w"], state["w"])
    assert same(pieces(fresh["cut"]), pieces(state["cut"]))
    assert fresh["lr"] == 0.1


@pytest.mark.parametrize("dual", [True, False])
@pytest.mark.parametrize("rows", [0, 1024])
def test_an_empty_tensor_at_the_end_of_a_file_is_that_files(dual, rows, as_rank):
    """Whatever the pages: it must not seem to be the next file's."""
    cut = LocalShardsWrapper([torch.ones(2, 3), torch.ones(2, 4)], [(0, 0), (0, 3)])
    state = {"w": torch.ones(rows), "none": torch.ones(0), "v": torch.ones(1018)}
    state |= {"cut": dtensor(cut, as_rank(0, 1), [Replicate()], (2, 7))}
    plan = make_plan(state, rank=0, world_size=1, dual=dual)  # bare, the payloads of the first file are whole pages
    layout = decode_layout(plan.layout, where="plan")
    names = [{entry.name for entry in own.tensors} for _, own in file_layouts(layout)]
    assert "none" in names[0]
    assert names[1] == {"cut"}


def test_a_layout_that_none_could_read_is_not_saved(monkeypatch):
    monkeypatch.setattr("ckptd_client._image.plan.make_layout", lambda *args, **kw: broken(make_layout(*args, **kw)))

    def broken(layout):
        return msgspec.structs.replace(layout, image_nbytes=layout.image_nbytes - 4096)

    with pytest.raises(UsageError, match="layout"):
        make_plan({"w": torch.ones(2000)}, rank=0, world_size=1)


def test_a_layout_that_there_is_not_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="layout='flat'"):
        ckptd_client.connect("job", store=tmp_path, layout="flat")


@pytest.mark.skipif(not hasattr(torch, "float8_e8m0fnu"), reason=f"torch {torch.__version__} has no float8_e8m0fnu")
def test_e8m0_is_saved_with_a_word_about_the_reader_that_refuses_it(caplog):
    scale = torch.ones(3).to(torch.float8_e8m0fnu)
    make_plan({"scale": scale}, rank=0, world_size=1)
    (record,) = caplog.records
    assert "scale is float8_e8m0fnu: torch's HuggingFaceStorageReader refuses" in record.getMessage()
