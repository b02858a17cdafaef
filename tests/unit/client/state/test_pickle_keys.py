"""Pickle by key alone: refused at save, refused at load, and what it says each time. Classes known at save only."""

import dataclasses
import enum
import io
import os
from collections import namedtuple

import pytest
import torch

import ckptd_client
from ckptd.checkpoint.verify import verify_path
from ckptd.shared.format.layout import decode_leaves
from ckptd_client import ConfigError, MismatchError, RestoreError, UsageError
from ckptd_client._state.leaves import _class_of, _tag_of, decode_leaf, encode_leaf, register
from tests.stored import records_of


class Sampler:
    """What has no safe encoding; it holds a tensor."""

    def __init__(self, seed):
        self.seed, self.order = seed, torch.arange(seed)

    def __eq__(self, other):
        return self.seed == other.seed and torch.equal(self.order, other.order)

    __hash__ = None


class Hostile:
    """Runs a command when it is unpickled."""

    def __reduce__(self):
        return os.system, ("touch " + os.environ["MARKER_OF_TESTS"],)


def state_of(sampler=None, step=0):
    return {"w": torch.ones(3), "loader": {"sampler": sampler, "epoch": step}, "plain": (1, 2)}


def test_a_key_that_was_not_named_is_refused_with_the_way_out(join):
    with pytest.raises(UsageError, match=r"state\['loader'\]\['sampler'\] cannot be saved") as caught:
        join().save(state_of(Sampler(3)))
    assert "connect(allow_pickle=['loader.sampler'])" in caught.value.hint


@pytest.mark.parametrize("pattern", ["loader.sampler", "loader.*", "*"])
def test_named_twice_it_comes_back(join, node, pattern):
    with join(allow_pickle=[pattern]) as client:
        directory = client.save(state_of(Sampler(5), 7)).wait("durable", 60) and client.latest()
        assert directory == 0
    with join(allow_pickle=[pattern]) as client:
        state = state_of()
        client.load(state)
        assert (state["loader"]["sampler"], state["loader"]["epoch"]) == (Sampler(5), 7)


def test_at_load_it_must_be_named_again(join, node, job):
    with join(allow_pickle=["loader.*"]) as client:
        client.save(state_of(None, 1), 1).wait("durable", 60)  # older, and fit to be read
        client.save(state_of(Sampler(5), 2), 2).wait("durable", 60)
    for allowed in ([], ["loader"], ["sampler"], ["plain"]):
        with join(allow_pickle=allowed) as client:
            state = state_of()
            with pytest.raises(RestoreError, match=r"state\['loader'\]\['sampler'\] is a pickle") as caught:
                client.load(state)  # no older one instead
            assert "connect(allow_pickle=['loader.sampler'])" in caught.value.hint
            assert state["loader"] == {"sampler": None, "epoch": 0}
    directory = os.path.join(node.store, job, "step-000000002.i0001")
    found = verify_path(directory)
    assert found.ok, found.problems
    leaves = decode_leaves(records_of(directory)[0].leaves, where="").leaves
    assert {name: leaf.codec for name, leaf in leaves.items()} == {
        "loader.sampler": "pickle", "loader.epoch": "safe/1", "plain": "safe/1"
    }  # fmt: skip
    with open(os.path.join(directory, "objects.pt"), "rb") as file:
        archive = leaves["loader.sampler"].data
        assert archive in file.read()  # stock readers get the same
    assert torch.load(io.BytesIO(archive), weights_only=False) == Sampler(5)


def test_nothing_of_it_runs_until_it_is_allowed(join, node, job, tmp_path, monkeypatch):
    monkeypatch.setenv("MARKER_OF_TESTS", str(tmp_path / "marker"))
    with join(allow_pickle=["loader.sampler"]) as client:
        client.save(state_of(Hostile())).wait("durable", 60)
    assert verify_path(os.path.join(node.store, job, "step-000000000.i0001")).ok
    with join() as client, pytest.raises(RestoreError):
        client.load(state_of())
    assert not (tmp_path / "marker").exists()
    with join(allow_pickle=["loader.sampler"]) as client:
        client.load(state_of())
    assert (tmp_path / "marker").exists()  # the bomb was real


def test_what_pickle_refuses_too(join):
    with pytest.raises(UsageError, match=r"state\['loader'\]\['sampler'\] cannot be saved, not even as a pickle"):
        join(allow_pickle=["*"]).save(state_of(lambda: 0))


@pytest.mark.parametrize("value", ["loader", [3], [""]])
def test_patterns_are_a_list_of_texts(join, value):
    with pytest.raises(ConfigError, match="allow_pickle"):
        join(allow_pickle=value)


# --- classes that are registered where it is saved, and not where it is loaded


class Colour(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Inner:
    colour: object


Pair = namedtuple("Pair", "left right")  # noqa: PYI024


@dataclasses.dataclass
class Outer:
    items: list
    pair: object


@pytest.fixture
def registered():
    classes = [Colour, Inner, Pair, Outer]
    for cls in classes:
        register(cls, f"test_pickle_keys.{cls.__name__}")
    yield classes
    for cls in classes:
        forget(cls)


def forget(cls):
    _class_of.pop(_tag_of.pop(cls, ""), None)


def test_nested_ones_come_back(registered):
    value = Outer([Inner(Colour.RED), {"deep": (Pair(Inner(None), Colour.RED),)}], Pair(1, Outer([], None)))
    assert decode_leaf(encode_leaf(value, "state"), "state") == value


@pytest.mark.parametrize("cls", ["Colour", "Inner", "Pair", "Outer"])
def test_one_that_is_not_registered_at_load_is_named(join, registered, cls):
    with join() as client:
        client.save({"cursor": Outer([Inner(Colour.RED)], Pair(1, 2))}, 3).wait("durable", 60)
    forget(globals()[cls])
    with join() as client, pytest.raises(RestoreError, match=rf"state\['cursor'\].*test_pickle_keys\.{cls}") as caught:
        client.load({"cursor": None})
    assert not isinstance(caught.value, MismatchError)
    assert "ckptd_client.register" in caught.value.hint
    assert ckptd_client.register is register
