"""A state that does not fit: every route says so alike, before a byte is converted, and what to type next."""

import copy
import os

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import ckptd_client
from ckptd_client import MismatchError
from ckptd_client._load.misfit import hint_of

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def made():
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))


class Holder:
    """A Stateful of a user's, around a module."""

    def __init__(self, module):
        self.module = module

    def state_dict(self):
        return {"inner": self.module.state_dict()}

    def load_state_dict(self, state):
        self.module.load_state_dict(state["inner"])


@pytest.mark.parametrize("wrap", [lambda m: m, lambda m: m.state_dict(), Holder], ids=["module", "dict", "stateful"])
def test_another_dtype_is_refused_by_every_route_and_nothing_is_converted(wrap, join, tmp_path):
    client = join()
    client.save({"model": wrap(made())}, 1).wait("durable", 60)
    dcp.save({"model": wrap(made())}, checkpoint_id=tmp_path / "dcp")
    routes = [
        client.load,
        lambda state: client.load_from(os.path.join(client._link.job.store, client.job, "latest"), state),
        lambda state: client.load_from(tmp_path / "dcp", state),
    ]
    for route in routes:
        for other in (made().half(), made().double()):
            before = {name: value.clone() for name, value in other.state_dict().items()}
            with pytest.raises(MismatchError, match=r"0\.?'?.*weight'\]: F32 \[3, 4\] in the checkpoint, F(16|64)"):
                route({"model": wrap(other)})
            assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())
        route({"model": wrap(made())})


def test_the_hint_for_a_dtype(join):
    client = join()
    client.save({"model": made()}, 1)
    with pytest.raises(MismatchError, match=r"hint: load into the dtype that was saved, such as model.float\(\)"):
        client.load({"model": made().half()})


def test_an_optimizer_that_ran_in_another_dtype(join):
    def trained(dtype):
        model = made().to(dtype)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(2, 4, dtype=dtype)).sum().backward()
        optimizer.step()
        return optimizer

    client = join()
    client.save({"o": trained(torch.float32)}, 1)
    with pytest.raises(MismatchError, match=r"\['exp_avg'\]: F32 \[3, 4\] in the checkpoint, F64"):
        client.load({"o": trained(torch.float64)})


def test_a_mismatch_in_memory_names_step_and_job(join):
    client = join()
    client.save({"w": torch.ones(2)}, 6010).wait("staged", 60)
    with pytest.raises(MismatchError, match=f"step 6010 of job {client.job}, in memory") as caught:
        client.load({"w": torch.ones(3)})
    assert ".slot" not in str(caught.value)


def test_names_that_were_meant(join, tmp_path):
    model = made()
    dcp.save({"model": model.state_dict(), "epoch": 3}, checkpoint_id=tmp_path / "dcp")
    safetensors.torch.save_file(model.state_dict(), tmp_path / "one.safetensors")
    client = join()
    with pytest.raises(MismatchError, match=r"hint: the checkpoint has 'model', 'epoch'; .*'model' instead of 'modle'"):
        client.load_from(tmp_path / "dcp", {"modle": made()})
    with pytest.raises(MismatchError, match="did you mean 'epoch' instead of 'epcoh'"):
        client.load_from(tmp_path / "dcp", {"model": made(), "epcoh": 1})
    with pytest.raises(MismatchError, match=r"try load_from\(path, model.state_dict\(\)\)"):
        client.load_from(tmp_path / "one.safetensors", {"model": made()})
    with pytest.raises(MismatchError, match=r"under 'model': give \{'model': ...\}"):
        client.load_from(tmp_path / "dcp", made().state_dict())
    assert client.load_from(tmp_path / "one.safetensors", model.state_dict()).kind == "safetensors"


def test_hints():
    assert hint_of([], ["a"], converts=False) == ""
    assert hint_of(["zzz"], ["a.b", "c"], converts=False) == "the checkpoint has 'a', 'c'"
    assert "'m.weight' instead of 'm.wieght'" in hint_of(["m.wieght"], ["m.weight"], converts=False)
    many = hint_of(["zzz"], [f"a{i}" for i in range(9)], converts=False)
    assert many.endswith("and 4 more")
    assert "nothing" in hint_of(["a"], [], converts=False)


def test_load_from_takes_a_module_for_what_it_is(join, tmp_path):
    with pytest.raises(ckptd_client.UsageError, match=r"load_from\(path, model.state_dict\(\)\)"):
        join().load_from(tmp_path, made())


# --- another kind of optimizer than was saved


def trained_by(kind, **settings):
    """A model and its optimizer, after a step."""
    model = torch.nn.Linear(2, 2)
    optimizer = kind(model.parameters(), **settings)
    _step(model, optimizer)
    return {"model": model, "optimizer": optimizer}


def _step(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(2)).sum().backward()
    optimizer.step()


def _bits(state):
    return [tensor.clone() for tensor in state["model"].state_dict().values()]


class Verbatim(torch.optim.SGD):
    """With a load_state_dict of its own: what becomes of the settings shows only afterwards."""

    def load_state_dict(self, state):
        super().load_state_dict(state)


class Hooked(torch.optim.SGD):
    """With a hook, that might have made settings of its kind of what was saved."""

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.register_load_state_dict_pre_hook(lambda optimizer, state: None)


WAYS = {
    "strict": lambda client, directory, state: client.load(state),
    "not strict": lambda client, directory, state: client.load(state, strict=False),
    "load_from": lambda client, directory, state: client.load_from(directory, state),
    "load_from, not strict": lambda client, directory, state: client.load_from(directory, state, strict=False),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [torch.optim.SGD, Verbatim, Hooked])
def test_an_optimizer_of_another_kind_is_refused_each_time_and_left_as_it_was(kind, way, join, node):
    client = join()
    client.save(trained_by(torch.optim.AdamW), 1).wait("durable", 60)
    state = trained_by(kind, lr=0.1, momentum=0.9)
    weights, groups = _bits(state), copy.deepcopy(state["optimizer"].state_dict())
    for _ in range(2):  # the first load is no reason for the second one to pass
        with pytest.raises(MismatchError, match=r"state\['optimizer'\]: another kind .* has no dampening, mom") as e:
            WAYS[way](client, os.path.join(node.store, client.job, "latest"), state)
        assert "the kind that was saved" in e.value.hint
    assert str(state["optimizer"].state_dict()) == str(groups)
    if kind is torch.optim.SGD:  # torch's own: nothing was read
        assert all(map(torch.equal, _bits(state), weights))
    _step(state["model"], state["optimizer"])


def test_an_optimizer_of_another_kind_inside_an_object_is_refused(join):
    client = join()
    client.save({"trainer": Keeping(trained_by(torch.optim.AdamW)["optimizer"])}, 1).wait("staged", 60)
    state = trained_by(torch.optim.SGD, lr=0.1)
    for _ in range(2):
        with pytest.raises(MismatchError, match=r"state\['trainer'\]\['inner'\]: another kind .* it has no dampening"):
            client.load({"trainer": Keeping(state["optimizer"])})
    _step(state["model"], state["optimizer"])


class Keeping:
    """Its state_dict() has the optimizer itself."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def state_dict(self):
        return {"inner": self.optimizer}

    def load_state_dict(self, state):
        assert state


class Wrapping(Keeping):
    """Its state_dict() has that of the optimizer, as trainers' do."""

    def state_dict(self):
        return {"inner": self.optimizer.state_dict(), "calls": 3}

    def load_state_dict(self, state):
        self.optimizer.load_state_dict(state["inner"])


def test_an_optimizer_of_another_kind_that_an_object_wraps_is_refused_each_time(join):
    client = join()
    client.save({"trainer": Wrapping(trained_by(torch.optim.AdamW)["optimizer"])}, 1).wait("staged", 60)
    state = trained_by(torch.optim.SGD, lr=0.1)
    for _ in range(2):
        with pytest.raises(MismatchError, match=r"state\['trainer'\]: another kind .* it has no dampening"):
            client.load({"trainer": Wrapping(state["optimizer"])})
    _step(state["model"], state["optimizer"])


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_a_kind_whose_settings_are_all_there_is_taken(kind, join):
    client = join()
    client.save(trained_by(torch.optim.AdamW), 1).wait("staged", 60)
    state = trained_by(kind)
    assert client.load(state).step == 1
    _step(state["model"], state["optimizer"])


def test_a_setting_that_torch_adds_to_what_older_releases_saved_is_not_missed(join):
    saved = trained_by(torch.optim.SGD, lr=0.1)
    for group in saved["optimizer"].param_groups:
        del group["nesterov"], group["foreach"], group["fused"]
    client = join()
    client.save(saved, 1).wait("staged", 60)
    state = trained_by(torch.optim.SGD, lr=0.2)
    assert not client.load(state).notes
    _step(state["model"], state["optimizer"])
