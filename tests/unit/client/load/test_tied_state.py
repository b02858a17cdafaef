"""What was one tensor when it was saved is one tensor after a load, where an object takes over what it is given."""

import copy

import pytest
import torch
from torch import nn

from ckptd_client import MismatchError
from ckptd_client._load.rounds import read_checkpoint
from ckptd_client._local.rank import Group
from tests.checkpoints import write_checkpoint
from tests.unit.client.optimizers import Simple
from tests.unit.client.same import difference


class Sharing(Simple):
    """Some parameters move by one momentum, which all of them change."""

    def begin(self, parameter):
        if not hasattr(self, "common"):
            self.common, self.number = torch.zeros_like(parameter, dtype=torch.float32), torch.zeros(())
        return {"momentum": self.common, "number": self.number, "own": torch.zeros(2)}

    def change(self, parameter, grad, kept, lr):
        kept["number"].add_(1)
        kept["momentum"].mul_(0.5).add_(grad.float())
        parameter.sub_(lr * kept["momentum"])


class Cloning(Sharing):
    """Its load_state_dict copies each tensor for itself."""

    def load_state_dict(self, state):
        state = state | {"state": {i: {k: v.clone() for k, v in one.items()} for i, one in state["state"].items()}}
        super().load_state_dict(state)


class Wrapper:
    """An optimizer inside an object, as trainers have them."""

    def __init__(self, optimizer):
        self.optimizer, self.param_groups, self.state = optimizer, optimizer.param_groups, optimizer.state

    def state_dict(self):
        return {"inner": self.optimizer.state_dict()}

    def load_state_dict(self, state):
        self.optimizer.load_state_dict(state["inner"])
        self.state = self.optimizer.state

    def step(self):
        self.optimizer.step()


class Showing(Wrapper):
    """It shows copies, in which the same tensors are one."""

    def state_dict(self):
        return copy.deepcopy(super().state_dict())


MADE = {
    "plain": Sharing,
    "cloning": Cloning,
    "wrapped": lambda parameters: Wrapper(Cloning(parameters)),
    "showing": lambda parameters: Showing(Sharing(parameters)),
}


DTYPES = (torch.float32, torch.bfloat16)


def trained(kind, dtype, *, seed, steps):
    torch.manual_seed(seed)
    weights = nn.ParameterList([nn.Parameter(torch.randn(3, 4).to(dtype)) for _ in range(3)])
    state = {"weights": weights, "optimizer": MADE[kind](list(weights))}
    for _ in range(steps):
        step(state)
    return state


def step(state):
    for i, weight in enumerate(state["weights"]):
        weight.grad = torch.full_like(weight, i + 0.25)
    state["optimizer"].step()


def kept(state, key):
    """Where the optimizer keeps it, for each parameter."""
    return [state["optimizer"].state[weight][key].data_ptr() for weight in state["weights"]]


def untied(state):
    """The same, with a tensor for each parameter."""
    for one in state["optimizer"].state.values():
        one.update({key: value.clone() for key, value in one.items()})
    return state


# Into copies nothing can be put back that was cast: an error, of which test_exact_loads.py has the test.
KINDS = [(kind, dtype) for kind in MADE for dtype in DTYPES if (kind, dtype) != ("showing", torch.bfloat16)]


@pytest.mark.parametrize(("kind", "dtype"), KINDS)
@pytest.mark.parametrize("target", ["fresh", "ran", "untied"])
def test_what_parameters_share_in_an_optimizer_is_one_tensor_again(kind, target, dtype, join):
    saved = trained(kind, dtype, seed=1, steps=3)
    client = join()
    client.save(saved, 1).wait("staged", 60)
    other = trained(kind, dtype, seed=2, steps=0 if target == "fresh" else 2)
    client.load(untied(other) if target == "untied" else other)
    assert not difference(other, saved)
    assert [len({*kept(other, key)}) for key in ("momentum", "number", "own")] == [1, 1, 3]
    for state in (saved, other):
        step(state)
    assert not difference(other, saved), "it goes on as it did"


@pytest.mark.parametrize("world_size", [1, 3])
def test_on_another_number_of_ranks_too(world_size, tmp_path):
    states = [trained("plain", torch.float32, seed=1, steps=3) for _ in range(2)]
    found = write_checkpoint(tmp_path, states)
    other = trained("plain", torch.float32, seed=2, steps=0)
    fitted, _, _ = read_checkpoint(str(found), other, group=Group(world_size - 1, world_size, ""))
    fitted.finish(other)
    assert not difference(other, states[0])
    assert [len({*kept(other, key)}) for key in ("momentum", "own")] == [1, 3]


def test_what_cannot_be_made_one_again_is_an_error_that_names_the_keys(join):
    class Stubborn(Cloning):
        def state_dict(self):
            shown = super().state_dict()
            return shown | {"state": {i: dict(one) for i, one in shown["state"].items()}}

    client = join()
    weights = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    saved = Stubborn(weights)
    for weight in weights:
        weight.grad = torch.ones(2)
    saved.step()
    client.save({"o": saved}, 1).wait("staged", 60)
    key = r"state\['o'\]\['state'\]\[1\]\['momentum'\]: another tensor than state\['o'\]\['state'\]\[0\]\['momentum'\]"
    with pytest.raises(MismatchError, match=rf"{key}, they were one"):
        client.load({"o": Stubborn([nn.Parameter(torch.ones(2)) for _ in range(2)])})


class Keeper:
    """Keeps what it is given."""

    def __init__(self, content):
        self.content = content

    def state_dict(self):
        return self.content

    def load_state_dict(self, state):
        self.content = state


def test_any_object_without_tensors_of_its_own_is_given_one(join):
    client = join()
    one = torch.arange(5.0)
    client.save({"k": Keeper({"a": one, "b": {"c": one}, "d": one.clone()})}, 1).wait("staged", 60)
    target = Keeper({})
    client.load({"k": target})
    assert target.content["a"].data_ptr() == target.content["b"]["c"].data_ptr() != target.content["d"].data_ptr()
    assert target.content["a"].tolist() == one.tolist()
    apart = Keeper({"a": torch.zeros(5), "b": {"c": torch.zeros(5)}, "d": torch.zeros(5)})
    theirs = apart.content["b"]["c"]
    client.load({"k": apart})
    assert apart.content["b"]["c"] is theirs, "what an object has of its own it keeps"


def test_state_that_is_the_weight_itself_is_so_again(join):
    client = join()
    weight = nn.Parameter(torch.arange(4.0))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    optimizer.state[weight]["momentum_buffer"] = weight.data
    client.save({"w": weight, "o": optimizer}, 1).wait("staged", 60)
    other = nn.Parameter(torch.zeros(4))
    target = torch.optim.SGD([other], lr=0.1, momentum=0.9)
    client.load({"w": other, "o": target})
    found = target.state[other]["momentum_buffer"]
    assert (found.data_ptr(), found.requires_grad) == (other.data_ptr(), False)
    assert other.tolist() == [0.0, 1.0, 2.0, 3.0]
