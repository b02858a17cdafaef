"""`.metadata` made without torch equals, field by field, what torch's own planner makes of the same state."""

import pickle
import pickletools
import time

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from ckptd.shared.base.ids import file_name
from ckptd.shared.format import layout as lay
from ckptd.shared.format.dtypes import DTYPES
from ckptd.shared.format.packed_layout import decode_layout, encode_layout
from ckptd.shared.torchfile import dcp_metadata
from ckptd.shared.torchfile.dcp_metadata import TooManyBoxesError, metadata_bytes
from ckptd.shared.torchfile.pickling import ALLOWED

WORLD = 4
CODES = {getattr(torch, dtype.torch): code for code, dtype in DTYPES.items()}
OBJECTS = {"sched.last_lr": (0, 700), "optim.param_groups": (700, 300), "step": (1000, 411)}


def read(data):
    """What the stock reader's read_metadata makes of the bytes."""
    return pickle.loads(data)  # noqa: S301  # our own


def make(layouts, objects=OBJECTS):
    return metadata_bytes(layouts, objects, checkpoint_id="step-000000100.i0001", save_id="the save")


# -- the same state, planned by torch and laid out by us --


def a_state():
    """As one rank has it: FSDP2 shards, even, uneven and empty; 2D; HSDP; replicated; 0-dim; empty; every dtype."""
    mesh = init_device_mesh("cpu", (WORLD,))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def shared(shape, placements, on=mesh, dtype=torch.float32):
        return distribute_tensor(torch.zeros(shape, dtype=dtype), on, placements, src_data_rank=None)

    return {
        "model": {
            "even": shared((8, 3), [Shard(0)]),
            "uneven": shared((6, 3), [Shard(0)]),
            "few": shared((2, 5), [Shard(0)]),
            "columns": shared((3, 8), [Shard(1)], dtype=torch.bfloat16),
            "fsdp_tp": shared((4, 6), [Shard(0), Shard(1)], square),
            "hsdp": shared((6, 2), [Replicate(), Shard(0)], square),
            "everywhere": shared((3, 3), [Replicate()]),
            "buffer": torch.zeros(7),
            "batches": torch.tensor(3),
            "nothing": torch.zeros(0, 4),
            "no_rows": shared((0, 4), [Shard(0)]),
            "dotted.key": torch.zeros(1),
            "tied": torch.zeros(5, 2),
        },
        "dtypes": [torch.zeros(2, dtype=dtype) for dtype in CODES],
        "optim": {"state": {0: {"exp_avg": shared((8, 3), [Shard(0)])}}, "param_groups": [1, 2.5]},
        "sched": {"last_lr": 0.1},
        "step": 7,
    }


def on_every_rank(work):
    for rank in range(WORLD):
        dist.init_process_group("fake", rank=rank, world_size=WORLD, store=FakeStore())
        try:
            yield work(rank, a_state())
        finally:
            dist.destroy_process_group()


def path_of(key, state):
    for step in key:
        yield ("l" if isinstance(state, list) else "k" if isinstance(step, str) else "i", step)
        state = state[step]


def flatten(state, key=()):
    """(path, leaf) of everything; keys of dicts as they are."""
    nested = isinstance(state, dict) or (isinstance(state, list) and isinstance(state[0], torch.Tensor))
    if not nested:
        yield key, state
        return
    for step, item in state.items() if isinstance(state, dict) else enumerate(state):
        yield from flatten(item, (*key, step))


def box_of(tensor):
    if not isinstance(tensor, DTensor):
        return tuple(tensor.shape), (0,) * tensor.dim()
    (chunk,) = tensor.__create_chunk_list__()
    return tuple(chunk.sizes), tuple(chunk.offsets)


def layout_of(rank, state):
    """Head of 40 bytes, payload, tail of 24, one tensor after the other."""
    at, entries, paths = 4096, [], {}
    for key, leaf in flatten(state):
        name = ".".join(map(str, key))
        paths[name] = tuple(path_of(key, state))
        if isinstance(leaf, torch.Tensor):
            sizes, offsets = box_of(leaf)
            nbytes = lay.box_nbytes(CODES[leaf.dtype], sizes)
            box = (name, CODES[leaf.dtype], tuple(leaf.shape), offsets, sizes)
            entries.append(lay.TensorEntry(*box, at + 40, nbytes, at, nbytes + 64))
            at += nbytes + 64
    return a_layout(rank, entries, paths)


def a_layout(rank, entries, paths=None, aliases=None):
    return lay.Layout(
        version=lay.VERSION, file=file_name(rank), rank=rank, world_size=WORLD, header_nbytes=4096,
        image_nbytes=1 << 40, plan_id="test", tensors=entries, paths=paths or {}, aliases=aliases or {},
    )  # fmt: skip


def torchs_plan(rank, state):
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    planner.set_up_planner(state, is_coordinator=rank == 0)
    return planner.create_local_plan()


def torchs_metadata(layouts):
    """What torch's planner and a FileSystemWriter that wrote into our files would have agreed on."""
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    plans, metadata = planner.create_global_plan(list(on_every_rank(torchs_plan)))
    places = {
        (entry.name, layout.rank): _StorageInfo(layout.file, entry.slice_offset, entry.slice_nbytes)
        for layout in layouts
        for entry in layout.tensors
    } | {(name, 0): _StorageInfo("objects.pt", *place) for name, place in OBJECTS.items()}
    metadata.storage_data = {
        item.index: places[item.index.fqn, rank] for rank, plan in enumerate(plans) for item in plan.items
    }
    assert any(item.type == WriteItemType.BYTE_IO for item in plans[0].items)
    metadata.version = "1.0.0"
    metadata.storage_meta = StorageMeta("step-000000100.i0001", "the save")
    return metadata


def without_empty_boxes(metadata):
    """torch lists shards of no rows too, at the end of their tensor; nobody ever reads one."""
    gone = set()
    for name, tensor in metadata.state_dict_metadata.items():
        if not isinstance(tensor, BytesStorageMetadata) and tensor.size.numel():
            gone |= {MetadataIndex(name, chunk.offsets) for chunk in tensor.chunks if not chunk.sizes.numel()}
            tensor.chunks = [chunk for chunk in tensor.chunks if chunk.sizes.numel()]
    metadata.storage_data = {index: info for index, info in metadata.storage_data.items() if index not in gone}
    return metadata


@pytest.fixture(scope="module")
def layouts():
    return list(on_every_rank(layout_of))


def test_equals_what_torch_makes(layouts):
    ours, torchs = read(make(layouts)), without_empty_boxes(torchs_metadata(layouts))
    assert ours.state_dict_metadata == torchs.state_dict_metadata
    assert ours.planner_data == torchs.planner_data
    assert ours.storage_data == torchs.storage_data
    assert ours == torchs
    assert type(ours) is Metadata
    assert vars(ours).keys() == vars(torchs).keys()


def attributes(value):
    return {name: type(item) for name, item in vars(value).items()}


def test_objects_have_the_attributes_that_torchs_have(layouts):
    ours, torchs = read(make(layouts)), without_empty_boxes(torchs_metadata(layouts))
    for name, theirs in torchs.state_dict_metadata.items():
        own = ours.state_dict_metadata[name]
        assert attributes(own) == attributes(theirs)
        if not isinstance(own, BytesStorageMetadata):
            assert attributes(own.properties) == attributes(theirs.properties)
            assert [*map(attributes, own.chunks)] == [*map(attributes, theirs.chunks)]
    indexes = {index: index for index in torchs.storage_data}
    for index in ours.storage_data:  # equality of an index leaves its hint out
        assert vars(index) == vars(indexes[index])
        assert attributes(index) == attributes(indexes[index])
    assert vars(ours.storage_meta) == vars(torchs.storage_meta)


def test_the_hint_of_an_index_is_its_place_among_the_chunks(layouts):
    metadata = read(make(layouts))
    for index in metadata.storage_data:
        tensor = metadata.state_dict_metadata[index.fqn]
        if index.index is not None:
            assert tensor.chunks[index.index].offsets == index.offset


def test_the_stock_reader_takes_it(tmp_path, layouts):
    (tmp_path / ".metadata").write_bytes(make(layouts))
    metadata = FileSystemReader(tmp_path).read_metadata()
    assert metadata.state_dict_metadata["model.even"].size == torch.Size([8, 3])


def test_can_be_pickled_again_by_torch(layouts):
    metadata = read(make(layouts))
    assert read(pickle.dumps(metadata)) == metadata


# -- what is listed --


def entry(name, sizes=(2, 2), shape=None, offsets=None, *, at=4096, dtype="F32"):
    nbytes = lay.box_nbytes(dtype, sizes)
    offsets = offsets or (0,) * len(sizes)
    return lay.TensorEntry(name, dtype, shape or sizes, offsets, sizes, at + 40, nbytes, at, nbytes + 64)


def listed(*layouts, objects=None):
    """(file, offset) of each box by name."""
    data = make(layouts, objects or {})
    found = {}
    for index, info in read(data).storage_data.items() if data else ():
        found.setdefault(index.fqn, []).append((info.relative_path, info.offset))
    return found


def test_duplicates_are_the_lowest_ranks():
    assert listed(a_layout(0, [entry("w")]), a_layout(1, [entry("w", at=9000)])) == {"w": [(file_name(0), 4096)]}


def test_where_ranks_disagree_the_lowest_counts():
    others = [entry("w", (3, 2)), entry("w", dtype="I32"), entry("w", (2, 2), (4, 2), (2, 0))]
    assert listed(a_layout(0, [entry("w")]), *(a_layout(i + 1, [e]) for i, e in enumerate(others))) == {
        "w": [(file_name(0), 4096)]
    }


def test_tied_names_point_to_one_archive():
    half = [entry("a", (1, 2), (2, 2), (rank, 0)) for rank in range(2)]
    tied = {"b": "a", "c": "a"}
    found = listed(*(a_layout(rank, [half[rank]], aliases=tied) for rank in range(2)))
    assert found == {name: [(file_name(0), 4096), (file_name(1), 4096)] for name in "abc"}


def test_a_tensor_with_gaps_or_overlaps_is_missing_rather_than_wrong():
    gap = [entry("gap", (1, 2), (3, 2), (rank, 0)) for rank in range(2)]
    over = [entry("over", (2, 2), (3, 2), (rank, 0), at=8000) for rank in range(2)]
    found = listed(*(a_layout(rank, [gap[rank], over[rank], entry("w", at=12000)]) for rank in range(2)))
    assert list(found) == ["w"]
    # as many elements as there are, and two of them twice
    both = [entry("both", (5, 2), (8, 2), (0, 0), at=8000), entry("both", (3, 2), (8, 2), (3, 0), at=8000)]
    assert listed(*(a_layout(rank, [both[rank], entry("w")]) for rank in range(2))).keys() == {"w"}


def test_an_empty_box_takes_no_place_from_a_full_one():
    empty = a_layout(0, [entry("w", (0, 2), (2, 2), (0, 0))])
    assert listed(empty, a_layout(1, [entry("w", at=9000)])) == {"w": [(file_name(1), 9000)]}
    assert listed(empty) == {}


def test_there_is_none_without_archives_or_for_too_many_boxes(monkeypatch):
    bare = lay.TensorEntry("v", "F32", (2,), (0,), (2,), 8000, 8)
    assert make([a_layout(0, [entry("w"), bare])]) is None
    assert make([a_layout(0, [])], {}) is None
    assert make([a_layout(0, [])], {"step": (0, 3)}) is not None
    monkeypatch.setattr(dcp_metadata, "MAX_BOXES", 2)
    assert make([a_layout(0, [entry("w")], aliases={"a": "w"})]) is not None
    with pytest.raises(TooManyBoxesError, match="more than 2 boxes"):
        make([a_layout(0, [entry("w")], aliases={"a": "w", "b": "w"})])


def test_a_leaf_that_some_rank_has_as_a_tensor_is_the_tensor():
    metadata = read(make([a_layout(0, [entry("w")])], {"w": (0, 3)}))
    assert [index.offset for index in metadata.storage_data] == [torch.Size([0, 0])]


# -- the file itself --

names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40) | st.sampled_from(
    ["a.b..c", ".", "..", "../x", "ctorch\nload\n", "naïve.權重.🧱", "\0", "x" * 70_000]
)


@settings(max_examples=60)
@given(st.lists(names, unique=True, min_size=1, max_size=20))
def test_any_names_come_back(found):
    paths = {name: tuple(("k", step) for step in name.split(".")) for name in found}
    half = len(found) // 2
    entries = [entry(name, at=4096 + 1000 * i) for i, name in enumerate(found[:half])]
    data = make([a_layout(0, entries, paths)], dict.fromkeys(found[half:], (0, 9)))
    metadata = read(data)
    assert set(metadata.state_dict_metadata) == set(found)
    assert {index.fqn for index in metadata.storage_data} == set(found)
    assert metadata.planner_data == {name: tuple(name.split(".")) for name in found}
    assert globals_of(data) <= ALLOWED


def globals_of(data):
    """Every name that unpickling would import."""
    found = set()
    for opcode, argument, _ in pickletools.genops(data):
        assert opcode.name not in {"STACK_GLOBAL", "INST", "OBJ", "EXT1", "EXT2", "EXT4", "PERSID", "BINPERSID"}
        if opcode.name == "GLOBAL":
            found.add(tuple(argument.split(" ")))
    return found


def test_only_allowed_globals(layouts):
    found = globals_of(make(layouts))
    assert found <= ALLOWED
    assert {name for module, name in found if module == "torch"} == {
        "Size",
        *(dtype.torch for dtype in DTYPES.values()),
    }


def test_the_same_votes_make_the_same_bytes(layouts):
    again = [decode_layout(encode_layout(layout), where="here") for layout in layouts]
    assert make(layouts) == make(again)


@pytest.mark.seconds
def test_sixty_thousand_boxes_in_a_moment():
    layouts = [
        a_layout(
            rank,
            [entry(f"model.layers.{i}.w", (9, 8), (900, 8), (rank * 9, 0), at=4096 + i * 1000) for i in range(600)],
        )
        for rank in range(100)
    ]
    start_s = time.process_time()
    data = make(layouts, {})
    seconds = time.process_time() - start_s
    assert data is not None
    assert seconds < 5  # 0.7 s where nothing else runs
    assert len(read(data).storage_data) == 60_000
    assert len(data) < 100 * 60_000
