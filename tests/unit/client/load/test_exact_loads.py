"""What an object says after a load is what was saved: dtype, shape and bits, or an error that names the key.

FAULTS=long takes every optimizer with every model in both dtypes, into fresh optimizers and into ones that ran.
"""

import itertools
import os
from collections import defaultdict

import pytest
import torch
from torch import nn

from ckptd_client import MismatchError
from tests.unit.client.optimizers import FAMILIES, OPTIMIZERS, trained
from tests.unit.client.same import bits, difference

LONG = os.environ.get("FAULTS") == "long"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ALL = list(itertools.product(OPTIMIZERS, FAMILIES, DTYPES, (0, 2)))
SOME = [
    (kind, [*FAMILIES][number % len(FAMILIES)], [*DTYPES][number % 2], 2 * (number // 2 % 2))
    for number, kind in enumerate(OPTIMIZERS)
]


@pytest.fixture(autouse=True)
def one_thread():
    """Small tensors on busy cores are slower with two."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(("kind", "family", "dtype", "steps"), ALL if LONG else SOME)
def test_an_optimizers_state_comes_back_to_the_bit(kind, family, dtype, steps, join):
    saved = trained(family, kind, DTYPES[dtype], seed=1, steps=3)
    client = join()
    client.save(saved, 1).wait("staged", 60)
    target = trained(family, kind, DTYPES[dtype], seed=2, steps=steps)
    client.load(target)
    assert not difference(target, saved)


def test_an_optimizer_goes_on_alike_after_a_load(join):
    saved = trained("tied", "wide-moments", torch.bfloat16, seed=1, steps=3)
    client = join()
    client.save(saved, 1).wait("staged", 60)
    target = trained("tied", "wide-moments", torch.bfloat16, seed=2, steps=0)
    client.load(target)
    for state in (saved, target):
        state["optimizer"].zero_grad()
        state["model"](torch.arange(5)[None]).float().sum().backward()
        state["optimizer"].step()
    assert not difference(target, saved)


# --- what other objects make of what they are given


class Wrapper:
    """An optimizer inside an object, as trainers have them."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def state_dict(self):
        return {"inner": self.optimizer.state_dict(), "calls": 3}

    def load_state_dict(self, state):
        self.optimizer.load_state_dict(state["inner"])


class Copying(Wrapper):
    """It shows copies, so that nothing can be put back."""

    def state_dict(self):
        kept = self.optimizer.state_dict()
        state = {number: {key: _copy(value) for key, value in one.items()} for number, one in kept["state"].items()}
        return {"inner": kept | {"state": state}}


def _copy(value):
    return value.clone() if torch.is_tensor(value) else value


@pytest.mark.parametrize("steps", [0, 2])
def test_an_optimizer_in_a_wrapper_comes_back_to_the_bit(steps, join):
    saved = Wrapper(trained("tied", "wide-moments", torch.bfloat16, seed=1, steps=3)["optimizer"])
    client = join()
    client.save({"o": saved}, 1).wait("staged", 60)
    target = Wrapper(trained("tied", "wide-moments", torch.bfloat16, seed=2, steps=steps)["optimizer"])
    client.load({"o": target})
    assert not difference(target, saved)


def test_what_cannot_be_put_back_is_an_error_that_names_the_key(join):
    client = join()
    client.save({"o": Copying(trained("tied", "wide-moments", torch.bfloat16, seed=1, steps=3)["optimizer"])}, 1)
    target = {"o": Copying(trained("tied", "wide-moments", torch.bfloat16, seed=2, steps=0)["optimizer"])}
    key = r"\['inner'\]\['state'\]\[0\]\['exp_avg'\]: BF16 \[11, 8\], F32 \[11, 8\] was saved"
    with pytest.raises(MismatchError, match=rf"Copying.load_state_dict changed what was saved:\n  state\['o'\]{key}"):
        client.load(target)


class Keeper:
    """Keeps what `change` makes of what it is given."""

    def __init__(self, content, change=lambda state: state):
        self.content, self.change = content, change

    def state_dict(self):
        return self.content

    def load_state_dict(self, state):
        self.content = self.change(state)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda state: {"w": state["w"].half(), "n": 1}, r"F16 \[2, 2\], F32 \[2, 2\] was saved"),
        (lambda state: {"w": state["w"].flatten(), "n": 1}, r"F32 \[4\], F32 \[2, 2\] was saved"),
        (lambda state: {"w": state["w"] + 1, "n": 1}, "other values than were saved"),
        (lambda state: {"w": state["w"].mul_(2), "n": 1}, "other values than were saved"),
        (lambda state: {"w": state["w"].tolist(), "n": 1}, "list, a tensor was saved"),
        (lambda state: {"w": state["w"].to("meta"), "n": 1}, "meta device"),
        (lambda state: {"n": 1}, "saved, and not there"),
        (lambda state: {"w": {"deep": state["w"]}, "n": 1}, "saved, and not there"),
        (lambda state: {3.0: state["w"]}, "3.0"),
        (lambda state: {"w": state["w"].clone(), "n": 2}, None),
        (lambda state: {"w": nn.Parameter(state["w"]), "n": 1}, None),
    ],
)
def test_what_an_object_makes_of_a_tensor_is_reported(change, fault, join):
    client = join()
    client.save({"k": Keeper({"w": torch.ones(2, 2), "n": 1})}, 1).wait("staged", 60)
    target = {"k": Keeper({"w": torch.zeros(2, 2), "n": 0}, change)}
    if fault is None:
        assert client.load(target).notes == []
        assert bits(target["k"].content["w"]) == bits(torch.ones(2, 2))
        return
    with pytest.raises(MismatchError, match=rf"state\['k'\](?s:.*){fault}"):
        client.load(target)


class Halving(torch.optim.AdamW):
    """Its load_state_dict changes what it is given, in place."""

    def load_state_dict(self, state_dict):
        for one in state_dict["state"].values():
            one["exp_avg"].mul_(0.5)
        super().load_state_dict(state_dict)


def test_an_optimizer_that_changes_its_state_in_place_is_reported(join):
    client, saved = join(), nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(saved.parameters())
    saved(torch.ones(3)).sum().backward()
    optimizer.step()
    client.save({"o": optimizer}, 1).wait("staged", 60)
    with pytest.raises(MismatchError, match=r"\['exp_avg'\]: other values than were saved"):
        client.load({"o": Halving(nn.Linear(3, 3).parameters())})


@pytest.mark.parametrize("value", [None, 100, 0.25, "text", [1, 2]], ids=repr)
def test_a_plain_value_that_was_saved_takes_the_place_of_a_tensor(value, join, node):
    """As of an early stop that has found its first best value since."""
    client = join()
    client.save({"k": Keeper({"best": value, "w": torch.ones(2)})}, 1).wait("durable", 60)
    latest = os.path.join(node.store, client.job, "latest")
    for load in (client.load, lambda state: client.load_from(latest, state)):
        target = {"k": Keeper({"best": torch.tensor([7.0]), "w": torch.zeros(2)})}
        assert load(target).notes == []
        assert target["k"].content["best"] == value
        assert type(target["k"].content["best"]) is type(value)


def test_a_tensor_that_nothing_was_saved_of_is_noted(join):
    client = join()
    client.save({"k": Keeper({"w": torch.ones(2)})}, 1).wait("staged", 60)
    target = {"k": Keeper({"w": torch.zeros(2)}, lambda state: state | {"bias": torch.zeros(1)})}
    assert client.load(target).notes == ["Keeper.load_state_dict was given nothing for state['k']: bias"]


def test_load_from_takes_an_object_that_leaves_something_out_and_says_so(join, node):
    client = join()
    client.save({"k": Keeper({"w": torch.ones(2), "head": torch.ones(3)})}, 1).wait("durable", 60)
    target = {"k": Keeper({"w": torch.zeros(2)}, lambda state: {"w": state["w"]})}
    found = client.load_from(os.path.join(node.store, client.job, "latest"), target)
    assert found.notes == ["Keeper.load_state_dict left out state['k']['head']"]
    with pytest.raises(MismatchError, match=r"state\['k'\]\['head'\]: saved, and not there"):
        client.load(target)


def test_a_rate_that_load_state_dict_resets_is_noted(join):
    class Reset(torch.optim.SGD):
        def load_state_dict(self, state):
            super().load_state_dict(state)
            self.param_groups[0]["lr"] = 0.5

    client = join()
    client.save({"o": torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)}, 1).wait("staged", 60)
    notes = client.load({"o": Reset([nn.Parameter(torch.ones(1))], lr=0.2)}).notes
    assert notes == ["Reset.load_state_dict set otherwise than saved state['o']['param_groups'][0]['lr']"]


@pytest.mark.parametrize("make", [nn.ReLU, lambda: Keeper(3), lambda: Keeper([]), lambda: Keeper(torch.ones(2))])
def test_an_object_whose_state_is_empty_or_one_value(make, join):
    client = join()
    client.save({"k": make(), "w": torch.ones(2)}, 1).wait("staged", 60)
    target = {"k": make(), "w": torch.zeros(2)}
    client.load(target)
    assert not difference(target, {"k": make(), "w": torch.ones(2)})


def test_a_defaultdict_in_an_optimizers_state_comes_back_as_a_dict_of_the_same(join):
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    weight.grad = torch.ones(4)
    optimizer.step()
    optimizer.state[weight]["seen"] = defaultdict(list, {"a": [1, 2], "b": [3]})
    with join() as client:
        client.save({"weight": weight.detach(), "optimizer": optimizer}).wait("staged", 60)
        optimizer.state[weight]["seen"]["a"] = [0]
        restored = client.load({"weight": weight.detach(), "optimizer": optimizer})
    assert restored.notes == []
    assert optimizer.state[weight]["seen"] == {"a": [1, 2], "b": [3]}
