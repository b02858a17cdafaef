"""What each rank has for itself, when a job goes on with another number of ranks: nothing is swapped in silence."""

import errno
import logging
import random

import numpy as np
import pytest
import torch

from ckptd.shared.stores.directory import DirectoryFiles
from ckptd_client import ConfigError, MismatchError
from ckptd_client._daemon.settings import as_named
from ckptd_client._image.plan import make_plan
from ckptd_client._load import alike as _alike
from ckptd_client._load.rounds import read_checkpoint
from ckptd_client._local.rank import Group
from ckptd_client._state.naming import Named, ranks_of
from tests.checkpoints import write_checkpoint


def state_of(rank, *, own=None):
    """A model and counters that are alike, a generator's state of this rank alone."""
    own = rank if own is None else own
    return {
        "w": torch.arange(12.0).reshape(3, 4),
        "steps": {0: torch.tensor(7.0)},
        "rng": torch.full((16,), own, dtype=torch.uint8),
        "python": random.Random(own).getstate(),
        "epoch": 3,
    }


@pytest.fixture
def stored(tmp_path):
    def write(ranks, make=state_of):
        return write_checkpoint(tmp_path / f"of{ranks}", [make(rank) for rank in range(ranks)])

    return write


def load(directory, rank, world_size, named=None, state=None):
    """The state of a rank after a load, and all notes."""
    state = state_of(rank, own=100 + rank) if state is None else state
    group = Group(rank, world_size, "")
    fitted, _, notes = read_checkpoint(str(directory), state, group=group, named=named or Named())
    told = fitted.finish(state)
    return state, [*notes, *told], fitted.own_notes


def test_fewer_ranks_say_whose_values_are_dropped(stored):
    found = stored(4)
    for rank in range(2):
        state, notes, own = load(found, rank, 2)
        assert state["rng"].tolist() == [rank] * 16
        assert state["python"] == random.Random(rank).getstate()
        text = "ranks 0 to 3 saved state['python'], state['rng'], each a value of its own; those of ranks 2 to 3 are"
        assert [note.partition("; to have")[0] for note in notes] == [f"{text} dropped"]
        assert notes[0].endswith("to have each rank only ever get its own: connect(per_rank=['python'])")
        assert own == []


def test_more_ranks_say_whose_values_they_take(stored):
    found = stored(2)
    state, notes, _ = load(found, 3, 4)
    assert state["rng"].tolist() == [0] * 16
    text = "state['python'], state['rng'], each a value of its own; ranks without one take that of rank 0; to have"
    assert [text in note for note in notes] == [True]


KINDS = {
    "counter": torch.tensor,
    "float": lambda rank: torch.full((3, 5), 0.1 * rank),
    "flag": lambda rank: torch.tensor([True, rank == 3]),
    "bf16": lambda rank: torch.ones(9, dtype=torch.bfloat16) * (1 + rank // 2),
    "complex": lambda rank: torch.full((2,), 1j * rank, dtype=torch.complex128),
    "sign of zero": lambda rank: torch.zeros(4) * (-1.0 if rank else 1.0),
    "one byte of a MiB": lambda rank: torch.zeros(1 << 20, dtype=torch.int8).index_fill_(0, torch.tensor(77_777), rank),
}


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_of_any_kind_that_differs_is_named_and_one_that_does_not_is_not(kind, moved, stored):
    """moved: what some ranks have in front of it puts it to other places in their images."""

    def of(rank, value):
        front = {"front": torch.zeros(100 + rank, dtype=torch.uint8)} if moved and rank % 2 else {}
        return front | {"w": torch.arange(12.0), "x": {"y": KINDS[kind](value)}}

    found = stored(4, lambda rank: of(rank, rank))
    for world_size in (2, 6):
        state, notes, _ = load(found, 0, world_size, state=of(0, 0))
        assert torch.equal(state["x"]["y"], KINDS[kind](0))
        assert [note.partition(", each")[0] for note in notes] == ["ranks 0 to 3 saved state['x']['y']"]
        assert notes[0].endswith("to have each rank only ever get its own: connect(per_rank=['x.y'])")
        _, notes, _ = load(found, 0, world_size, Named(per_rank=("x",)), state=of(0, 0))
        assert not any("each a value" in note for note in notes)
    alike = stored(3, lambda rank: of(rank, 2))
    for world_size in (2, 6):
        assert load(alike, 0, world_size, state=of(0, 0))[1] == []


def test_what_is_tied_is_compared_too(stored):
    def of(rank):
        one, other = torch.full((5,), float(rank)), torch.ones(5)
        return {"a": one, "b": one, "c": other, "d": other}

    _, notes, _ = load(stored(3, of), 0, 2, state=of(0))
    assert [note.partition(", each")[0] for note in notes] == ["ranks 0 to 2 saved state['a'], state['b']"]


def test_what_is_too_large_to_compare_is_said_to_be_so_but_not_what_is_declared(stored, monkeypatch):
    monkeypatch.setattr(_alike, "MAX_NBYTES", 1 << 20)
    found = stored(3, lambda rank: {"w": torch.zeros(1 << 20), "n": torch.tensor(5), "rank": torch.tensor(rank)})
    target = {"w": torch.ones(1 << 20), "n": torch.tensor(0), "rank": torch.tensor(0)}
    _, notes, _ = load(found, 1, 2, state=target)
    assert [note.partition("; those of")[0] for note in notes] == [
        "ranks 0 to 2 saved state['rank'], each a value of its own",
        "ranks 0 to 2 saved state['w'], perhaps each a value of its own: they were not compared",
    ]
    assert notes[1].endswith("; what all ranks hold alike connect(replicated=[...]) names")
    assert "connect(per_rank=['w'])" in notes[1]
    _, notes, _ = load(found, 1, 2, Named(replicated=("w",)), state=target)
    assert len(notes) == 1


def test_the_same_number_of_ranks_and_values_that_are_alike_need_no_note(stored):
    assert load(stored(4), 3, 4)[1:] == ([], [])
    alike = stored(3, lambda rank: state_of(0) | {"rng": torch.zeros(16)})
    for rank, world_size in [(0, 2), (3, 4), (0, 1)]:
        assert load(alike, rank, world_size, state=state_of(0) | {"rng": torch.ones(16)})[1:] == ([], [])


OWN = Named(per_rank=("rng", "python"))


def test_a_rank_without_a_value_of_its_own_keeps_its_present_one_and_is_notified(stored):
    found = stored(2)
    for rank in range(4):
        state, notes, own = load(found, rank, 4, OWN)
        assert state["rng"].tolist() == [rank if rank < 2 else 100 + rank] * 16
        assert state["python"] == random.Random(rank if rank < 2 else 100 + rank).getstate()
        assert torch.equal(state["w"], state_of(0)["w"])
        assert notes == []
        text = f"the checkpoint has nothing that rank {rank} itself saved of state['rng'], state['python']: it keeps"
        assert [note.startswith(text) for note in own] == ([] if rank < 2 else [True])


def test_values_of_ranks_that_are_gone_are_dropped_and_named(stored):
    state, notes, own = load(stored(4), 1, 2, OWN)
    assert state["rng"].tolist() == [1] * 16
    assert notes == [
        "rng, python: each rank has its own; those of ranks 2 to 3 are dropped, for the job has 2 ranks now, and had 4"
    ]
    assert own == []


def test_a_shape_of_its_own_fits_no_other_rank(stored):
    def of(rank):
        return {"w": torch.zeros(2), "buffer": torch.full((rank + 1,), float(rank))}

    found = stored(2, of)
    with pytest.raises(MismatchError, match=r"state\['buffer'\]"):
        load(found, 2, 3, state=of(2))
    state, _, own = load(found, 2, 3, Named(per_rank=("buffer",)), state=of(2))
    assert state["buffer"].tolist() == [2.0] * 3
    assert "rank 2" in own[0]
    _, notes, _ = load(found, 0, 1, state=of(0))
    assert "ranks 0 to 1 saved state['buffer'], each a value of its own; those of rank 1 are dropped" in notes[0]


def test_a_value_that_only_others_have_is_not_taken_at_the_same_size_either(stored):
    found = stored(2, lambda rank: {"w": torch.zeros(2)} | ({"cache": torch.ones(2)} if rank == 0 else {}))
    target = {"w": torch.zeros(2), "cache": torch.full((2,), 5.0)}
    state, _, own = load(found, 1, 2, Named(per_rank=("cache",)), state=target)
    assert state["cache"].tolist() == [5.0, 5.0]
    assert "of state['cache']: it keeps its present value" in own[0]


class Loader:
    """A data loader: its state has other names as it goes."""

    def __init__(self, content):
        self.content, self.loads = content, 0

    def state_dict(self):
        return self.content

    def load_state_dict(self, state):
        self.content, self.loads = state, self.loads + 1


@pytest.mark.parametrize("pattern", ["loader", "loader.*", "lo*", "l*r"])
def test_an_object_that_each_rank_has_for_itself_is_left_alone(pattern, stored):
    found = stored(2, lambda rank: {"w": torch.zeros(1), "loader": Loader({"at": rank, "seen": torch.ones(2) * rank})})
    named = Named(per_rank=(pattern,))
    for fresh in ({}, {"at": 9, "seen": torch.full((2,), 9.0)}):
        state, _, own = load(found, 2, 3, named, {"w": torch.ones(1), "loader": Loader(fresh)})
        assert (state["loader"].content, state["loader"].loads) == (fresh, 0)
        assert "rank 2" in own[0]
        state, _, own = load(found, 1, 3, named, {"w": torch.ones(1), "loader": Loader(fresh)})
        assert state["loader"].content["at"] == 1
        assert own == []


def test_an_object_of_which_a_part_is_the_ranks_own_gets_its_present_values(stored):
    def of(rank):
        return {"trainer": Loader({"epoch": 3, "rng": torch.ones(2) * rank, "noise": {"seed": rank}})}

    state, _, own = load(stored(2, of), 2, 3, Named(per_rank=("trainer.rng", "trainer.noise")), of(2))
    content = state["trainer"].content
    assert (content["epoch"], content["rng"].tolist(), content["noise"]) == (3, [2.0, 2.0], {"seed": 2})
    assert len(own) == 1


def test_what_is_said_to_be_alike_is_not_compared(stored):
    _, notes, _ = load(stored(4), 0, 2, Named(replicated=("rng", "python")))
    assert notes == []


def test_no_load_fails_for_what_only_a_note_needs(stored, monkeypatch):
    """A byte of another rank's image flips; and it cannot be read at all."""
    found = stored(4)
    path = found / "r00003-p00.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    state, notes, _ = load(found, 0, 2)
    assert state["rng"].tolist() == [0] * 16
    assert "state['python'], state['rng'], each a value of its own" in notes[0]
    alike = stored(3, lambda rank: {"n": torch.ones(3), "own": torch.tensor(rank)})

    def refuse(files, name, *, cached=False):
        if cached and name == "r00001-p00.safetensors":
            raise PermissionError(errno.EACCES, "no", files.where(name))
        return open_file(files, name, cached=cached)

    open_file = DirectoryFiles.open
    monkeypatch.setattr(DirectoryFiles, "open", refuse)
    state, notes, _ = load(alike, 0, 2, state={"n": torch.zeros(3), "own": torch.tensor(9)})
    assert (state["n"].tolist(), int(state["own"])) == ([1.0] * 3, 0)
    assert [note.partition(": they were not compared")[0] for note in notes] == [
        notes[0],
        "ranks 0 to 2 saved state['n'], perhaps each a value of its own",
    ]
    assert "state['own'], each a value of its own; those of rank 2 are dropped" in notes[0]


def test_what_each_rank_has_for_itself_is_no_replica():
    state = {"w": torch.zeros(64, 8), "rng": torch.zeros(64, 8)}
    plan = make_plan(state, rank=0, world_size=2, replicated=("*",), is_own=Named(per_rank=("rng",)).is_own)
    assert [[plan.names[at] for at in stream.positions] for stream in plan.streams] == [["w"]]


def test_patterns():
    named = Named(per_rank=("rng", "a.*.b"))
    assert [named.is_own(n) for n in ("rng", "rng.torch", "rngs", "a.1.b", "a.b")] == [True, True, False, True, False]
    assert ranks_of([3]) == "rank 3"
    assert ranks_of([2, 1]) == "ranks 1 to 2"
    assert ranks_of([0, 2, 4, 6]) == "ranks 0, 2, 4, and 1 more"


@pytest.mark.parametrize(
    "given",
    [["loader", "cache", "rng"], ("rng", "cache", "loader", "rng"), {"rng": 1, "loader": 2, "cache": 3},
     [np.str_("rng"), "loader", "cache"]],
    ids=["another-order", "twice", "keys", "numpy"],
)  # fmt: skip
def test_equal_patterns_are_equal_however_a_rank_writes_them_down(given):
    """Ranks compare their text: the order of a set differs from process to process."""
    same, told = as_named(["rng", "loader", "cache"], ["a", "b"]), as_named(given, ["b", "a", "b"])
    assert (told, repr(told)) == (same, repr(same))


def test_patterns_that_are_none_and_patterns_of_nothing(join, caplog):
    with pytest.raises(ConfigError, match=r"per_rank='rng' \(from connect\) is not allowed"):
        join(per_rank="rng")
    caplog.set_level(logging.WARNING, "ckptd_client")
    join(per_rank=["rgn"]).save({"rng": torch.ones(1)}, 1)
    assert "per_rank=['rgn'] names nothing in the state; its keys are rng" in caplog.text
