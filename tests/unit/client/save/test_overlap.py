"""Overlapped saves: what an attached optimizer writes is copied while training goes on, and is exact or not at all."""

import contextlib
import copy
import os
import random
import threading
import time
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ckptd_client import SaveFailedError, UsageError, WaitTimeoutError
from ckptd_client._save.late.thread import Overlap
from tests.unit.client.same import difference

SAVES = 200 if os.environ.get("FAULTS") == "long" else 25


@pytest.fixture
def held(monkeypatch):
    """Late copies that wait until they are let go."""
    gate = threading.Event()
    copy_now = Overlap._copy
    monkeypatch.setattr(Overlap, "_copy", lambda overlap: (gate.wait(30), copy_now(overlap)))
    yield gate
    gate.set()


def model(seed=0, width=16):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Linear(width, width))


class Loop:
    """A small training."""

    def __init__(self, optimizer=torch.optim.AdamW, seed=0, **options):
        self.model = model(seed)
        self.optimizer = optimizer(self.model.parameters(), lr=0.01, **options)
        self.at = 0

    def state(self):
        return {"model": self.model, "optimizer": self.optimizer, "at": self.at}

    def backward(self, micro=1):
        self.optimizer.zero_grad(set_to_none=True)
        for _ in range(micro):
            self.model(torch.randn(8, 16)).square().mean().backward()

    def step(self, micro=1):
        self.backward(micro)
        self.optimizer.step()
        self.at += 1

    def snapshot(self):
        return copy.deepcopy(self.plain())

    def plain(self):
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "at": self.at}


def restored(client, **options):
    """What a load brings back, into a training of its own."""
    other = Loop(seed=99, **options)
    other.step()
    return loaded(client, other)


def loaded(client, loop):
    """The training after a load into it."""
    state = loop.state()
    assert client.load(state) is not None
    loop.at = state["at"]
    return loop.plain()


@pytest.fixture
def begun(join):
    """A client with a training whose optimizer is attached and has state."""
    loop, client = Loop(), join()
    loop.step()
    client.attach(loop.optimizer, verify="samples")
    return loop, client


@pytest.fixture
def trained(begun, held):
    """The same, with late copies held."""
    return begun


@pytest.fixture
def let_go(trained, held):
    """Late copies begin at once."""
    held.set()


def test_the_step_waits_for_the_copy_and_what_was_saved_is_from_before_it(trained, held):
    loop, client = trained
    expected = loop.snapshot()
    handle = client.save(loop.state())
    assert handle.stall_s < 5
    loop.backward()
    threading.Timer(0.3, held.set).start()
    began = time.monotonic()
    loop.optimizer.step()
    assert 0.2 < time.monotonic() - began < 5
    handle.wait("staged", 60)
    assert handle.stall_s > 0.2  # the hook is part of it
    assert not difference(expected, restored(client))


def test_without_attach_nothing_is_late(join, held):
    loop, client = Loop(), join()
    loop.step()
    client.save(loop.state()).wait("staged", 60)


def test_the_save_becomes_staged_though_none_steps_or_asks(trained, let_go):
    loop, client = trained
    handle = client.save(loop.state())
    deadline = time.monotonic() + 20
    while handle.milestone is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert handle.milestone is not None


def test_a_step_that_raises_after_the_save_costs_nothing(trained, let_go):
    loop, client = trained
    expected = loop.snapshot()
    handle = client.save(loop.state())
    with pytest.raises(ZeroDivisionError):
        raise ZeroDivisionError
    handle.wait("staged", 60)
    assert not difference(expected, restored(client))


def test_saves_at_random_points_equal_synchronous_copies(trained, let_go):
    loop, client = trained
    chance = random.Random(5)
    other = Loop(seed=99)
    other.step()
    for _ in range(SAVES):
        for _ in range(chance.randrange(3)):
            loop.step(micro=chance.randint(1, 3))
        expected = loop.snapshot()
        handle = client.save(loop.state())
        if chance.random() < 0.8:
            loop.step(micro=chance.randint(1, 3))
        handle.wait("staged", 60)
        assert not difference(expected, loaded(client, other))


def test_a_second_save_waits_for_the_first(trained, held):
    loop, client = trained
    first = client.save(loop.state())
    threading.Timer(0.3, held.set).start()
    expected = loop.snapshot()
    second = client.save(loop.state())
    second.wait("staged", 60)
    assert first.save_id < second.save_id
    assert first.milestone is not None or str(first.end) == "superseded"
    assert not difference(expected, restored(client))


def test_a_load_while_the_copy_runs_waits_for_it(trained, held):
    loop, client = trained
    warm_copy = loop.snapshot()
    client.save(loop.state())
    threading.Timer(0.3, held.set).start()
    client.load(loop.state())
    assert not difference(warm_copy, loop.snapshot())


def test_a_copy_that_does_not_end_in_time_lets_the_step_go_and_fails_the_save(join, held):
    loop, client = Loop(), join(save_timeout_s=1)
    loop.step()
    client.attach(loop.optimizer, verify="samples")
    client.prepare(loop.state())
    handle = client.save(loop.state())
    began = time.monotonic()
    loop.step()
    assert time.monotonic() - began < 20
    held.set()
    with pytest.raises(SaveFailedError, match="save_timeout_s"):
        handle.wait("staged", 60)
    expected = loop.snapshot()
    client.save(loop.state()).wait("staged", 60)
    assert not difference(expected, restored(client))


def test_close_hands_the_last_save_over(trained, join, held):
    loop, client = trained
    expected = loop.snapshot()
    client.save(loop.state())
    threading.Timer(0.3, held.set).start()
    client.close()
    again = join()
    assert not difference(expected, restored(again))


# --- who writes besides step()


def _in_place(loop):
    with torch.no_grad():
        loop.model[0].weight.mul_(2)


def _by_data(loop):
    loop.model[0].weight.data.add_(1)


def _by_numpy(loop):
    loop.model[0].weight.detach().numpy()[:] += 1


def _optimizer_state(loop):
    next(iter(loop.optimizer.state.values()))["exp_avg"].zero_()


def _sam_ascent(loop):
    loop.backward()
    with torch.no_grad():
        for parameter in loop.model.parameters():
            parameter.add_(parameter.grad, alpha=0.1)


def _lora_merge(loop):
    weight = loop.model[0].weight
    weight.data += torch.randn(16, 2) @ torch.randn(2, 16)


def _average(loop):
    with torch.no_grad():
        for parameter in loop.model.parameters():
            parameter.lerp_(torch.zeros_like(parameter), 0.5)


WRITES = [_in_place, _by_data, _by_numpy, _optimizer_state, _sam_ascent, _lora_merge, _average]


@pytest.mark.parametrize("write", WRITES)
def test_a_write_before_the_step_is_found_out(trained, held, write):
    loop, client = trained
    handle = client.save(loop.state())
    write(loop)
    held.set()
    loop.backward()
    loop.optimizer.step()
    with pytest.raises(SaveFailedError, match="was written"):
        handle.wait("staged", 60)
    # From now on such tensors are copied before save returns: the same write does no harm any more.
    for _ in range(20):  # each save finds out some: in the end all are known
        held.clear()
        expected = loop.snapshot()
        handle = client.save(loop.state())
        write(loop)
        held.set()
        loop.optimizer.step()
        with contextlib.suppress(SaveFailedError):
            handle.wait("staged", 60)
            break
    assert not difference(expected, restored(client))


def test_a_write_to_a_dtensor_is_counted(join, held, lone_group):
    mesh = init_device_mesh("cpu", (1,))
    net = nn.Sequential(*[nn.Linear(16, 16) for _ in range(40)])
    fully_shard(net, mesh=mesh)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    client, state = join(), {"net": net}
    client.attach(optimizer, verify="samples")
    handle = client.save(state)
    with torch.no_grad():
        for parameter in list(net.parameters())[1::8]:
            parameter.view(-1)[15:].add_(1)  # not where samples are
    held.set()
    optimizer.step()
    with pytest.raises(SaveFailedError, match="was written"):
        handle.wait("staged", 60)


def test_memory_that_parameters_in_the_state_are_given_is_no_part_of_the_save(trained, held):
    loop, client = trained
    state = {"p": dict(loop.model.named_parameters())}
    expected = {name: parameter.detach().clone() for name, parameter in state["p"].items()}
    handle = client.save(state)
    kept = [parameter.data for parameter in loop.model.parameters()]
    for parameter in loop.model.parameters():
        parameter.data = torch.zeros_like(parameter)
    held.set()
    loop.optimizer.step()
    assert kept
    handle.wait("staged", 60)
    client.load(state)
    assert not difference(expected, state["p"])


def test_a_larger_state_is_prepared_while_a_copy_runs(trained, held):
    loop, client = trained
    first = client.save(loop.state())
    threading.Timer(0.3, held.set).start()
    larger = loop.state() | {"more": torch.zeros(1 << 20)}
    client.prepare(larger)
    first.wait("staged", 60)
    for _ in range(4):
        client.save(larger).wait("staged", 60)


def test_the_wait_in_the_hook_counts_as_stall(trained, held):
    loop, client = trained
    before = client.stats().stall_s
    client.save(loop.state())
    loop.backward()
    threading.Timer(0.3, held.set).start()
    loop.optimizer.step()
    assert client.stats().stall_s - before > 0.2


def test_a_thread_that_cannot_be_started_leaks_nothing(trained, held, monkeypatch):
    loop, client = trained

    def none_left(_):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(Overlap, "start", none_left)
        for _ in range(5):
            handle = client.save(loop.state())
            assert str(handle.end) == "failed", handle
    assert not client._staging._segments
    assert not client._link.unsealed
    held.set()
    client.save(loop.state()).wait("staged", 60)


def test_swapping_memory_with_an_average_leaves_the_old_memory_to_the_copy(trained, held):
    loop, client = trained
    expected = loop.snapshot()
    handle = client.save(loop.state())
    kept = [parameter.data for parameter in loop.model.parameters()]
    for parameter in loop.model.parameters():
        parameter.data = torch.zeros_like(parameter)
    held.set()
    loop.step()
    handle.wait("staged", 60)
    assert kept
    assert not difference(expected, restored(client))


def test_parameters_that_are_replaced_or_resized_after_attach_are_followed(trained, let_go):
    loop, client = trained
    for width in (16, 24):
        loop.model[2] = nn.Linear(16, width)
        loop.optimizer.param_groups[0]["params"] = list(loop.model.parameters())
        loop.optimizer.state.clear()
        loop.step()
        expected = copy.deepcopy(loop.plain())
        handle = client.save(loop.state())
        loop.step()
        handle.wait("staged", 60)
        other = Loop(seed=7)
        other.model[2] = nn.Linear(16, width)
        other.optimizer = torch.optim.AdamW(other.model.parameters(), lr=0.01)
        assert not difference(expected, loaded(client, other))


def test_what_left_the_optimizer_is_copied_at_once(trained, held):
    loop, client = trained
    frozen = loop.model[2]
    loop.optimizer.param_groups[0]["params"] = list(loop.model[0].parameters())
    for parameter in frozen.parameters():
        loop.optimizer.state.pop(parameter, None)
    for parameter in loop.model[1].parameters():
        loop.optimizer.state.pop(parameter, None)
    expected = copy.deepcopy(frozen.state_dict())
    handle = client.save(loop.state())
    with torch.no_grad():
        frozen.weight.zero_()
    held.set()
    loop.optimizer.step()
    handle.wait("staged", 60)
    other = Loop(seed=5)
    other.optimizer.param_groups[0]["params"] = list(other.model[0].parameters())
    client.load({"model": other.model, "optimizer": other.optimizer, "at": 0})
    assert not difference(expected, other.model[2].state_dict())


# --- kinds of optimizers


@pytest.mark.parametrize("options", [{"foreach": True}, {"foreach": False}, {"fused": True}, {"amsgrad": True}])
def test_every_implementation_of_a_step_waits(join, held, options):
    loop, client = Loop(**options), join()
    loop.step()
    client.attach(loop.optimizer, verify="samples")
    expected = loop.snapshot()
    handle = client.save(loop.state())
    threading.Timer(0.2, held.set).start()
    loop.step()
    handle.wait("staged", 60)
    assert not difference(expected, restored(client, **options))


def test_several_optimizers_each_wait(join, held):
    net = model()
    first = torch.optim.SGD(net[0].parameters(), lr=0.1, momentum=0.9)
    second = torch.optim.Adam(net[2].parameters(), lr=0.1)
    client = join()

    def backward():
        net(torch.randn(8, 16)).square().mean().backward()

    backward()
    first.step(), second.step()
    client.attach(first, second, verify="samples")
    client.attach(second)  # once is enough
    state = {"net": net, "first": first, "second": second}
    expected = copy.deepcopy({name: value.state_dict() for name, value in state.items()})
    handle = client.save(state)
    backward()
    threading.Timer(0.3, held.set).start()
    began = time.monotonic()
    second.step()
    assert time.monotonic() - began > 0.2
    first.step()
    handle.wait("staged", 60)
    client.load(state)
    assert not difference(expected, {name: value.state_dict() for name, value in state.items()})


def test_optimizers_that_step_in_threads_of_their_own_each_wait(join, held):
    parameters = [nn.Parameter(torch.zeros(16)) for _ in range(2)]
    optimizers = [torch.optim.SGD([parameter], lr=1.0) for parameter in parameters]
    client = join()
    client.attach(*optimizers, verify="samples")
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    handle = client.save({"w": parameters})
    threads = [threading.Thread(target=optimizer.step) for optimizer in optimizers]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    assert [parameter.sum().item() for parameter in parameters] == [0, 0]
    held.set()
    for thread in threads:
        thread.join(20)
    handle.wait("staged", 60)
    assert [parameter.sum().item() for parameter in parameters] == [-16, -16]


def test_a_grad_scaler_that_skips_a_step_and_one_that_takes_it(trained, held):
    loop, client = trained
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for bad in (True, False):
        held.clear()
        expected = loop.snapshot()
        handle = client.save(loop.state())
        loop.optimizer.zero_grad()
        scaler.scale(loop.model(torch.randn(8, 16)).mean()).backward()
        if bad:
            loop.model[0].weight.grad[0, 0] = torch.inf
        threading.Timer(0.2, held.set).start()
        scaler.step(loop.optimizer)
        scaler.update()
        handle.wait("staged", 60)
        assert not difference(expected, restored(client))


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_may_be_cleared_and_made_while_the_copy_runs(trained, held, to_none):
    """They are no part of what is copied late: in the state they are copied before save returns."""
    loop, client = trained
    loop.backward()
    state = loop.state() | {"grads": [parameter.grad for parameter in loop.model.parameters()]}
    expected = copy.deepcopy((loop.plain(), state["grads"]))
    handle = client.save(state)
    loop.optimizer.zero_grad(set_to_none=to_none)
    loop.model(torch.randn(8, 16)).mean().backward()
    threading.Timer(0.2, held.set).start()
    loop.optimizer.step()
    handle.wait("staged", 60)
    state["grads"] = [torch.zeros_like(parameter) for parameter in loop.model.parameters()]
    client.load(state)
    assert not difference(expected, (loop.plain(), state["grads"]))


def test_an_optimizer_whose_step_calls_no_hooks_is_not_trusted(join, held, caplog):
    class Own(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {})

        @torch.no_grad()
        def step(self):
            for parameter in self.param_groups[0]["params"]:
                parameter.sub_(1)

    net, client = nn.Linear(4, 4), join()
    own = Own(net.parameters())
    Own.step = Own.step.__wrapped__
    client.attach(own, verify="samples")
    for _ in range(5):
        client.save({"net": net}).wait("staged", 60)  # held, and yet it ends
        own.step()
    assert "calls no hooks" in caplog.text


@pytest.mark.parametrize("mark", ["_in_backward_optimizers", "_is_flat_param", "_fsdp_flattened", "ds_id"])
def test_parameters_that_others_write_are_copied_at_once(join, held, mark):
    loop, client = Loop(), join()
    setattr(loop.model[0].weight, mark, True)
    client.attach(loop.optimizer, verify="samples")
    for _ in range(5):
        client.save(loop.state()).wait("staged", 60)
        loop.step()


def test_an_embedding_with_max_norm_is_found_out_and_then_copied_at_once(join, held):
    net, client = nn.Embedding(10, 4, max_norm=0.1), join()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    client.attach(optimizer, verify="samples")
    first = client.save({"net": net})
    net(torch.arange(10)).sum().backward()  # writes the weight
    held.set()
    optimizer.step()
    with pytest.raises(SaveFailedError, match="was written"):
        first.wait("staged", 60)
    held.clear()
    for _ in range(3):
        client.save({"net": net}).wait("staged", 60)
        net(torch.arange(10)).sum().backward()
        optimizer.step()


def test_a_compiled_step_waits_too(join, held):
    loop, client = Loop(torch.optim.SGD), join()
    loop.step()
    client.attach(loop.optimizer, verify="samples")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step = torch.compile(loop.optimizer.step, backend="eager")
        loop.backward()
        step()
        expected = loop.snapshot()
        handle = client.save(loop.state())
        loop.backward()
        threading.Timer(0.3, held.set).start()
        step()
    try:
        handle.wait("staged", 60)
    except SaveFailedError:
        return  # a step unheard is found out; both are right
    state = {"model": loop.model, "optimizer": loop.optimizer, "at": 0}
    client.load(state)
    assert not difference(expected, {**loop.plain(), "at": expected["at"]})


# --- misuse, and kinds of tensors


@pytest.mark.parametrize("wrong", [None, "adam", nn.Linear(1, 1), torch.optim.lr_scheduler.ConstantLR])
def test_what_is_no_optimizer_is_reported(join, wrong):
    with pytest.raises(UsageError, match="attach"):
        join().attach(wrong)


def test_attach_of_nothing_is_reported(join):
    with pytest.raises(UsageError, match="no optimizer"):
        join().attach()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.float8_e4m3fn])
def test_any_dtype_can_be_late(join, held, dtype):
    values = torch.randn(8, 8).to(dtype)
    parameters = [nn.Parameter(values.clone(), requires_grad=False), nn.Parameter(values.t(), requires_grad=False)]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    optimizer.state[parameters[0]] = {"mask": torch.ones(3, dtype=torch.bool), "none": torch.empty(0, 4)}
    client = join()
    client.attach(optimizer, verify="samples")
    state = {"p": parameters, "mask": optimizer.state[parameters[0]]}
    for _ in range(4):
        handle = client.save(state)
        held.set()
        optimizer.step()
        handle.wait("staged", 60)
        held.clear()
    for tensor in (*parameters, state["mask"]["mask"]):
        tensor.data.zero_()
    client.load(state)
    assert not difference([values, values.t(), torch.ones(3, dtype=torch.bool)], [*parameters, state["mask"]["mask"]])


def test_waiting_for_a_copy_that_is_held_ends_with_its_timeout(trained, held):
    loop, client = trained
    handle = client.save(loop.state())
    with pytest.raises(WaitTimeoutError):
        handle.wait("staged", 0.5)
    held.set()
    handle.wait("staged", 20)
