"""What is saved comes back to the bit, from the arena and from the store; and what the handles say on the way."""

import datetime as dt
import math
import os
import pathlib
import random
import sys
from collections import Counter, OrderedDict, deque

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import nn

import ckptd_client
from ckptd.shared.format.dtypes import DTYPES
from ckptd.shared.format.manifest import LATEST
from ckptd.shared.torchfile.image import FILLER_PREFIX
from ckptd_client import MismatchError, SaveFailedError, WaitTimeoutError
from ckptd_client._state.tensors import CODE_OF, DTYPE_OF
from tests.cluster import Node, wait_for
from tests.unit.client.same import bits, difference

ROUTES = ("arena", "pfs")


def noise(*shape, seed=0, dtype=torch.float32):
    """Any bit pattern there is, also NaNs with payloads; bools are 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).to(torch.bool)
    raw = torch.randint(0, 256, (math.prod(shape) * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def nested(seed):
    return {
        "model": {"w": noise(3, 4, seed=seed), "deep": {"er": {"b": noise(5, seed=seed + 10)}}},
        "list": [noise(2, seed=seed + 20), 1, {"in": [noise(2, seed=seed + 30), ()]}],
        "tuple": (noise(2, seed=seed + 40), "text", (noise(1, seed=seed + 50), None)),
        7: noise(2, seed=seed + 60),
        -1: {0: noise(2, seed=seed + 70), 1: seed},
        "ordered": OrderedDict(a=noise(1, seed=seed + 80), b=seed),
        "a dot.and ünïcode 木": noise(1, seed=seed + 90),
    }


def shapes(seed):
    one = noise(6, 4, 2, 2, seed=seed)
    return {
        "0-dim": noise(seed=seed).clone(),
        "empty": torch.empty(0),
        "empty of a shape": torch.empty(3, 0, 5, dtype=torch.int64),
        "transposed": noise(3, 5, seed=seed).t(),
        "every other": noise(10, seed=seed)[::2],
        "reversed strides": noise(3, 5, seed=seed).permute(1, 0),
        "channels last": one.to(memory_format=torch.channels_last),
        "in the middle": noise(10, seed=seed)[3:7],
        "odd bytes": noise(3, seed=seed, dtype=torch.uint8),
        "many dims": noise(*([1] * 20), 2, seed=seed),
        "needs grad": noise(4, seed=seed).nan_to_num(0.5).requires_grad_(),
        "a parameter": nn.Parameter(noise(4, seed=seed).nan_to_num(0.5)),
    }


def lazy_views(seed):
    numbers = noise(4, seed=seed, dtype=torch.complex64)
    return {"conj": numbers.conj(), "neg": numbers.conj().imag, "real": numbers.clone().real}


def dtypes(seed):
    return {code: noise(3, 5, seed=seed, dtype=dtype) for dtype, code in CODE_OF.items()}


def plain(seed):
    return {
        "none": None, "true": bool(seed % 2), "int": seed, "big": -(3**200) - seed, "float": 0.1 * seed,
        "nan": math.nan, "inf": -math.inf, "minus 0": -0.0, "complex": complex(seed, -0.0), "str": "ü木\0" * seed,
        "bytes": bytes(range(seed)), "set": {1, seed}, "frozen": frozenset({"a", seed}), "deque": deque([seed], 3),
        "counter": Counter("abca"), "date": dt.date(2020, 1, seed), "delta": dt.timedelta(seconds=seed),
        "moment": dt.datetime(2020, 1, seed, tzinfo=dt.UTC), "path": pathlib.PurePosixPath("/a"),
        "range of floats": [0.5] * seed, "tuple": (1, (2, [3, seed])), "dict in list": [{"lr": seed}, {}],
        "size": torch.Size([seed, 2]), "dtype": torch.bfloat16, "device": torch.device("cpu"),
        "numpy": np.float32(seed), "array": np.arange(seed, dtype="<i2"), "random": random.Random(seed).getstate(),
    }  # fmt: skip


def empties(seed):
    return {"dict": {}, "list": [], "tuple": (), "in": {"dict": {}, "list": [[], {}]}, "seed": seed}


def nothing(seed):
    return {}


def only_leaves(seed):
    return {"epoch": seed, "best": 0.5 * seed}


def generators(seed):
    torch_one, numpy_one = torch.Generator().manual_seed(seed), np.random.RandomState(seed)
    return {"torch": torch_one.get_state(), "numpy": numpy_one.get_state(), "python": random.Random(seed).getstate()}


def training(seed, steps=3):
    """A model with a buffer and tied weights, AdamW with state after some steps, a scheduler."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(7, 4), nn.BatchNorm1d(4), nn.Linear(4, 7, bias=False))
    model[2].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * seed, amsgrad=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.arange(7)).square().sum().backward()
        optimizer.step()
        scheduler.step()
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "epoch": seed}


class Sampler:
    """A Stateful whose state changes its own structure."""

    def __init__(self, seed):
        self.state = {
            "order": noise(seed + 1, seed=seed),
            "seen": {f"worker {i}": i for i in range(seed)},
            "at": (seed,),
        }

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def samplers(seed):
    return {"sampler": Sampler(seed), "list": [Sampler(seed + 1), {"in": Sampler(seed + 2)}]}


MAKERS = (
    nested, shapes, lazy_views, dtypes, plain, empties, nothing, only_leaves, generators, training, samplers,
)  # fmt: skip


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_states_come_back_to_the_bit_by_both_routes(make, join, emptied):
    client = join()
    client.save(make(3), 5).wait("durable", 60)
    fresh = make(2)
    restored = client.load(fresh)
    assert (restored.step, restored.tier, restored.notes) == (5, "arena", [])
    assert not difference(fresh, make(3))
    client.save(make(4), 6)
    client.wait("durable", 60)
    client.close()
    emptied()
    fresh = make(2)
    restored = join().load(fresh)
    assert (restored.step, restored.tier, restored.notes) == (6, "pfs", [])
    assert not difference(fresh, make(4))


def test_a_daemon_on_an_emptied_arena_restores_from_the_store(tmp_path, join):
    with Node(str(tmp_path)) as node:
        node.start()
        with join(on=node) as client:
            client.save(training(1), 1)
            client.wait("durable", 60)
        assert node.stop() == 0
        node.lose_arena()
        node.start()
        fresh = training(2, steps=0)
        with join(on=node) as client:
            restored = client.load(fresh)
            assert (restored.step, restored.tier) == (1, "pfs")
    assert not difference(fresh, training(1))


def test_an_optimizer_that_never_stepped_takes_the_state_of_one_that_did(join):
    client = join()
    client.save(training(3), 0).wait("durable", 60)
    fresh = training(2, steps=0)
    assert not fresh["optimizer"].state
    client.load(fresh)
    assert not difference(fresh, training(3))
    assert fresh["model"][0].weight is fresh["model"][2].weight
    for state in (fresh, expected := training(3)):  # and training goes on alike
        state["optimizer"].zero_grad()
        state["model"](torch.arange(7)).square().sum().backward()
        state["optimizer"].step()
    assert not difference(fresh, expected)


def test_tensors_and_containers_are_filled_in_place(join):
    client = join()
    client.save(nested(1), 0).wait("durable", 60)
    state = nested(2)
    weight, inner, items = state["model"]["w"], state["model"], state["list"]
    address = weight.data_ptr()
    client.load(state)
    assert state["model"] is inner
    assert inner["w"] is weight
    assert weight.data_ptr() == address
    assert state["list"] is items
    assert bits(weight) == bits(nested(1)["model"]["w"])


def test_tied_tensors_are_stored_once_and_tied_or_untied_when_they_are_read(join, node, job):
    client = join()
    weight = noise(1000, 10)
    handle = client.save({"a": weight, "b": weight, "view": weight[:10], "plain": 1}, 3)
    client.wait("durable", 60)
    with safe_open(image_path(node, job, handle), "pt") as file:
        assert tensor_names(file) == ["a", "view"]
    one = torch.zeros(1000, 10)
    tied = {"a": one, "b": one, "view": torch.zeros(10, 10), "plain": 0}
    client.load(tied)
    assert tied["a"] is tied["b"]
    untied = {"a": torch.zeros(1000, 10), "b": torch.zeros(1000, 10), "view": torch.zeros(10, 10), "plain": 0}
    client.load(untied)
    for state in (tied, untied):
        assert bits(state["a"]) == bits(state["b"]) == bits(weight)
        assert bits(state["view"]) == bits(weight[:10])


def test_tensors_untied_at_save_and_tied_at_load_are_refused_or_equal(join):
    client = join()
    client.save({"a": noise(10), "b": noise(10)}, 0).wait("durable", 60)
    one = torch.zeros(10)
    client.load({"a": one, "b": one})
    assert bits(one) == bits(noise(10))


def test_an_expanded_tensor_is_saved_whole(join):
    client = join()
    client.save({"e": noise(3, 1).expand(3, 4)}, 0).wait("durable", 60)
    state = {"e": torch.zeros(3, 4)}
    client.load(state)
    assert bits(state["e"]) == bits(noise(3, 1).expand(3, 4))


def test_a_state_may_change_as_soon_as_save_returns(join):
    client = join()
    state = {"w": noise(1 << 20), "list": [1], "model": nn.Linear(3, 3), "epoch": 1}
    expected = {name: value.clone() for name, value in state["model"].state_dict().items()}
    handle = client.save(state, 0)
    state["w"].zero_()
    state["list"].append(2)
    state["epoch"] = 2
    with torch.no_grad():
        state["model"].weight.zero_()
    handle.wait("durable", 60)
    client.load(state)
    assert bits(state["w"]) == bits(noise(1 << 20))
    assert (state["list"], state["epoch"]) == ([1], 1)
    assert not difference(dict(state["model"].state_dict()), expected)


MISFITS = {
    "shape": ({"w": torch.zeros(3)}, ["state['w']", "F32 [2]", "F32 [3]"]),
    "dtype": ({"w": torch.zeros(2, dtype=torch.float16)}, ["state['w']", "F32 [2]", "F16 [2]"]),
    "missing": ({}, ["state['w']", "in the checkpoint, not in the state"]),
    "extra": ({"w": torch.zeros(2), "v": torch.zeros(1)}, ["state['v']", "a tensor in the state"]),
    "extra leaf": ({"w": torch.zeros(2), "v": 3}, ["state['v']", "in the state, not in the checkpoint"]),
    "no tensor": ({"w": 3}, ["state['w']", "a tensor in the checkpoint", "int"]),
    "tensor": ({"w": torch.zeros(2), "step": torch.zeros(1)}, ["state['step']", "none in the checkpoint"]),
    "deeper": ({"w": {"w": torch.zeros(2)}}, ["state['w']"]),
    "module": ({"w": torch.zeros(2), "m": nn.Linear(1, 1)}, ["state['m']: Linear in the state, nothing in"]),
}  # fmt: skip


@pytest.mark.parametrize("kind", MISFITS)
def test_a_state_that_does_not_fit_is_reported_where_and_nothing_else_is_tried(kind, join):
    misfit, words = MISFITS[kind]
    client = join()
    for step in range(2):
        client.save({"w": torch.ones(2), "step": step}, step).wait("durable", 60)
    state = {"step": 5} | misfit
    with pytest.raises(MismatchError) as caught:
        client.load(state)
    assert all(word in str(caught.value) for word in words), caught.value
    assert "step 1 of job" in str(caught.value)
    assert "step 0" not in str(caught.value)
    assert all(not value.any() for value in state.values() if isinstance(value, torch.Tensor)), "nothing was read"
    fitting = {"w": torch.zeros(2), "step": 0}
    assert client.load(fitting).step == 1, "and the next load works"


def test_the_first_differences_are_listed_and_the_others_counted(join):
    client = join()
    client.save({f"w{i}": torch.ones(i) for i in range(20)}, 0).wait("durable", 60)
    with pytest.raises(MismatchError) as caught:
        client.load({f"w{i}": torch.ones(i + 1) for i in range(20)})
    assert str(caught.value).count("in the checkpoint") == 8
    assert "... and 12 more" in str(caught.value)


def test_nothing_to_restore_is_none(join):
    client = join()
    state = {"w": noise(4)}
    assert client.load(state) is None
    assert bits(state["w"]) == bits(noise(4))
    assert client.steps() == []
    assert client.latest() is None
    assert client.wait("durable") is None
    with pytest.raises(ckptd_client.RestoreError, match="step 3"):
        client.load(state, 3)


def test_older_steps_can_be_loaded_and_saved_again(join):
    client = join()
    for step in range(4):
        client.save({"w": torch.full((4,), float(step))}, step).wait("durable")
    assert wait_for(lambda: client.steps() == [1, 2, 3]), "three are kept"
    assert client.latest() == 3
    state = {"w": torch.zeros(4)}
    restored = client.load(state, step=2)
    assert (restored.step, restored.tier) == (2, "pfs")
    assert state["w"].tolist() == [2.0] * 4
    assert client.save({"w": torch.full((4,), 33.0)}, 3).step == 3
    client.wait("durable", 60)
    assert client.load(state).step == 3
    assert state["w"].tolist() == [33.0] * 4
    with pytest.raises(ckptd_client.RestoreError, match="no checkpoint of step 17"):
        client.load(state, step=17)


def test_a_step_saved_again_after_a_load_is_drained_as_any_other(join):
    client = join(drain_every=1)
    for step in range(2):
        client.save({"w": torch.zeros(4)}, step).wait("durable", 60)
    client.load({"w": torch.zeros(4)}, step=0)
    client.save({"w": torch.zeros(4)}, 1).wait("durable", 60)


def test_restored_and_stats_count(join):
    client = join()
    state = {"w": torch.zeros(1 << 20)}
    for step in range(3):
        client.save(state, step).wait("durable")
    stats = client.stats()
    assert (stats.saves, stats.plans, stats.failed) == (3, 1, 0)
    assert stats.nbytes // 3 >= 4 << 20
    assert 0 < stats.last_stall_s <= stats.stall_s < 10
    restored = client.load(state)
    assert restored.nbytes == stats.nbytes // 3
    assert 0 < restored.seconds < 10
    assert restored.notes == []


def test_saves_without_a_step_count_up_also_after_a_load(join):
    client = join()
    state = {"w": torch.zeros(4)}
    assert [client.save(state).step for _ in range(3)] == [0, 1, 2]
    assert client.save(state, 10).step == 10
    assert client.save(state).step == 11
    client.wait("durable", 60)
    client.load(state)
    assert client.save(state).step == 12


def test_a_cadence_keeps_what_is_not_due_and_wait_forces_the_newest(join):
    client = join(drain_every=3)
    handles = []
    for step in range(6):
        handles.append(client.save({"w": torch.full((4,), float(step))}, step))
        wait_for(lambda: handles[-1].end is not None)
    assert [str(handle.end) for handle in handles] == ["durable", "kept", "kept"] * 2
    assert [str(handle.milestone) for handle in handles] == ["durable", "staged", "staged"] * 2
    with pytest.raises(SaveFailedError, match="step 5 will not become durable: it ended as 'kept'"):
        handles[5].wait("durable", 60)
    assert client.wait("durable") is handles[5]
    assert (handles[5].end, handles[4].end) == ("durable", "kept")
    assert client.save({"w": torch.zeros(4)}, 7, drain=True).wait("durable", 60).end == "durable"


def test_protected_is_reached_with_durable_on_a_lone_node(join):
    client = join()
    handle = client.save({"w": torch.zeros(4)}, 0)
    assert client.wait("protected", 60) is handle
    assert handle.stall_s > 0


def test_a_drain_that_is_late_is_superseded_and_says_so(tmp_path, join):
    with Node(str(tmp_path)) as node:
        node.start("--drain-bandwidth", "2M")
        client = join(on=node)
        state = {"w": noise(2 << 20)}
        handles = [client.save(state, step).wait("staged") for step in range(3)]
        with pytest.raises(SaveFailedError, match=r"step 1 will not become durable: it ended as 'superseded' .*step 2"):
            handles[1].wait("durable", 60)
        with pytest.raises(WaitTimeoutError, match=r"step 2 is staged after 0.01 s"):
            handles[2].wait("durable", 0.01)
        assert handles[2].wait("durable", 20).end == "durable"
        assert client.steps() == [0, 2]


def test_retention_leaves_the_newest(tmp_path, join):
    with Node(str(tmp_path)) as node:
        node.start("--keep-last", "2")
        with join("kept", on=node) as client:
            for step in (5, 6, 3, 9):
                client.save({"w": torch.full((4,), float(step))}, step).wait("durable", 60)
            folder = tmp_path / "kept"
            wait_for(lambda: client.steps() == [3, 9])
        assert visible(folder) == ["step-000000003.i0001", "step-000000009.i0001"]
        assert os.readlink(folder / LATEST) == "step-000000009.i0001"
        state = {"w": torch.zeros(4)}
        with join("kept", on=node) as client:
            assert client.load(state, 3).step == 3
            assert state["w"].tolist() == [3.0] * 4


def test_retention_keeps_what_is_pinned_and_every_so_many_steps(tmp_path, join):
    with Node(str(tmp_path)) as node:
        node.start("--keep-last", "1", "--keep-every", "10")
        with join("kept", on=node) as client:
            for step in (3, 10, 11):
                client.save({"w": torch.full((4,), float(step))}, step).wait("durable", 60)
                if step == 3:
                    node.complete(sys.executable, "-m", "ckptd", "pin", str(tmp_path / "kept" / "latest"), timeout_s=60)
            client.save({"w": torch.full((4,), 12.0)}, 12).wait("durable", 60)
            wait_for(lambda: client.steps() == [3, 10, 12])
        assert "could not remove" not in node.log_text()


def visible(folder):
    return sorted(name for name in os.listdir(folder) if not name.startswith(".") and name != LATEST)


def image_path(node, job, handle, rank=0):
    return os.path.join(node.store, job, handle.save_id.dirname, f"r{rank:05d}-p00.safetensors")


@pytest.mark.parametrize("make", [nested, shapes, dtypes, training], ids=lambda make: make.__name__)
def test_stock_safetensors_reads_what_was_drained(make, join, node, job):
    client = join()
    handle = client.save(make(3), 1).wait("durable", 60)
    expected = dict(leaves_of(make(3)))
    with safe_open(image_path(node, job, handle), "pt") as file:
        names = tensor_names(file)
        for name in names:
            code, wanted = CODE_OF[expected[name].dtype], expected[name]
            if DTYPES[code].view:  # as numbers, with one more dimension
                wanted = wanted.unsqueeze(-1).view(DTYPE_OF[DTYPES[code].view[0]])
            assert bits(file.get_tensor(name)) == bits(wanted), name
        assert file.metadata()["ckptd.save_id"] == handle.save_id.text
        assert file.metadata()["format"] == "pt"
    tied = {"model.2.weight"} if make is training else set()
    assert set(names) == set(expected) - tied


def tensor_names(file):
    """Sorted names of a safetensors file, without the fillers between the payloads."""
    return sorted(name for name in file.keys() if not name.startswith(FILLER_PREFIX))  # noqa: SIM118 - no mapping


def leaves_of(state, prefix=""):
    """(name, tensor) of every tensor in a state, names joined with dots."""
    if isinstance(state, torch.Tensor):
        yield prefix, state
        return
    if hasattr(state, "state_dict"):
        state = state.state_dict()
    items = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list | tuple) else ()
    for key, item in items:
        yield from leaves_of(item, f"{prefix}.{key}" if prefix else str(key))


def test_close_is_idempotent_and_memory_is_free_once_durable(join, emptied, node, job):
    with join() as client:
        client.prepare({"w": noise(1 << 20)})
        handle = client.save({"w": noise(1 << 20)}, 0)
    client.close()
    client.close()
    emptied()
    assert os.path.exists(image_path(node, job, handle)), "what was staged became durable after close"
    assert wait_for(lambda: node.job(job) is None), "and the daemon forgot the job"


def test_a_client_closed_without_a_save_leaves_nothing(join, emptied):
    with join() as client:
        client.prepare({"w": noise(1 << 20)})
    emptied()


def test_prepare_costs_nothing_twice_and_the_first_save_needs_no_plan(join):
    client = join()
    state = {"w": noise(1 << 20)}
    client.prepare(state)
    client.prepare(state)
    assert client.stats().plans == 1
    client.save(state, 0).wait("durable", 60)
    assert client.stats().plans == 1


def test_a_load_right_after_a_large_save_waits_for_its_digests(join):
    client = join(drain_every=100)
    state = {"w": torch.zeros(128 << 20, dtype=torch.uint8)}
    for step in range(3):
        state["w"].fill_(step)
        client.save(state, step)
    restored = client.load(state)
    assert (restored.step, restored.tier, restored.notes) == (2, "arena", [])
    assert state["w"].min() == state["w"].max() == 2
