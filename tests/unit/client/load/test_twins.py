"""Tensors of one name that parts of a job saved, each part its own in slices: never mixed, nor taken for each other."""

import functools

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckptd.checkpoint.export.plan import whole_tensors
from ckptd.shared.format.packed_layout import decode_layout
from ckptd.shared.format.rank_members import members_of
from ckptd_client import MismatchError
from ckptd_client._image import plan
from ckptd_client._load import twins
from ckptd_client._load.rounds import read_checkpoint
from ckptd_client._local.rank import Group
from ckptd_client._state.naming import Named
from ckptd_client._state.replicas import Replicas
from ckptd_client.dcp import CkptdReader
from tests import checkpoints

STAGES = (0, 1), (2, 3, 4)  # of as many ranks as it happens, so they cut the same tensors otherwise
SHARED = {"w", "bias", "tied"}
ROWS = 40


def stage_of(rank):
    return int(rank >= 2)


def state_of(rank, *, apart=True):
    """``tied`` is ``bias``, of which not each rank of a stage saves something."""
    add = 1000.0 * stage_of(rank) * apart
    w = torch.arange(3.0 * ROWS).view(ROWS, 3) + add
    bias = torch.arange(7.0) + add
    return {"w": w, "bias": bias, "tied": bias, "own": torch.tensor([float(rank)])}


def of_stages(flat, _patterns, group, _is_own):
    ranks = STAGES[stage_of(group.rank)]
    found = [i for i, name in enumerate(flat.names) if name in SHARED]
    return Replicas(dict.fromkeys(found, ranks), dict.fromkeys(found, members_of(ranks)), ())


@pytest.fixture(name="stored")
def fixture_stored(tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "replicas_of", of_stages)
    monkeypatch.setattr(checkpoints, "make_plan", functools.partial(plan.make_plan, replicated=()))

    def write(**options):
        states = [state_of(rank, **options) for rank in range(5)]
        return str(checkpoints.write_checkpoint(tmp_path / f"{options}", states))

    return write


def blank():
    return {name: torch.full_like(value, -1) for name, value in state_of(0).items()}


def load(directory, rank, world_size, named=None):
    """What a rank gets, and the notes."""
    state = blank()
    group = Group(rank, world_size, "")
    fitted, _, notes = read_checkpoint(directory, state, group=group, named=named or Named())
    return state, [*notes, *fitted.finish(state)]


@pytest.mark.parametrize("rank", range(5))
def test_each_rank_gets_the_tensors_of_its_stage(stored, rank):
    state, _ = load(stored(), rank, 5)
    for name, value in state_of(rank).items():
        assert torch.equal(state[name], value), name


def test_ranks_of_another_number_are_not_given_one_of_several(stored):
    with pytest.raises(MismatchError) as caught:
        load(stored(), 0, 3)
    assert "state['bias'] is one tensor on ranks 0 to 1, and another on ranks 2 to 4" in str(caught.value)
    assert "load on as many ranks" in caught.value.hint


def test_tensors_that_are_the_same_everywhere_are_one(stored):
    state, notes = load(stored(apart=False), 2, 3)
    assert all(torch.equal(state[name], state_of(0)[name]) for name in SHARED)
    assert not [note for note in notes if "state['w']" in note]


def test_what_is_too_large_to_compare_is_named_but_not_what_is_declared(stored, monkeypatch):
    monkeypatch.setattr(twins, "MAX_NBYTES", 200)
    directory = stored()
    with pytest.raises(MismatchError, match="bias"):
        load(directory, 0, 3)
    state, notes = load(directory, 2, 3, Named(replicated=("bias", "tied")))
    assert all(torch.equal(state[name], state_of(0)[name]) for name in SHARED), "the lowest ranks', as a whole"
    (note,) = [note for note in notes if "state['w']" in note]
    assert note.startswith("state['w']: the tensor of ranks 0 to 1 was taken, on every rank"), note
    _, notes = load(directory, 2, 3, Named(replicated=("bias", "w", "tied")))
    assert not [note for note in notes if "state['w']" in note]


def test_an_image_that_cannot_be_read_is_no_damage_for_a_note(stored, monkeypatch):
    monkeypatch.setattr(twins, "_digest", lambda _runs, _images: b"")
    _, notes = load(stored(), 0, 3)
    assert [note for note in notes if "not compared" in note]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_readers_that_know_of_no_stage_get_one_tensor_of_each_name(stored):
    directory = stored()
    for options in ({"checkpoint_id": directory}, {"storage_reader": CkptdReader(directory)}):
        state = {name: value for name, value in blank().items() if name in SHARED}
        dcp.load(state, **options)
        for name, value in state.items():
            assert torch.equal(value, state_of(0)[name]), (options, name)


def layouts():
    made = [plan.make_plan(state_of(rank), rank=rank, world_size=5, replicated=()) for rank in range(5)]
    return [decode_layout(one.layout, where="here") for one in made]


@pytest.mark.usefixtures("stored")
def test_an_export_has_the_tensor_of_the_lowest_ranks():
    found = whole_tensors(layouts(), SHARED)
    assert {box.file for tensor in found.values() for box in tensor.boxes} <= {0, 1}
    assert set(found) == SHARED


@pytest.mark.usefixtures("stored")
def test_a_layout_names_the_holders_of_what_the_rank_saves_nothing_of_too():
    for layout in layouts():
        members = members_of(STAGES[stage_of(layout.rank)])
        assert layout.holders == {"w": members, "bias": members}
    assert "bias" not in {entry.name for entry in layouts()[2].tensors}


@pytest.mark.usefixtures("stored")
def test_a_tied_name_is_its_stages_also_on_a_rank_that_saves_nothing_of_it():
    found = layouts()
    last = next(layout for layout in found if layout.rank in STAGES[1] and not layout.aliases)
    held = twins.held_apart(found, last.rank)
    assert held["tied"].mine == members_of(STAGES[1])
