"""Saves and loads of CUDA tensors: every bit, pinned once, without allocating."""

import gc
import os

import pytest
import torch

from ckptd_client._image.plan import gather, make_plan
from ckptd_client._local import slots as _slots
from ckptd_client._local.copy_engines import CopyEngine, PinningError, engine_of
from ckptd_client._state.sampling import Sample
from tests.unit.client.same import difference

DTYPES = [
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.complex64, torch.int64, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip


def a_state(device, seed=0):
    torch.manual_seed(seed)
    dtypes = {str(dtype): torch.randn(1013).to(dtype).to(device) for dtype in DTYPES}
    return dtypes | {
        "turned": torch.randn(400, 300, device=device).t(),
        "sliced": torch.randn(64, 64, device=device)[::2, 1::3],
        "conjugate": torch.randn(5, 6, dtype=torch.complex64, device=device).conj(),
        "large and turned": torch.randn(5000, 3000, device=device).t(),
        "large": torch.randn(9_000_001, device=device),
        "scalar": torch.tensor(3.5, device=device),
        "empty": torch.empty(0, 4, device=device),
        "on the host": torch.randn(1000),
        "plain": 7,
    }


def zeroed(state):
    return {name: torch.zeros_like(t) if isinstance(t, torch.Tensor) else 0 for name, t in state.items()}


def on_host(state):
    return {name: t.cpu() if isinstance(t, torch.Tensor) else t for name, t in state.items()}


@pytest.mark.parametrize("tier", ["arena", "pfs"])
def test_every_bit_comes_back(tier, join, device, node):
    state, client = a_state(device), join()
    client.save(state, 1).wait("durable", 100)
    back = zeroed(state)
    if tier == "arena":
        assert client.load(back).tier == tier
    else:
        client.load_from(os.path.join(node.store, client.job, "latest"), back)
    assert not difference(on_host(state), on_host(back))
    assert back["large"].device == device


def test_each_slot_is_pinned_once(join, device, registered):
    state, client = {"a": torch.randn(1 << 20, device=device)}, join()
    client.prepare(state)
    slots = client._link.slots.maps()
    assert len(registered) == len(slots)
    assert all(slot.bytes.is_pinned() for slot in slots)
    del slots
    for step in range(8):
        state["a"].add_(1)
        client.save(state, step).wait("staged", 20)
    assert len(registered) == len(set(registered)) == client._link.slots.count
    client.close()
    gc.collect()


def test_memory_that_cannot_be_pinned_is_reported_and_leaves_no_error_behind(device):
    with pytest.raises(PinningError, match=r"cudaHostRegister: .+"):
        engine_of(device).register(1 << 46, 1 << 20)
    assert torch.ones(3, device=device).sum().item() == 3


def test_without_pinned_memory_every_bit_comes_back_too(join, device, monkeypatch, caplog):
    def refuse(*_):
        raise PinningError("cudaHostRegister: not here")

    monkeypatch.setattr(CopyEngine, "register", refuse)
    monkeypatch.setattr(_slots, "_warned", [])
    state, client = a_state(device), join()
    client.save(state, 1).wait("staged", 60)
    back = zeroed(state)
    client.load(back)
    assert not difference(on_host(state), on_host(back))
    assert caplog.text.count("cannot be pinned") == 1


def test_a_save_allocates_nothing(join, device):
    state, client = {k: v for k, v in a_state(device).items() if k != "plain"}, join()
    client.prepare(state)
    for step in range(4):
        client.save(state, step).wait("staged", 20)
    before, rss = torch.cuda.memory_stats(device)["allocation.all.allocated"], anonymous_nbytes()
    for step in range(4, 14):
        client.save(state, step).wait("staged", 20)
    assert torch.cuda.memory_stats(device)["allocation.all.allocated"] == before
    assert anonymous_nbytes() - rss < 4 << 20


def anonymous_nbytes():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon"))


@pytest.mark.parametrize("stream", ["default", "own"])
def test_values_are_those_that_were_queued_before_save(stream, join, device, busy):
    client = join()
    with torch.cuda.stream(torch.cuda.Stream() if stream == "own" else torch.cuda.default_stream()):
        state = {"a": torch.zeros(1 << 20, device=device)}
        client.prepare(state)
        busy(0.3)
        state["a"].add_(5)
        handle = client.save(state, 1)
        state["a"].zero_()
        handle.wait("staged", 20)
        busy(0.3)
        state["a"].fill_(9)  # still to be done when load is called
        client.load(state)
        assert state["a"].eq(5).all().item()


def test_memory_that_is_freed_is_not_reused_under_a_copy(device):
    engine = engine_of(device)
    view = torch.zeros(4 << 20, dtype=torch.uint8, pin_memory=True)
    tensor = torch.full((4 << 20,), 3, dtype=torch.uint8, device=device)
    with torch.cuda.stream(engine._stream):
        torch.cuda._sleep(200_000_000)
    mark = engine.fetch([view], [tensor], after=engine.now(), lasting=True)
    address = tensor.data_ptr()
    del tensor
    other = torch.full((4 << 20,), 9, dtype=torch.uint8, device=device)
    assert other.data_ptr() != address
    mark.wait()
    assert view.eq(3).all()


@pytest.mark.parametrize("checked", [False, True])
def test_what_is_said_of_replicas_is_the_same_as_of_tensors_on_the_host(checked, device):
    state = {"a": torch.randn(3000, 100, device=device), "b": torch.randn(70, 30, device=device).t()}
    host = {name: tensor.cpu() for name, tensor in state.items()}
    said = []
    for values in (state, host):
        plan = make_plan(values, rank=0, world_size=2, replicated=("*",))
        sample = Sample(5, {stream.cut for stream in plan.streams} if checked else ())
        said.append(gather(plan, values, None, sample).plain.attestations)
    assert said[0] == said[1]
    assert said[0]


def test_all_that_replicas_hold_is_summed_up_on_the_device(device):
    def said(state):
        plan = make_plan(state, rank=0, world_size=2, replicated=("*",))
        return gather(plan, state, None, Sample(whole=True)).plain.attestations[0]

    state = {"a": torch.randn(3000, 1001, device=device), "b": torch.randn(71, 33, device=device).bfloat16().t()}
    values = {name: tensor.clone() for name, tensor in state.items()}
    before = torch.cuda.memory_allocated(device)
    mine = said(state)
    assert mine == said(values)
    assert torch.cuda.memory_allocated(device) - before < 64 << 20
    values["b"][-1, -1] += 1
    other = said(values)
    assert mine.content[:1] == other.content[:1]
    assert mine.content != other.content
    assert mine.parts[:4] == other.parts[:4], "a is the same"


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_tensors_of_two_devices(join):
    state = {f"{i}": torch.randn(1 << 20, device=torch.device("cuda", i)) for i in range(2)}
    client = join()
    client.save(state, 1).wait("staged", 20)
    back = zeroed(state)
    client.load(back)
    assert not difference(on_host(state), on_host(back))
