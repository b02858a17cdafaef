"""A checkpoint of CkptdWriter says who holds what, so that its readers read few records."""

import os

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.tensor import DTensor

from ckptd.shared.base.ids import JobKey, file_name
from ckptd.shared.format.integrity import XXH3
from ckptd.shared.format.layout import VERSION, Leaves, encode_leaves
from ckptd.shared.format.manifest import FileRecord
from ckptd.shared.format.packed_layout import Spread, parted
from ckptd.shared.format.placement import REPLICATED
from ckptd.shared.format.slot import align_up
from ckptd.store.posix.commit import commit
from ckptd.store.posix.scan import Place
from ckptd.system.files import FileLayer
from ckptd_client._load.rounds import read_checkpoint
from ckptd_client._local.rank import Group
from ckptd_client.dcp import CkptdReader
from ckptd_client.dcp._items import ItemPlans, paths_of, resolved, spread_of
from tests.checkpoints import SAVE, digests_of, filled, put_image, put_vote
from tests.on_meshes import rank_of, spread, values
from tests.stored import records_of

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def planned(world_size, state_of, planner_of):
    """The planner of each rank, and its part of the global plan."""
    planners = []
    for rank in range(world_size):
        with rank_of(rank, world_size):
            planners.append(planner_of())
            planners[-1].set_up_planner(state_of(rank), None, is_coordinator=rank == 0)
            planners[-1].local = planners[-1].create_local_plan()
    plans, _ = planners[0].create_global_plan([planner.local for planner in planners])
    return zip(planners, plans, strict=True)


def write(store, world_size, state_of, planner_of=DefaultSavePlanner):
    """A committed checkpoint as CkptdWriter lays it out, each rank on a node of its own. No plain values."""
    os.makedirs(store, exist_ok=True)
    place = Place(JobKey(str(store), "demo"), SAVE)
    for rank, (planner, plan) in enumerate(planned(world_size, state_of, planner_of)):
        with rank_of(rank, world_size):
            items = [item for item in plan.items if item.type != WriteItemType.BYTE_IO]
            specs, tensors = resolved(items, (planner.resolve_data(item) for item in items))
            paths, lies = paths_of(planner.state_dict, planner.mappings), spread_of(planner, specs, rank)
            made = ItemPlans().plan(specs, paths, lies, rank=rank, world_size=world_size)
        memory = torch.zeros(align_up(made.nbytes), dtype=torch.uint8)
        for view, tensor in zip(made.views(memory), tensors, strict=True):
            view.copy_(tensor)
        image = filled(made, memory, SAVE)
        record = FileRecord(
            name=file_name(rank), rank=rank, nbytes=len(image), digests=digests_of(image, XXH3),
            **parted(made.layout, "plan")._asdict(), leaves=encode_leaves(Leaves(VERSION, {})),
            parts=made.image.part_nbytes,
        )  # fmt: skip
        put_image(place, record, image)
        put_vote(place, [record], world_size=world_size, node=f"n{rank:04}", objects=None)
    commit(FileLayer(), place.key, SAVE, "test")
    return place.final


SHAPES = {"rows": (64, 2), "few": (3, 2), "copies": (6, 2)}
CUTS = {"rows": (0,), "few": (0,), "copies": (REPLICATED,)}


def job(world_size, *, empty=False):
    def state_of(rank):
        mesh = list(range(world_size)), (world_size,)
        both = {name: spread(name, SHAPES[name], *mesh, CUTS[name], empty=empty) for name in SHAPES}
        plain = {f"plain{n}": torch.zeros(3) if empty else values("p", (3,)) for n in range(4)}
        state = {name: tensor for name, (tensor, _) in both.items()} | plain
        expected = {name: part for name, (_, part) in both.items()} | dict.fromkeys(plain, values("p", (3,)))
        return (state, expected) if empty else state

    return state_of


def test_ranks_are_of_one_kind_though_each_tensor_of_several_is_written_by_one(tmp_path):
    index = records_of(write(tmp_path / "s", 8, job(8))).common
    assert index is not None
    (kind,) = index.kinds
    assert set(kind.said.tensors) == {*SHAPES, "plain0", "plain1", "plain2", "plain3"}
    assert len(kind.ranks_with("copies")) == len(kind.ranks_with("plain1")) == 1
    assert list(kind.ranks_with("few")) == [0, 1, 2]


@pytest.mark.parametrize("by", ["dcp", "load"])
def test_a_rank_reads_the_votes_of_the_ranks_that_wrote_what_it_wants(tmp_path, votes_read, by):
    final = write(tmp_path / "s", 16, job(16))
    votes_read.clear()
    with rank_of(5, 8):
        state, expected = job(8, empty=True)(5)
        wanted = {name: state[name] for name in ("rows", "copies", "plain2")}
        if by == "dcp":
            dcp.load(wanted, storage_reader=CkptdReader(str(final)), no_dist=True)
        else:
            fitted, _, _ = read_checkpoint(final, wanted, group=Group(5, 8, "here"), strict=False)
            fitted.finish(wanted)
        for name, value in wanted.items():
            assert torch.equal(value.to_local() if isinstance(value, DTensor) else value, expected[name]), name
    kind = records_of(final).common.kinds[0]
    writers = {0 if by == "dcp" else 5, 10, 11, *kind.ranks_with("copies"), *kind.ranks_with("plain2")}
    assert sorted(votes_read) == [f"n{rank:04}" for rank in sorted(writers)]


def test_a_planner_that_writes_something_else_than_its_state_says_nothing():
    class Casting(DefaultSavePlanner):
        def resolve_data(self, write_item):
            return super().resolve_data(write_item).to(torch.bfloat16)

    class Leaving(DefaultSavePlanner):
        def create_local_plan(self):
            return super().create_local_plan()

    for kind in (Casting, Leaving):
        ((planner, _),) = planned(1, lambda _: {"w": torch.ones(2)}, kind)
        assert spread_of(planner, [], 0) == Spread()
