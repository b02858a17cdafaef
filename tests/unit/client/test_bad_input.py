"""What cannot be saved is told at once, with the place or the numbers; what may change between saves just works."""

import os
import pickle
import time
import traceback

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import ckptd_client
from ckptd.shared.protocol.messages import Cadence
from ckptd_client import BudgetError, ConfigError, ConnectError, MismatchError, SaveFailedError, UsageError
from ckptd_client._daemon.settings import parse_cadence
from tests.cluster import Node
from tests.unit.client.same import difference

MIB = 1 << 20


class Unknown:
    """No plain value, and nothing that ckptd could look into."""


class Fickle:
    """A Stateful with other keys at each look."""

    looks = 0

    def state_dict(self):
        self.looks += 1
        return {f"look {self.looks}": torch.zeros(1)}

    def load_state_dict(self, state):
        raise AssertionError


def cycle():
    state = {"a": {}}
    state["a"]["b"] = state
    return state


UNSAVABLE = {
    "unknown type": ({"a": [{"b": Unknown()}]}, r"state\['a'\]\[0\]\['b'\] cannot be saved: .*Unknown"),
    "unknown type in a leaf": ({"a": (1, [2, Unknown()])}, r"state\['a'\]\[1\]\[1\] cannot be saved"),
    "function": ({"a": len}, r"state\['a'\] cannot be saved"),
    "class": ({"a": nn.Linear}, r"state\['a'\] cannot be saved"),
    "generator": ({"rng": torch.Generator()}, r"state\['rng'\] cannot be saved"),
    "key": ({"a": {(1, 2): torch.zeros(1)}}, r"state\['a'\] has the key \(1, 2\) of type tuple"),
    "bool key": ({"a": {True: torch.zeros(1)}}, r"state\['a'\] has the key True of type bool"),
    "colliding names": (
        {"a": {"b": torch.zeros(1)}, "a.b": torch.zeros(1)},
        r"state\['a'\]\['b'\] and state\['a.b'\] both have the name 'a.b'",
    ),
    "colliding int key": ({"a": {1: torch.zeros(1), "1": 2}}, r"both have the name 'a.1'"),
    "reserved name": ({"__metadata__": torch.zeros(1)}, "'__metadata__' is reserved"),
    "meta": ({"m": {"w": torch.zeros(1, device="meta")}}, r"state\['m'\]\['w'\] is on the meta device"),
    "sparse": ({"s": torch.eye(2).to_sparse()}, r"state\['s'\] is sparse"),
    "sub-byte": ({"c": torch.empty(1, dtype=torch.uint4)}, r"state\['c'\] has dtype torch.uint4"),
    "lazy": ({"m": nn.LazyLinear(2)}, r"state\['m'\]\['weight'\]"),
    "cycle": (cycle(), r"state\['a'\]\['b'\] contains itself"),
    "list": ([torch.zeros(1)], "must be a dict, not list"),
    "module": (nn.Linear(1, 1), "must be a dict, not Linear"),
    "tensor": (torch.zeros(1), "must be a dict, not Tensor"),
    "none": (None, "must be a dict, not NoneType"),
    "fickle": ({"f": Fickle()}, "changes while it is read"),
}


@pytest.mark.parametrize("kind", UNSAVABLE)
def test_what_cannot_be_saved_is_refused_at_once_with_its_place_and_the_next_save_works(kind, join):
    state, message = UNSAVABLE[kind]
    client = join()
    with pytest.raises(UsageError, match=message) as caught:
        client.save(state, 0)
    assert "hint: " in str(caught.value)
    with pytest.raises(UsageError, match=message):
        client.prepare(state)
    assert client.save({"w": torch.ones(1)}, 0).wait("durable", 60).step == 0, "the step was not used up"
    with pytest.raises(UsageError, match=message):
        client.save(state, 1)
    assert client.save({"w": torch.ones(1)}, 1).wait("durable", 60).step == 1


def test_a_dtensor_without_a_value_is_refused_with_its_place(join):
    client = join()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        from torch.distributed.tensor import DTensor, Partial, init_device_mesh  # noqa: PLC0415

        part = DTensor.from_local(torch.zeros(4), init_device_mesh("cpu", (1,)), [Partial()])
        with pytest.raises(UsageError, match=r"state\['m'\]\['w'\] is a DTensor with a partial placement"):
            client.save({"m": {"w": part}}, 0)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("state", [[torch.zeros(1)], nn.Linear(1, 1), None], ids=["list", "module", "none"])
def test_load_wants_a_dict_too(state, join):
    client = join()
    client.save({"w": torch.ones(1)}, 0).wait("durable", 60)
    with pytest.raises(UsageError, match="must be a dict"):
        client.load(state)


@pytest.mark.parametrize("step", [-1, 1.5, "3", True, 10**12, torch.tensor(3.0), torch.ones(2)], ids=str)
def test_a_step_is_a_natural_number(step, join):
    client = join()
    with pytest.raises(UsageError, match="step must be an int from 0 to"):
        client.save({"w": torch.ones(1)}, step)
    assert client.save({"w": torch.ones(1)}).step == 0
    with pytest.raises(UsageError, match="step must be an int from 0 to"):
        client.load({"w": torch.ones(1)}, step)


def test_a_step_is_saved_once(join):
    client = join()
    client.save({"w": torch.ones(1)}, 3)
    with pytest.raises(UsageError, match="step 3 was already saved by this run"):
        client.save({"w": torch.ones(1)}, 3)
    assert client.save({"w": torch.ones(1)}, 2).wait("durable", 60).end == "durable"
    assert client.latest() == 2, "newest is what was saved last"


def test_a_store_may_begin_at_home_or_here(join, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for given in ("~/ckpt", "ckpt"):
        with join(store=given) as client:
            assert client._link.job.store == f"{tmp_path}/ckpt"


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "ü", "a" * 65, "a b"])
def test_a_job_needs_a_plain_name(name, join, monkeypatch):
    monkeypatch.delenv("CKPTD_JOB", raising=False)
    with pytest.raises(ConfigError, match=r"connect\(job=...\) or CKPTD_JOB"):
        join(name)
    with pytest.raises(ConfigError, match="the job has no name"):
        join(None)


def test_a_store_is_a_directory_whose_parent_exists(join, monkeypatch, tmp_path):
    monkeypatch.delenv("CKPTD_STORE", raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"store '{tmp_path}/not/there' cannot be used"):
        join(store="not/there")
    with pytest.raises(ConfigError, match="no store is set"):
        join(store=None)
    missing = str(tmp_path / "not" / "mounted")
    with pytest.raises(ConfigError, match=f"store '{missing}' cannot be used"):
        join(store=missing)
    assert not os.path.exists(missing)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        join(store=str(tmp_path / "file"))


def test_the_store_of_a_job_that_names_none_is_the_daemons(tmp_path, monkeypatch):
    """An administrator says it once per node: in /etc/ckptd/config.toml, or the unit's environment file."""
    monkeypatch.delenv("CKPTD_STORE", raising=False)
    store = tmp_path / "store"
    store.mkdir()
    with Node(str(store)) as node:
        node.start("--store", str(store))
        with ckptd_client.connect("job", arena=node.arena, start=False) as client:
            client.save({"step": 1}, 1).wait("durable")
        assert (store / "job" / "latest" / "COMMITTED").exists()


@pytest.mark.parametrize("cadence", [0, -1, "fast", "0s", 1.5, None])
def test_a_cadence_is_steps_or_seconds(cadence, join):
    with pytest.raises(ConfigError, match="drain_every"):
        join(drain_every=cadence)


def test_a_cadence_may_be_left_to_the_store():
    assert parse_cadence("auto") == Cadence(0, 0.0)
    assert parse_cadence("auto") not in [parse_cadence(given) for given in (1, 100, "300s")]


def test_without_a_daemon_connect_says_how_to_start_one(join, tmp_path, node):
    with (
        Node(str(tmp_path)) as idle,
        pytest.raises(ConnectError, match="start one in another terminal: ckptd run") as caught,
    ):
        join(on=idle, connect_timeout_s=1)
    assert idle.arena in str(caught.value)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A daemon that may use 64 MiB."""
    with Node(str(tmp_path_factory.mktemp("small"))) as node:
        node.start("--budget-nbytes", "64M")
        yield node


def test_a_state_above_the_budget_is_reported_before_training_with_the_numbers(small, join):
    client = join(on=small)
    state = {"w": torch.zeros(40 * MIB, dtype=torch.uint8)}
    with pytest.raises(BudgetError) as caught:
        client.prepare(state)
    text = str(caught.value)
    assert "64" in text, text
    assert "40" in text or "120" in text, text
    assert "budget" in text, text
    handle = client.save(state, 0)
    assert handle.end in ("failed", "skipped")
    with pytest.raises(SaveFailedError, match="64"):
        handle.wait("staged", 60)
    assert handle.stall_s < 5
    assert client.stats().failed == 1
    little = {"w": torch.zeros(4 * MIB, dtype=torch.uint8)}
    assert client.save(little, 1).wait("durable", 60).end == "durable", "a smaller one is saved"
    client.prepare(little)


def test_a_state_that_outgrows_the_budget_fails_and_one_that_shrinks_again_is_saved(small, join):
    client = join(on=small)
    for step, mib in enumerate((4, 50, 4)):
        handle = client.save({"w": torch.zeros(mib * MIB, dtype=torch.uint8)}, step)
        if mib == 50:
            with pytest.raises(SaveFailedError, match=r"2 slots of 50\.1 MiB"):
                handle.wait("staged", 60)
        else:
            handle.wait("durable", 60)


w = torch.arange(1000.0)
GROWTH = {
    "a tensor grew": ({"w": w[:10]}, {"w": w}),
    "a tensor grew much": ({"w": w}, {"w": torch.ones(3 * MIB)}),
    "a tensor shrank": ({"w": w}, {"w": w[:10]}),
    "a new key": ({"w": w}, {"w": w, "v": w + 1}),
    "a key is gone": ({"w": w, "v": w}, {"v": w}),
    "another order of keys": ({"a": w, "b": w + 1}, {"b": w + 2, "a": w + 3}),
    "another dtype": ({"w": w}, {"w": w.to(torch.bfloat16)}),
    "another dtype of one size": ({"w": w}, {"w": w.view(torch.int32)}),
    "another shape of one size": ({"w": w}, {"w": w.reshape(10, 100)}),
    "a tensor became a leaf": ({"w": w, "v": w}, {"w": 3, "v": w}),
    "a leaf became a tensor": ({"w": 3, "v": w}, {"w": w + 1, "v": w}),
    "the only tensor became a leaf": ({"w": w}, {"w": 3}),
    "the only leaf became a tensor": ({"w": 3}, {"w": w}),
    "none became a tensor": ({"w": None}, {"w": w}),
    "a dict became a list": ({"x": {"0": w}}, {"x": [w + 1]}),
    "a list became a tuple": ({"x": [w]}, {"x": (w + 1,)}),
    "a list grew": ({"x": [w]}, {"x": [w, w + 1]}),
    "a leaf became a list with a tensor": ({"x": [1, 2]}, {"x": [1, w]}),
    "an empty dict was filled": ({"x": {}}, {"x": {"y": w}}),
    "a dict was emptied": ({"x": {"y": w}}, {"x": {}}),
    "a leaf grew": ({"x": "a"}, {"x": "a" * MIB}),
    "a leaf became another kind": ({"x": 1, "w": w}, {"x": "one", "w": w}),
    "tied became untied": ({"a": w, "b": w}, {"a": w, "b": w + 1}),
    "untied became tied": ({"a": w, "b": w + 1}, {"a": w + 2, "b": w + 2}),
    "a tensor became a parameter": ({"w": w}, {"w": nn.Parameter(w)}),
    "a tensor lies elsewhere": ({"w": w}, {"w": w.clone() + 1}),
    "contiguous became strided": ({"w": w}, {"w": torch.arange(2000.0)[::2]}),
    "a module became its dict": ({"m": nn.Linear(1, 1)}, {"m": {"weight": w}}),
}


@pytest.mark.parametrize("kind", GROWTH)
def test_what_a_state_may_become_is_saved_at_the_next_save(kind, join):
    before, after = GROWTH[kind]
    client = join()
    client.prepare(before)
    for step in range(2 if os.environ.get("FAULTS") == "long" else 1):
        client.save(before, 2 * step).wait("staged", 60)
        client.save(after, 2 * step + 1).wait("durable", 60)
        state = blank(after)
        assert client.load(state).step == 2 * step + 1
        assert not difference(state, after)


def blank(value):
    """The same structure with other values."""
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value.detach(), memory_format=torch.contiguous_format)
    if isinstance(value, dict):
        return {key: blank(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(blank(item) for item in value)
    return None


def test_a_tensor_that_grows_at_each_save_is_saved_each_time(join):
    client = join()
    handles = [client.save({"w": torch.full((n,), float(n))}, n) for n in (1, 1 << 10, 1 << 20, 3 << 20, 2)]
    client.wait("durable", 60)
    assert [handle.milestone is not None for handle in handles] == [True] * 5
    assert client.stats().plans == 5


def test_waits_for_other_words_are_refused(join):
    client = join()
    handle = client.save({"w": w}, 0)
    for wait in (client.wait, handle.wait):
        with pytest.raises(UsageError, match="no milestone is called 'saved'"):
            wait("saved")


def test_after_close_everything_says_so_and_handles_end(join):
    client = join()
    handle = client.save({"w": w}, 0).wait("durable", 60)
    client.close()
    for call in (
        lambda: client.save({"w": w}, 1),
        lambda: client.load({"w": w}),
        lambda: client.prepare({"w": w}),
        client.wait,
        client.steps,
        client.latest,
    ):
        with pytest.raises(UsageError, match="this client is closed"):
            call()
    assert handle.milestone == "durable"
    assert handle.wait("durable") is handle
    assert client.stats().saves == 1


def test_a_handle_waited_for_after_close_does_not_wait_for_ever(join, tmp_path):
    with Node(str(tmp_path)) as slow:
        slow.start("--drain-bandwidth", "4M")
        client = join(on=slow)
        handle = client.save({"w": torch.rand(1 << 21)}, 0)
        client.close()
        with pytest.raises(SaveFailedError, match="closed"):
            handle.wait("durable", 60)


def test_a_job_that_this_process_has_closed_is_free_again(join):
    for _ in range(2):
        join("again").close()


@pytest.mark.parametrize("wrong", [True, 5, "hooks.*", None, [""], [3]], ids=repr)
def test_keys_to_pickle_are_a_list_of_text(wrong, join):
    with pytest.raises(ConfigError, match=r"allow_pickle=.* is not allowed: it must be a list of keys"):
        join(allow_pickle=wrong)


def test_two_jobs_in_one_process_do_not_meet(join, job):
    one, two = join("one"), join("two")
    one.save({"w": w}, 1).wait("durable", 60)
    assert two.steps() == []
    two.save({"w": w + 1}, 2).wait("durable", 60)
    state = {"w": torch.zeros(1000)}
    assert one.load(state).step == 1
    assert torch.equal(state["w"], w)
    assert two.load(state).step == 2
    assert torch.equal(state["w"], w + 1)
    one.close()
    assert two.save({"w": w}, 3).wait("durable", 60).end == "durable"


def test_the_same_job_twice_in_one_process_learns_who_runs(tmp_path, join):
    with Node(str(tmp_path)) as node:
        node.start("--connect-timeout-s", "0.5s")
        first = join("twice", on=node)
        code = "import ckptd_client; ckptd_client.connect('twice', start=False)"
        _, said = node.run(code).communicate(timeout=120)
        assert f"'twice' is still running: rank 0 (pid {os.getpid()}" in said.decode()
        assert "takeover=True" in said.decode()
        began = time.monotonic()
        with pytest.raises(ConnectError, match=r"this process holds rank 0 of job 'twice'(.|\n)*client.close\(\)"):
            join("twice", on=node)
        assert time.monotonic() - began < 0.4, "nothing to wait for"
        assert first.save({"w": w}, 0).wait("durable", 60).end == "durable"
        second = join("twice", on=node, takeover=True)
        assert second.incarnation > first.incarnation
        old = first.save({"w": w}, 1)
        with pytest.raises(SaveFailedError, match="it ended as 'failed'"):
            old.wait("staged", 60)
        assert second.load({"w": torch.zeros(1000)}).step == 0
        assert second.save({"w": w}, 5).wait("durable", 60).end == "durable"
        assert second.steps() == [0, 5]


def test_the_public_names_are_all_there():
    for name in ckptd_client.__all__:
        assert getattr(ckptd_client, name) is not None


def test_an_arena_whose_socket_would_have_too_long_a_path_is_reported(join):
    with pytest.raises(ConfigError, match="a unix socket's may have 107"):
        join(arena="/dev/shm/" + "a" * 100)


def test_steps_may_be_any_integer_and_swapped_arguments_are_reported(join):
    client = join()
    assert client.save({"w": w}, np.int64(3)).step == 3
    assert client.save({"w": w}, torch.tensor(4)).step == 4
    with pytest.raises(UsageError, match=r"save\(state, step\)") as error:
        client.save(1, {"w": torch.zeros(10**5)})
    assert len(str(error.value)) < 300


def test_tensors_saved_separately_that_share_memory_here_must_be_equal(join):
    client = join()
    client.save({"a": torch.zeros(10), "b": torch.ones(10)}, 0).wait("durable", 60)
    one = torch.full((10,), 2.0)
    with pytest.raises(MismatchError, match=r"state\['b'\] and state\['a'\]|state\['a'\] and state\['b'\]"):
        client.load({"a": one, "b": one})
    whole = torch.zeros(20)
    with pytest.raises(MismatchError, match="share memory"):
        client.load({"a": whole[:10], "b": whole[5:15]})
    client.load({"a": whole[::2], "b": whole[1::2]})
    assert whole.sum() == 10, "interleaved tensors share no element"


def test_a_module_that_does_not_take_its_state_is_reported_where(join):
    client = join()
    client.save({"m": torch.nn.Linear(2, 3)}, 0).wait("durable", 60)
    with pytest.raises(MismatchError, match=r"state\['m'\]: Linear does not take"):
        client.load({"m": torch.nn.Linear(3, 2)})


def test_an_error_has_the_name_that_a_user_imports_and_can_be_pickled():
    error = ckptd_client.UsageError("what", hint="how")
    assert traceback.format_exception_only(error)[0] == "ckptd_client.UsageError: what\n  hint: how\n"
    again = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own
    assert type(again) is ckptd_client.UsageError
    assert str(again) == str(error)
