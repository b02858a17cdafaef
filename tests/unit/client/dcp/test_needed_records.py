"""CkptdReader reads the records of the ranks that hold what DCP plans to read, and gets what all records would give."""

import math

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from ckptd.shared.format.placement import REPLICATED
from ckptd.shared.format.record_index import Kind
from ckptd.shared.format.stored_records import StoredRecords
from ckptd_client._image import plan
from ckptd_client._load import checkpoint
from ckptd_client.dcp import CkptdReader
from tests.on_meshes import many_and_few, rank_of, rows, spread, values, write

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def load(final, rank, world_size, state_of):
    """What a rank of another job gets. state_of: its state, and what the tensors must be."""
    with rank_of(rank, world_size):
        state, expected = state_of(rank)
        dcp.load(state, storage_reader=CkptdReader(str(final)), no_dist=True)
        for name, part in expected.items():
            got = state[name].to_local() if isinstance(state[name], DTensor) else state[name]
            assert torch.equal(got, part), name
    return state


def test_a_rank_reads_the_votes_of_the_ranks_that_have_its_rows_and_one_of_its_own(tmp_path, votes_read):
    final = write(tmp_path / "s", 32, rows(32))
    votes_read.clear()
    load(final, 5, 16, rows(16, empty=True))
    assert sorted(votes_read) == ["n0000", "n0010", "n0011"], "plain values are those of rank 0"
    votes_read.clear()
    load(final, 5, 32, rows(32, empty=True))
    assert votes_read == ["n0005"]
    votes_read.clear()
    load(final, 1, 2, lambda _: ({}, {}))
    assert votes_read == ["n0000"]


def test_the_metadata_have_a_chunk_for_a_tensor_whatever_the_number_of_ranks(tmp_path, votes_read):
    final = write(tmp_path / "s", 8, lambda rank: rows(8)(rank) | {"epoch": 3, "plain": torch.ones(2)})
    votes_read.clear()
    reader = CkptdReader(str(final))
    found = reader.read_metadata()
    reader.close()
    assert votes_read == ["n0000"]
    assert {name: type(of).__name__ for name, of in found.state_dict_metadata.items()} == {
        "w": "TensorStorageMetadata", "plain": "TensorStorageMetadata", "epoch": "BytesStorageMetadata",
    }  # fmt: skip
    (chunk,) = found.state_dict_metadata["w"].chunks
    assert (tuple(chunk.offsets), tuple(chunk.sizes)) == ((0, 0), (64, 2))
    assert found.planner_data == {"w": ("w",), "plain": ("plain",), "epoch": ("epoch",)}


def test_plain_values_that_other_ranks_have_are_read_of_the_lowest_of_them(tmp_path, votes_read):
    final = write(tmp_path / "s", 6, lambda rank: rows(6)(rank) | {"rank": rank} | ({"late": rank} if rank > 3 else {}))
    votes_read.clear()
    state = load(final, 1, 2, lambda _: ({"late": 0, "rank": -1}, {}))
    assert state == {"late": 4, "rank": 0}
    assert sorted(votes_read) == ["n0000", "n0004"]
    assert load(final, 5, 6, lambda _: ({"late": 0, "rank": -1}, {})) == {"late": 5, "rank": 5}


def test_boxes_that_no_mesh_gives_are_sought_on_the_ranks_that_have_any_of_the_tensor(
    tmp_path, monkeypatch, votes_read
):
    monkeypatch.setattr(plan, "placements_of", lambda *_: ([], {}))

    final = write(tmp_path / "s", 8, many_and_few)
    load(final, 1, 4, rows(4, empty=True))
    votes_read.clear()
    load(final, 5, 6, lambda _: ({"few": torch.zeros(3, 2)}, {"few": values("few", (3, 2))}))
    assert sorted(votes_read) == ["n0000", "n0001", "n0002"]


def test_rows_that_replicas_divided_are_read_of_each_of_them(tmp_path):
    def saved(_rank):
        return {"w": spread("w", (8, 2), list(range(4)), (4,), (REPLICATED,))[0]}

    final = write(tmp_path / "s", 4, saved, replicated=())
    load(final, 1, 2, lambda _: ({"w": torch.zeros(8, 2)}, {"w": values("w", (8, 2))}))


def test_a_tensor_that_no_ranks_have_whole_is_refused_by_name(tmp_path):
    """Ranks 2 and 3 are of its mesh, and left it out of their states."""

    def saved(rank):
        return rows(4)(rank) if rank < 2 else {"other": 1}

    final = write(tmp_path / "s", 4, saved)
    load(final, 0, 4, rows(4, empty=True))
    with pytest.raises(CheckpointException, match="'w' is not whole in the checkpoint"):
        load(final, 3, 4, rows(4, empty=True))


def test_ranks_that_the_index_does_not_name_are_sought_in_all_records(tmp_path, monkeypatch, caplog):
    """An index of another version of ckptd may say less; the votes say all."""
    final = write(tmp_path / "s", 8, rows(8))
    monkeypatch.setattr(Kind, "groups", lambda *_: iter(()))
    load(final, 1, 4, rows(4, empty=True))
    assert "the index of the records lacks ranks with ['w']" in caplog.text


SHAPES = {"a": (40, 3), "b": (7,), "c": (5, 6), "s": ()}


@st.composite
def jobs(draw):
    """A world, its mesh in any order of ranks, and how each tensor lies on it."""
    mesh = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=2)))
    ranks = draw(st.permutations(range(math.prod(mesh))))
    cuts = {
        name: tuple(draw(st.sampled_from([REPLICATED, *range(len(shape))])) for _ in mesh)
        for name, shape in SHAPES.items()
    }
    return math.prod(mesh), mesh, tuple(ranks), cuts


def state_in(job, *, empty):
    _, mesh, ranks, cuts = job

    def state_of(rank):
        both = {name: spread(name, SHAPES[name], ranks, mesh, cuts[name], empty=empty) for name in SHAPES}
        state = {name: tensor for name, (tensor, _) in both.items()} | {"epoch": 0 if empty else 3}
        state["plain"] = torch.full((4,), -1.0 if empty else float(rank))
        return (state, {name: part for name, (_, part) in both.items()}) if empty else state

    return state_of


@given(jobs().filter(lambda job: job[0] > 1), jobs(), st.sampled_from([None, ()]))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_job_loads_what_any_other_saved(tmp_path_factory, saved, loading, replicated):
    """replicated: replicas divide what they save, or each saves all of it."""
    final = write(tmp_path_factory.mktemp("store"), saved[0], state_in(saved, empty=False), replicated=replicated)
    for rank in {0, loading[0] - 1}:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(StoredRecords, "__iter__", lambda _: pytest.fail("all records were read"))
            found = load(final, rank, loading[0], state_in(loading, empty=True))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(checkpoint, "index_of", lambda _records: None)
            by_all = load(final, rank, loading[0], state_in(loading, empty=True))
        assert torch.equal(found["plain"], by_all["plain"])
        assert found["epoch"] == by_all["epoch"] == 3
