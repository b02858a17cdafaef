"""A state of state_dict()s: tensors are filled, what reaches no object is named. A user's own dicts need no note."""

import logging
from collections import OrderedDict

import pytest
import torch
from torch import nn

from ckptd_client import MismatchError
from tests.unit.client.same import difference


def training(seed, steps):
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * seed)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        scheduler.step()
    return {"model": model, "opt": optimizer, "sched": scheduler}


def dicts(objects, **more):
    return {name: value.state_dict() for name, value in objects.items()} | more


def test_plain_values_in_dicts_of_state_dict_are_named_with_what_to_pass(join, caplog):
    saved, target = training(1, 3), training(2, 1)
    client = join()
    client.save(dicts(saved, epoch=3, best={"loss": 0.5}), 1).wait("staged", 60)
    state = dicts(target, epoch=0, best={"loss": 9.0})
    caplog.set_level(logging.WARNING, "ckptd_client")
    restored = client.load(state)
    assert restored.state is state
    opt, sched = restored.notes
    assert opt.startswith("your optimizer was not changed: state['opt'] is a dict that state_dict() gave, and no")
    assert "state['opt']['param_groups'][0]['lr']" in opt
    assert opt.endswith("pass load the optimizer itself, or give restored.state['opt'] to its load_state_dict")
    assert "no scheduler sees" in sched
    assert "['last_epoch']" in sched
    assert all(note in caplog.text for note in restored.notes)
    assert (state["epoch"], state["best"]) == (3, {"loss": 0.5})
    assert target["opt"].param_groups[0]["lr"] != saved["opt"].param_groups[0]["lr"], "this is what the note is for"
    target["opt"].load_state_dict(restored.state["opt"])
    target["sched"].load_state_dict(restored.state["sched"])
    assert not difference(target, saved)


def test_the_objects_themselves_need_no_note(join, caplog):
    saved, target = training(1, 3), training(2, 0)
    client = join()
    client.save(saved | {"epoch": 3}, 1).wait("staged", 60)
    state = target | {"epoch": 0}
    restored = client.load(state)
    assert restored.notes == []
    assert restored.state is state
    assert not difference(state, saved | {"epoch": 3})
    assert "warning: restored" not in caplog.text
    assert "state=" not in repr(restored)


@pytest.mark.parametrize(
    "state",
    [
        {"epoch": 3},
        {"progress": {"epoch": 3, "last_epoch": 2, "best": 0.5}, "list": [{"step": 3}]},
        {"ordered": OrderedDict(a=3)},
        {"state": 3, "param_groups": "none"},
        {"_private": 3},
    ],
)
def test_a_users_own_dicts_are_read_back_without_a_note(state, join):
    client = join()
    client.save(state, 1).wait("staged", 60)
    target = _zeroed(state)
    assert client.load(target).notes == []
    assert not difference(target, state)


def _zeroed(value):
    if isinstance(value, dict):
        return type(value)((key, _zeroed(item)) for key, item in value.items())
    return [_zeroed(item) for item in value] if isinstance(value, list) else 0


def test_dicts_that_have_the_saved_values_already_need_no_note(join):
    objects = training(1, 3)
    client = join()
    client.save(dicts(objects), 1).wait("staged", 60)
    assert client.load(dicts(objects)).notes == []


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda n: torch.amp.GradScaler("cpu", init_scale=2.0**n).state_dict(), "object"),
        (lambda n: {"deep": [training(n, n)["sched"].state_dict()]}, "scheduler"),
        (lambda n: {"all": {"o": torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=n).state_dict()}}, "optimizer"),
        (lambda n: torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=n).state_dict(), "optimizer"),
    ],
)
def test_dicts_that_are_known_by_what_they_hold(make, kind, join):
    client = join()
    client.save({"it": make(1)}, 1).wait("staged", 60)
    [note] = client.load({"it": make(2)}).notes
    assert f"no {kind} sees" in note


def test_extra_state_of_a_module_is_seen_by_no_module(join):
    class Extra(nn.Linear):
        n = 1

        def get_extra_state(self):
            return {"n": self.n}

        def set_extra_state(self, state):
            self.n = state["n"]

    saved, target = Extra(2, 2), Extra(2, 2)
    saved.n = 5
    client = join()
    client.save({"m": saved.state_dict()}, 1).wait("staged", 60)
    [note] = client.load({"m": target.state_dict()}).notes
    assert "no module sees" in note
    assert "_extra_state" in note


def test_the_state_dict_of_a_fresh_optimizer_has_no_place_and_the_hint_says_what_has(join):
    client = join()
    client.save(dicts(training(1, 3)), 1).wait("staged", 60)
    with pytest.raises(MismatchError, match=r"hint: pass the optimizer itself, not its state_dict\(\)"):
        client.load(dicts(training(2, 0)))


def test_load_from_says_it_too(join, node, caplog):
    client = join()
    client.save(dicts(training(1, 3)), 1).wait("durable", 60)
    state = dicts(training(2, 1))
    found = client.load_from(f"{node.store}/{client.job}/latest", state)
    assert found.state is state
    assert [note.split(" ")[5] for note in found.notes] == ["state['opt']", "state['sched']"]
    assert all(note in caplog.text for note in found.notes)
