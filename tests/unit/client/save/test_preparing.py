"""Memory for saves that is made ready while training runs: by load, by a first save, by an optimizer's first step."""

import gc
import os
import pickle
import signal
import threading
import time
import weakref

import pytest
import torch

import ckptd_client
from ckptd_client._local import slots
from ckptd_client._save.preparing import Preparing
from tests.cluster import Node, wait_for

pytestmark = pytest.mark.timeout(240)

SLOTS = 3


def plain(n=100_000):
    return {"w": torch.arange(n), "note": "x"}


def training(n=300):
    model = torch.nn.Linear(n, n)
    return model, torch.optim.AdamW(model.parameters())


def step(model, optimizer):
    model(torch.ones(2, model.in_features)).sum().backward()
    optimizer.step()


def is_ready(client):
    """Whether all slots are here and mapped, though nobody called the client."""
    granted = list(client._link.slots.granted)
    maps = [client._link.slots._maps.get(name) for name in granted]
    return len(granted) == SLOTS and all(slot is not None and slot.populated for slot in maps)


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "ckptd-prepare"]


def test_a_load_that_restores_nothing_has_the_memory_made_and_mapped(join):
    client = join()
    assert client.load(plain()) is None
    wait_for(lambda: is_ready(client))
    wait_for(lambda: not threads())
    capacity = client._link.capacity
    handle = client.save(plain(), 1)
    assert handle.wait("durable", 60).step == 1
    assert client._link.capacity == capacity  # nothing was asked for again
    assert client.stats().plans == 1


def test_a_load_that_restores_does_too(join):
    first = join()
    first.save(plain(), 1).wait("durable", 60)
    first.close()
    client, state = join(), plain()
    assert client.load(state).step == 1
    wait_for(lambda: client._link.slots.count >= SLOTS - 1)  # one may hold the checkpoint
    wait_for(lambda: not threads())
    assert all(slot.populated for slot in client._link.slots._maps.values())
    assert client.save(state, 2).wait("durable", 60).step == 2


def test_a_first_save_has_the_slots_of_the_next_ones_mapped(join):
    client = join(drain_every=1000)
    client.save(plain(), 1)
    wait_for(lambda: client._link.slots.count == SLOTS - 1)
    wait_for(lambda: not threads())
    assert all(slot.populated for slot in client._link.slots.maps())


def test_an_optimizer_without_state_is_waited_for_until_its_first_step(join):
    """Slots for the model alone would be too small, and given up again."""
    client, (model, optimizer) = join(), training()
    state = {"model": model, "inside": [{"optimizer": optimizer}]}
    assert client.load(state) is None
    time.sleep(0.3)
    assert client._link.capacity == 0
    step(model, optimizer)
    wait_for(lambda: is_ready(client))
    capacity = client._link.capacity
    step(model, optimizer)
    client.save(state, 1).wait("durable", 60)
    assert client._link.capacity == capacity
    assert client.stats().plans == 1


def test_of_two_optimizers_the_later_one_counts(join):
    client, (one, first), (two, second) = join(), training(), training()
    assert client.load({"one": one, "first": first, "two": two, "second": second}) is None
    for _ in range(3):
        step(one, first)
    assert client._link.capacity == 0
    step(two, second)
    wait_for(lambda: is_ready(client))


def test_a_save_before_the_first_step_lets_the_state_go(join):
    client, (model, optimizer) = join(), training()
    gone = weakref.ref(model)
    client.load({"model": model, "optimizer": optimizer})
    client.save({"w": torch.ones(3)}, 1)
    model.zero_grad()
    del model
    optimizer.param_groups.clear()
    gc.collect()
    assert gone() is None
    assert not optimizer._optimizer_step_post_hooks


def test_an_optimizer_that_waits_can_be_pickled_and_its_step_never_fails(join, monkeypatch):
    client, (model, optimizer) = join(), training()
    client.load({"model": model, "optimizer": optimizer})
    assert pickle.dumps(optimizer)

    def fail(*_args, **_named):
        raise ValueError("a state_dict of the user's")

    monkeypatch.setattr(client._staging.plans, "gather", fail)
    step(model, optimizer)
    assert client._link.capacity == 0


def test_what_cannot_be_saved_is_loaded_all_the_same(join):
    client = join()
    assert client.load({"w": torch.ones(2), "f": threading.Lock()}) is None
    assert client._link.capacity == 0


def test_a_step_waits_for_no_other_thread_for_long(join):
    client, (model, optimizer) = join(), training()
    client.load({"model": model, "optimizer": optimizer})
    with Held(client):
        began = time.monotonic()
        step(model, optimizer)
        assert time.monotonic() - began < 5
    assert client._link.capacity == 0


class Held:
    """Another thread has the client's lock."""

    def __init__(self, client):
        self._lock, self._go, self._has = client._staging.lock, threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._hold)

    def _hold(self):
        with self._lock:
            self._has.set()
            self._go.wait(20)

    def __enter__(self):
        self._thread.start()
        assert self._has.wait(10)

    def __exit__(self, *_):
        self._go.set()
        self._thread.join(10)


@pytest.fixture(name="slow_pages")
def fixture_slow_pages(monkeypatch):
    """Mapping a slot takes until the test says so. Event of that, and one of that it has begun."""
    go, begun, real = threading.Event(), threading.Event(), slots.SlotMap.populate

    def populate(self, stop=lambda: False):
        begun.set()
        while not go.is_set() and not stop():
            time.sleep(0.01)
        real(self, stop)

    monkeypatch.setattr(slots.SlotMap, "populate", populate)
    yield begun
    go.set()


def test_the_thread_holds_up_no_save_and_no_load(join, slow_pages):
    client = join()
    client.load(plain())
    assert slow_pages.wait(10)
    began = time.monotonic()
    handle = client.save(plain(), 1)
    assert client.load(plain()) is not None or handle.end
    assert time.monotonic() - began < 8
    assert handle.stall_s < 4
    assert threads()


def test_close_ends_the_thread(join, slow_pages):
    client = join()
    client.load(plain())
    assert slow_pages.wait(10)
    began = time.monotonic()
    client.close()
    assert time.monotonic() - began < 5
    assert not threads()


def test_a_client_that_is_dropped_is_not_kept(node, job):
    client = ckptd_client.connect(job, store=node.store, arena=node.arena, start=False)
    client.load(plain())
    gone = weakref.ref(client)
    del client
    gc.collect()
    wait_for(lambda: gone() is None)
    wait_for(lambda: not threads())


def test_a_forked_child_ends_as_before(join, slow_pages):
    client = join()
    client.load(plain())
    assert slow_pages.wait(10)
    child = os.fork()
    if child == 0:  # pragma: no cover - the child's
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)
        client._saving.preparing.join(10)
        client.close()
        client._saving.preparing.stepped({})  # no torch: its threads are the parent's
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert threads()


def test_a_script_that_ends_without_close_ends_in_time(node, job):
    code = (
        "import sys, torch, ckptd_client\n"
        "client = ckptd_client.connect(sys.argv[1], start=False)\n"
        "client.load({'w': torch.zeros(1 << 20)})\n"
    )
    process = node.run(code, job)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert b"Traceback" not in said
    assert b"Assertion" not in said


def test_a_budget_that_is_too_small_is_said_once_and_early(tmp_path, caplog, monkeypatch):
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    with Node(str(tmp_path)) as node:
        node.start("--budget-nbytes", str(1 << 20))
        with ckptd_client.connect("job", store=node.store, arena=node.arena, start=False) as client:
            client.load(plain(200_000))
            wait_for(lambda: refusals(caplog))
            (text,) = refusals(caplog)
            assert "rank 0 needs 3 slots of" in text
            assert "raise budget_nbytes" in text
            handle = client.save(plain(200_000), 1)
            assert handle.end == "failed"
            time.sleep(0.3)
            assert len(refusals(caplog)) == 2  # and what became of the save
            client.load(plain(10))
            assert client.save(plain(10), 2).wait("durable", 60)


def refusals(caplog):
    return [text for record in caplog.records if "needs 3 slots" in (text := record.getMessage())]


def test_a_refusal_that_prepare_raised_is_not_said_again(tmp_path, caplog, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with Node(str(tmp_path)) as node:
        node.start("--budget-nbytes", str(1 << 20))
        with ckptd_client.connect("job", store=node.store, arena=node.arena, start=False) as client:
            with pytest.raises(ckptd_client.BudgetError):
                client.prepare(plain(200_000))
            time.sleep(0.3)
            assert not refusals(caplog)


def test_without_threads_saves_map_for_themselves(join, monkeypatch):
    def start(_):
        raise RuntimeError("can't start new thread")

    client = join()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        client.load(plain())
    assert isinstance(client._saving.preparing, Preparing)
    assert client.save(plain(), 1).wait("durable", 60).step == 1
