"""A load into another number of ranks reads the records of the ranks that hold what it wants, and gets the same."""

import math
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor

from ckptd.checkpoint.verify import verify_path
from ckptd.shared.format.placement import REPLICATED
from ckptd.shared.format.record_index import Record, encode_index
from ckptd_client import MismatchError
from ckptd_client._image import plan
from ckptd_client._load import sought, stored_fit
from ckptd_client._load.rounds import read_checkpoint
from ckptd_client._local.rank import Group
from ckptd_client._state.naming import NOTHING_NAMED
from ckptd_client._state.pickle import NO_PICKLE
from tests.hostile import forge
from tests.long_form import LONG
from tests.on_meshes import many_and_few, rank_of, rows, spread, values, write
from tests.stored import records_of


@pytest.fixture
def no_others(monkeypatch):
    """Fails a load that reads all records."""

    def refuse(*_args):
        raise AssertionError("all records were read")

    monkeypatch.setattr(stored_fit, "_all_saves", refuse)


def load(final, rank, world_size, state_of, **options):
    """What a rank of another job gets: its state, and the fit's notes."""
    with rank_of(rank, world_size):
        state, expected = state_of(rank)
        fitted, _, notes = read_checkpoint(final, state, group=Group(rank, world_size, "here"), **options)
        notes = [*notes, *fitted.finish(state)]
        for name, part in expected.items():
            got = state[name].to_local() if isinstance(state[name], DTensor) else state[name]
            assert torch.equal(got, part), name
    return notes


SHAPES = {"a": (40, 3), "b": (7,), "c": (5, 6), "s": ()}


@st.composite
def jobs(draw):
    """A world, its mesh in any order of ranks, and how each tensor lies on it."""
    mesh = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=2)))
    world = math.prod(mesh)
    ranks = draw(st.permutations(range(world))) if draw(st.booleans()) else list(range(world))
    cuts = {
        name: tuple(draw(st.sampled_from([REPLICATED, *range(len(shape))])) for _ in mesh)
        for name, shape in SHAPES.items()
    }
    return world, mesh, tuple(ranks), cuts


def saved_in(job):
    _, mesh, ranks, cuts = job
    return lambda rank: {name: spread(name, SHAPES[name], ranks, mesh, cuts[name])[0] for name in SHAPES} | {
        "epoch": 3, "rank": rank, "plain": values("plain", (4,)),
    }  # fmt: skip


def wanted_in(job):
    _, mesh, ranks, cuts = job

    def state_of(rank):
        both = {name: spread(name, SHAPES[name], ranks, mesh, cuts[name], empty=True) for name in SHAPES}
        state = {name: tensor for name, (tensor, _) in both.items()}
        return state | {"epoch": 0, "rank": -1, "plain": torch.zeros(4)}, {
            **{name: part for name, (_, part) in both.items()}, "plain": values("plain", (4,)),
        }  # fmt: skip

    return state_of


def targets(final, rank, world_size, state_of, find=sought.index_of):
    """What a load would read: image, offset, bytes. find: the index of the records."""
    with rank_of(rank, world_size), pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored_fit, "index_of", find)
        group = Group(rank, world_size, "here")
        fitted = stored_fit.fit_to_stored(
            records_of(final), state_of(rank)[0], group, NOTHING_NAMED, where="x", keys=NO_PICKLE, strict=True
        )  # fmt: skip
        return {
            (image, one.data_offset, one.nbytes) for image, several in fitted.targets.items() for one in several
        }, fitted.leaves


@given(jobs().filter(lambda job: job[0] > 1), jobs(), st.sampled_from([None, ()]))
@settings(max_examples=25 if LONG else 12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.usefixtures("no_others")
def test_any_job_loads_what_any_other_saved(tmp_path_factory, saved, loading, replicated):
    """replicated: replicas divide what they save, or each saves all of it."""
    final = write(tmp_path_factory.mktemp("store"), saved[0], saved_in(saved), replicated=replicated)
    for rank in {0, loading[0] - 1}:
        load(final, rank, loading[0], wanted_in(loading))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored_fit, "_all_saves", ALL_SAVES)
        by_all = targets(final, rank, loading[0], wanted_in(loading), find=lambda _records: None)
    assert targets(final, rank, loading[0], wanted_in(loading)) == by_all, "the same bytes of the same images"


ALL_SAVES = stored_fit._all_saves


@pytest.mark.usefixtures("no_others")
def test_a_rank_reads_the_votes_of_the_ranks_that_have_its_rows_and_one_of_its_own(tmp_path, votes_read):
    final = write(tmp_path / "s", 32, rows(32))
    votes_read.clear()
    load(final, 5, 16, rows(16, empty=True))
    assert sorted(votes_read) == ["n0005", "n0010", "n0011"]
    votes_read.clear()
    load(final, 40, 64, rows(64, empty=True))
    assert sorted(votes_read) == ["n0000", "n0020"], "a new rank takes plain values of rank 0"


@pytest.mark.usefixtures("no_others")
def test_what_all_ranks_have_whole_is_read_of_one_and_compared_with_some(tmp_path, votes_read):
    def saved(rank):
        return {"w": torch.full((4,), float(rank)), "same": torch.ones(2)}

    final = write(tmp_path / "s", 24, saved)
    votes_read.clear()
    state = {"w": torch.zeros(4), "same": torch.zeros(2)}
    notes = load(final, 3, 8, lambda rank: (state, {"w": torch.full((4,), float(rank))}))
    assert len(set(votes_read)) <= 17
    assert len(notes) == 2, notes
    assert "ranks 0 to 23 saved state['w'], each a value of its own; those of ranks 8 to 23 are dropped" in notes[0]
    assert "ranks 0 to 23 saved state['same'], perhaps each a value of its own" in notes[1]


def another_index(final):
    """A sound one, of images that are a byte longer."""
    return encode_index([Record(r.rank, r.nbytes + 1, r.layout, r.leaves) for r in records_of(final)])


@pytest.mark.parametrize("harm", ["flipped", "gone", "short", "another's"])
def test_an_index_that_is_damaged_is_refused_by_name_and_all_votes_say_the_same(tmp_path, harm, caplog):
    final = Path(write(tmp_path / "s", 4, rows(4)))
    (path,) = final.glob("ckptd.*.index")
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    harmed = {"flipped": raw, "short": raw[:-1], "another's": another_index(final)}
    path.unlink()
    if harm != "gone":
        path.write_bytes(harmed[harm])
    load(str(final), 1, 2, rows(2, empty=True))
    (said,) = [record.getMessage() for record in caplog.records if "index" in record.getMessage()]
    assert str(path) in said
    assert "all votes are read instead" in said
    report = verify_path(str(final))
    assert [problem.path for problem in report.problems] == [str(path)]


def test_verify_reports_an_index_that_says_something_else_than_the_records(tmp_path):
    """Its digest is right: whoever wrote it also wrote the manifest."""
    final = Path(write(tmp_path / "s", 4, rows(4)))
    forge.put_index(final, another_index(final))
    found = {problem.path: problem.what for problem in verify_path(str(final)).problems}
    assert found[str(*final.glob("ckptd.*.index"))] == "says something else than the records"


@pytest.mark.usefixtures("no_others")
def test_boxes_that_no_mesh_gives_are_sought_on_the_ranks_that_have_any_of_the_tensor(
    tmp_path, monkeypatch, votes_read
):
    monkeypatch.setattr(plan, "placements_of", lambda *_: ([], {}))

    final = write(tmp_path / "s", 8, many_and_few)
    load(final, 1, 4, rows(4, empty=True), strict=False)
    votes_read.clear()
    load(final, 5, 6, lambda _: ({"few": torch.zeros(3, 2)}, {"few": values("few", (3, 2))}), strict=False)
    assert sorted(votes_read) == ["n0000", "n0001", "n0002", "n0005"]


@pytest.mark.usefixtures("no_others")
def test_of_replicas_that_divided_what_they_save_those_are_read_that_have_rows_of_it(tmp_path, votes_read):
    def saved(_rank):
        return {
            f"w{number}": spread(f"w{number}", (8, 2), list(range(8)), (8,), (REPLICATED,))[0] for number in range(8)
        }

    final = write(tmp_path / "s", 8, saved, replicated=())
    votes_read.clear()
    load(final, 1, 2, lambda _: ({"w6": torch.zeros(8, 2)}, {"w6": values("w6", (8, 2))}), strict=False)
    assert sorted(votes_read) == ["n0001", "n0006"]


@pytest.mark.parametrize("world", [1, 3])
def test_the_index_is_written_where_there_are_several_votes(tmp_path, world):
    final = Path(write(tmp_path / "s", world, rows(world)))
    assert len(list(final.glob("ckptd.*.index"))) == (world > 1)
    assert not verify_path(str(final)).problems


@pytest.mark.usefixtures("no_others")
def test_rows_that_replicas_divided_are_read_of_each_of_them(tmp_path):
    def saved(_rank):
        return {"w": spread("w", (8, 2), list(range(4)), (4,), (REPLICATED,))[0]}

    final = write(tmp_path / "s", 4, saved, replicated=())
    load(final, 1, 2, lambda _: ({"w": torch.zeros(8, 2)}, {"w": values("w", (8, 2))}))


def test_a_name_that_two_parts_of_a_job_hold_is_sought_in_all_records(tmp_path):
    """One layout names the ranks of its own part alone: the tensor of the other part would not be looked at."""

    def saved(rank):
        tensor, _ = spread("w", (8, 3), [0, 1] if rank < 2 else [2, 3], (2,), [0])
        tensor.to_local().add_(rank // 2 * 0.5)
        return {"w": tensor}

    def blank(_rank):
        return {"w": spread("w", (8, 3), [0, 1], (2,), [0], empty=True)[0]}, {}

    final = write(tmp_path / "store", 4, saved, replicated=())
    with pytest.raises(MismatchError, match="is one tensor on ranks 0 to 1, and another on ranks 2 to 3"):
        load(final, 0, 2, blank)
