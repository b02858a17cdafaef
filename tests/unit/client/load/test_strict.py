"""load(strict=False): what state and checkpoint both have is exact as ever; what only one has is named in notes."""

import logging
import os

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import ckptd_client
from ckptd_client import MismatchError
from ckptd_client._load.rounds import read_checkpoint
from ckptd_client._local.rank import Group
from tests.checkpoints import write_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
STRICT = r"add strict=False"


def made(*more):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1), *more)


def trained(model):
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return optimizer


class Holder:
    """A Stateful of a user's, around a module."""

    def __init__(self, module):
        self.module = module

    def state_dict(self):
        return {"inner": self.module.state_dict(), "seen": 1}

    def load_state_dict(self, state):
        self.module.load_state_dict(state["inner"])
        self.seen = state["seen"]


@pytest.fixture(name="routes")
def fixture_routes(join, tmp_path):
    """Saves a state, and gives every way to load it: from memory, ckptd's directory, alone and together, of DCP."""

    def make(state):
        client = join()
        client.save(state, 1).wait("durable", 60)
        latest = os.path.join(client._link.job.store, client.job, "latest")
        ways = {
            "load": client.load,
            "load_from": lambda state, **how: client.load_from(latest, state, **how),
            "together": lambda state, **how: client.load_from(latest, state, together=True, **how),
        }
        dcp.save(state, checkpoint_id=tmp_path / "dcp")
        ways["dcp"] = lambda state, **how: client.load_from(tmp_path / "dcp", state, **how)
        return ways

    return make


def of(notes, what):
    """The one note that says so."""
    (found,) = [note for note in notes if what in note]
    return found


def test_a_key_more_in_the_state_is_kept_and_named(routes):
    for name, load in routes({"w": torch.ones(2), "a": 1}).items():
        state = {"w": torch.zeros(2), "a": 0, "v": torch.full((3,), 7.0), "b": 8}
        with pytest.raises(MismatchError, match=STRICT) as caught:
            load(state)
        assert "state['v']: a tensor in the state, none in the checkpoint" in str(caught.value), name
        notes = load(state, strict=False).notes
        assert (state["w"].tolist(), state["a"], state["v"].tolist(), state["b"]) == ([1, 1], 1, [7, 7, 7], 8), name
        assert "state['v'], state['b']" in of(notes, "not in the checkpoint, and kept as it was"), name


def test_a_key_more_in_the_checkpoint_is_left_out_and_named(routes):
    for name, load in routes({"w": torch.ones(2), "a": 1, "deep": {"v": torch.ones(3), "b": 2}}).items():
        state = {"w": torch.zeros(2)}
        if name == "load":
            with pytest.raises(MismatchError, match=STRICT):
                load(state)
        notes = load(state, strict=False).notes
        assert (state["w"].tolist(), list(state)) == ([1, 1], ["w"]), name
        left = of(notes, "not in the state, and left out")
        assert all(f"state['{key}']" in left for key in ("a", "deep")), name


@pytest.mark.parametrize("more", [0, 1], ids=["fewer", "more"])
@pytest.mark.parametrize("wrap", [lambda m: m, Holder], ids=["module", "stateful"])
def test_a_module_with_a_layer_more_or_fewer(routes, more, wrap):
    saved, head = made(), [nn.Linear(1, 1)]
    for name, load in routes({"model": wrap(saved if more else made(*head))}).items():
        other = made(*head) if more else made()
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.fill_(5.0)
        with pytest.raises(MismatchError, match=STRICT):
            load({"model": wrap(other)})
        notes = load({"model": wrap(other)}, strict=False).notes
        for key, value in made().state_dict().items():
            assert torch.equal(other.state_dict()[key], value), (name, key)
        assert "2.weight" in " ".join(notes), (name, notes)
        if more:
            assert other[2].weight.item() == 5.0


def test_an_object_of_which_nothing_was_saved_is_kept_and_named(routes):
    for name, load in routes({"model": made()}).items():
        optimizer = trained(made())
        before = optimizer.state_dict()["state"][0]["exp_avg"].clone()
        with pytest.raises(MismatchError, match=r"AdamW in the state, nothing in the checkpoint") as caught:
            load({"model": made(), "optim": optimizer})
        hint = str(caught.value).partition("hint: ")[2]
        assert "strict=False" in hint, name
        assert "leave state['optim'] out" in hint, name
        notes = load({"model": made(), "optim": optimizer}, strict=False).notes
        assert "state['optim']" in of(notes, "kept as it was"), name
        assert torch.equal(optimizer.state_dict()["state"][0]["exp_avg"], before), name


def test_a_fresh_optimizer_gets_all_of_its_state_strict_or_not(routes):
    model = made()
    optimizer = trained(model)
    for name, load in routes({"model": model, "optim": optimizer}).items():
        for strict in (True, False):
            fresh = torch.optim.AdamW(made().parameters())
            notes = load({"model": made(), "optim": fresh}, strict=strict).notes
            assert fresh.state_dict()["state"].keys() == {0, 1, 2, 3}, (name, strict)
            saved = optimizer.state_dict()["state"][0]["exp_avg"]
            assert torch.equal(fresh.state_dict()["state"][0]["exp_avg"], saved), (name, strict)
            assert notes == [], (name, strict)


@pytest.mark.parametrize("fresh", ["state", "checkpoint"])
def test_the_hint_for_the_dict_of_a_fresh_optimizer_is_to_pass_the_optimizer(routes, fresh):
    """It has none of the state's places; no saved name is one that was meant."""
    model = made()
    one, two = trained(model), torch.optim.AdamW(model.parameters())
    saved, other = (one, two) if fresh == "state" else (two, one)
    for name, load in routes({"optim": saved.state_dict()}).items():
        with pytest.raises(MismatchError) as caught:
            load({"optim": other.state_dict()})
        hint = str(caught.value).partition("hint: ")[2]
        assert "pass the optimizer itself, not its state_dict()" in hint, name
        assert "did you mean" not in hint, name


def test_the_dict_of_an_optimizer_that_was_not_saved_is_not_to_be_passed_otherwise(routes):
    for name, load in routes({"model": made()}).items():
        with pytest.raises(MismatchError, match=STRICT) as caught:
            load({"model": made(), "optim": trained(made()).state_dict()})
        assert "pass the optimizer" not in str(caught.value), name


def test_an_optimizer_of_other_parameters_is_refused_also_then(routes):
    """Its state is matched by position: it would get another parameter's."""
    for name, load in routes({"optim": trained(made())}).items():
        for strict in (True, False):
            with pytest.raises(MismatchError, match="by position") as caught:
                load({"optim": torch.optim.AdamW(nn.Linear(4, 3).parameters())}, strict=strict)
            assert "leave state['optim'] out" in str(caught.value), name


@pytest.mark.parametrize(
    "other",
    [{"w": torch.zeros(3)}, {"w": torch.zeros(2, dtype=torch.float64)}, {"w": 1}, {"m": nn.Linear(2, 1)}],
    ids=["shape", "dtype", "kind", "layer"],
)
def test_what_both_have_is_compared_as_before(routes, other):
    for load in routes({"w": torch.ones(2), "m": nn.Linear(1, 1)}).values():
        state = {"w": torch.zeros(2), "m": nn.Linear(1, 1)} | other
        with pytest.raises(MismatchError) as caught:
            load(dict(state), strict=False)
        assert "strict=False" not in str(caught.value), "it does not help"


def test_an_object_that_changes_what_it_is_given_is_refused_also_then(join):
    class Scales(nn.Linear):
        def load_state_dict(self, state_dict, strict=True):
            super().load_state_dict({key: 2 * value for key, value in state_dict.items()}, strict=strict)

    client = join()
    client.save({"m": Scales(2, 1)}, 1)
    with pytest.raises(MismatchError, match="other values than were saved"):
        client.load({"m": Scales(2, 1)}, strict=False)


def test_a_module_whose_load_state_dict_knows_no_strict(join):
    class Plain(nn.Linear):
        def load_state_dict(self, state_dict):
            super().load_state_dict(state_dict)

    client = join()
    client.save({"m": Plain(2, 1, bias=False)}, 1)
    with torch.no_grad():
        (wider := Plain(2, 1)).bias.fill_(5.0)
    notes = client.load({"m": wider}, strict=False).notes
    assert wider.bias.item() == 5.0
    assert "bias" in " ".join(notes)


def test_notes_are_logged_and_short(join, caplog):
    client = join()
    client.save({"w": torch.ones(2)}, 1)
    with caplog.at_level(logging.WARNING, "ckptd_client"):
        notes = client.load({"w": torch.zeros(2)} | {f"k{i}": i for i in range(1000)}, strict=False).notes
    assert "and 997 more" in of(notes, "kept as it was")
    assert len(of(notes, "kept as it was")) < 200
    assert any("and 997 more" in record.getMessage() for record in caplog.records)


def test_a_state_that_shares_nothing_with_the_checkpoint_is_refused(routes):
    """Nothing was restored: a training that begins anew without a word is what strict is there to prevent."""
    for load in routes({"model": made()}).values():
        with pytest.raises(MismatchError, match="have no key in common"):
            load({"modle": made()}, strict=False)


def test_strict_is_true_or_false(join):
    client = join()
    client.save({"w": torch.ones(2)}, 1)
    for call in (lambda: client.load({}, strict=1), lambda: client.load_from("/", {}, strict="no")):
        with pytest.raises(ckptd_client.UsageError, match="strict must be True or False"):
            call()


def shard(rank):
    return {"w": torch.arange(12.0), "epoch": 3, "only": torch.full((2,), float(rank)), "old": 1}


@pytest.mark.parametrize(("saved", "world"), [(2, 2), (4, 2), (2, 4)])
def test_in_a_job_of_another_size_and_of_the_same(tmp_path, saved, world):
    found = write_checkpoint(tmp_path / "store", [shard(rank) for rank in range(saved)])
    for rank in range(world):
        state = {"w": torch.zeros(12), "epoch": 0, "only": torch.zeros(2), "new": torch.ones(1), "also": 5}
        with pytest.raises(MismatchError, match=STRICT):
            read_checkpoint(str(found), state, group=Group(rank, world, ""))
        fitted, _, _ = read_checkpoint(str(found), state, group=Group(rank, world, ""), strict=False)
        notes = fitted.finish(state)
        assert (state["w"].tolist(), state["epoch"]) == (list(map(float, range(12))), 3)
        assert (state["new"].tolist(), state["also"], "old" in state) == ([1], 5, False)
        assert "state['new'], state['also']" in of(notes, "kept as it was")
        assert "state['old']" in of(notes, "left out")


class Part(nn.Module):
    """One parameter, of this name."""

    def __init__(self, name, value):
        super().__init__()
        self.register_parameter(name, nn.Parameter(torch.full((2,), value)))


@pytest.mark.parametrize("make", [lambda name, value: {name: torch.full((2,), value)}, Part], ids=["dict", "module"])
def test_what_another_rank_saved_is_not_taken_for_missing(tmp_path, make):
    """Ranks that swapped their parts: the tensor is in the other one's image, of the same number of ranks."""
    found = write_checkpoint(tmp_path / "store", [{"m": make("a", 1.0)}, {"m": make("b", 2.0)}])
    state = {"m": make("b", 0.0)}
    fitted, _, _ = read_checkpoint(str(found), state, group=Group(0, 2, ""), strict=False)
    fitted.finish(state)
    loaded = state["m"].b if isinstance(state["m"], Part) else state["m"]["b"]
    assert loaded.tolist() == [2, 2]
