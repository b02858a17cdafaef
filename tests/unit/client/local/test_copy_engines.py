"""Saves and loads through copy engines: with one that copies the host's own memory in a thread, since there is no GPU.

What needs a GPU is in tests/gpu.
"""

import gc
import logging
import os
import threading
import time
import types

import pytest
import torch

from ckptd.shared.format.digest import BLOCK_NBYTES
from ckptd.shared.format.replica_attestations import ON_DEVICES, PART_NBYTES
from ckptd_client import SaveFailedError, UsageError
from ckptd_client._image.plan import gather, make_plan
from ckptd_client._local import copy_engines
from ckptd_client._local import slots as _slots
from ckptd_client._local.copy_engines import CopyEngine, DeviceCopy, PinningError, by_engine, flat_bytes, parts_of
from ckptd_client._save import optimizers
from ckptd_client._state import replica_slices
from ckptd_client._state.sampling import Sample
from tests.unit.client.local.engines import ThreadEngine, installed
from tests.unit.client.same import difference
from tests.unit.client.save.test_overlap import Loop, restored


@pytest.fixture
def engine(monkeypatch):
    with installed(monkeypatch) as engine:
        yield engine


def some_state(seed=0):
    torch.manual_seed(seed)
    return {
        "plain": torch.randn(300, 7),
        "turned": torch.randn(40, 30).t(),
        "sliced": torch.randn(64, 64)[::2, 1::3],
        "half": torch.randn(1000).to(torch.bfloat16),
        "eighth": torch.randn(999).to(torch.float8_e4m3fn),
        "bits": torch.randn(77) > 0,
        "complex": torch.randn(5, 6, dtype=torch.complex64).conj(),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "large": torch.randn(BLOCK_NBYTES // 4 + 1000),
    }


def zeroed(state):
    return {name: torch.zeros_like(tensor) for name, tensor in state.items()}


# --- saves


def test_what_engines_copied_is_what_was_saved(join, engine):
    state = some_state()
    saving = join()
    saving.save(state, 1).wait("staged", 60)
    assert engine.fetched >= sum(tensor.nbytes for tensor in state.values())
    assert engine.pageable == 0, "all of it went into pinned memory"
    back = zeroed(state)
    assert saving.load(back) is not None
    assert not difference(state, back)


@pytest.mark.parametrize("tier", ["arena", "pfs"])
def test_a_load_writes_devices_by_their_engine(tier, join, engine, node):
    state, saving = some_state(), join()
    saving.save(state, 1).wait("durable", 60)
    back = zeroed(state)
    if tier == "arena":
        assert saving.load(back).tier == tier
    else:
        saving.load_from(os.path.join(node.store, saving.job, "latest"), back)
    assert not difference(state, back)
    strided = {"turned"}  # through memory of the host
    assert engine.sent == sum(tensor.nbytes for name, tensor in back.items() if name not in strided)


def test_load_from_files_writes_devices_by_their_engine(join, engine, node, tmp_path):
    safetensors_torch = pytest.importorskip("safetensors.torch")
    state = {"a": torch.randn(1000), "b": torch.arange(7)}
    safetensors_torch.save_file(state, tmp_path / "x.safetensors")
    back = zeroed(state)
    join().load_from(tmp_path / "x.safetensors", back)
    assert not difference(state, back)
    assert engine.sent == sum(tensor.nbytes for tensor in state.values())


# --- pinned memory


def test_each_slot_is_registered_once_and_until_it_is_unmapped(join, engine):
    state, saving = some_state(), join()
    saving.prepare(state)
    slots = saving._link.slots.count
    assert engine.registered == slots == len(engine.pinned)
    for step in range(2 * slots):
        saving.save(state, step).wait("staged", 60)
    assert engine.registered == slots
    saving.close()
    gc.collect()
    assert (engine.undone, engine.pinned) == (slots, {})


def test_larger_slots_take_the_place_of_registered_ones(join, engine):
    saving = join()
    saving.save({"a": torch.zeros(10)}, 1).wait("staged", 60)
    before = dict(engine.pinned)
    saving.save({"a": torch.zeros(8 << 20)}, 2).wait("staged", 60)
    gc.collect()
    assert engine.undone >= len(before)
    assert engine.registered - engine.undone == len(engine.pinned)


def test_memory_that_is_still_looked_at_stays_registered(engine, tmp_path):
    path = tmp_path / "slot"
    path.write_bytes(bytes(1 << 20))
    slot = _slots.SlotMap(str(path))
    slot.pin(engine)
    slot.pin(engine)
    view = slot.bytes[5:10]
    slot.close()
    assert len(engine.pinned) == 1
    del view
    gc.collect()
    assert engine.pinned == {}


def test_a_forked_child_lets_registered_memory_alone(engine, tmp_path):
    path = tmp_path / "slot"
    path.write_bytes(bytes(1 << 20))
    slot = _slots.SlotMap(str(path))
    slot.pin(engine)
    child = os.fork()
    if not child:
        slot.close()
        del slot
        os._exit(engine.undone)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    slot.close()
    gc.collect()
    assert engine.undone == 1


def test_where_nothing_can_be_pinned_saves_go_on_and_one_warning_says_what_to_do(join, engine, caplog, monkeypatch):
    monkeypatch.setattr(_slots, "_warned", [])
    engine.refusal = "cudaHostRegister: out of memory (2)"
    state, saving = some_state(), join()
    saving.prepare(state)
    for step in range(3):
        saving.save(state, step).wait("staged", 60)
    back = zeroed(state)
    saving.load(back)
    assert not difference(state, back)
    [warning] = [record for record in caplog.records if "cannot be pinned" in record.message]
    assert warning.levelno == logging.WARNING
    assert "out of memory (2)" in warning.message
    assert "ulimit -l" in warning.message


# --- overlapped


@pytest.fixture(params=["proof", "samples"])
def verify(request):
    return request.param


@pytest.fixture
def trained(join, engine, verify):
    """A training whose saves are late, and a gate that keeps its copies."""
    loop, saving = Loop(), join()
    loop.step()
    saving.attach(loop.optimizer, verify=verify)
    engine.gate.clear()
    yield loop, saving
    engine.gate.set()


def late_save(loop, saving, engine):
    """A save whose host has nothing early to wait for."""
    return saving.save({"model": dict(loop.model.named_parameters())})


@pytest.fixture
def pure(join, engine, verify):
    """The same of parameters alone: everything is late."""
    loop, saving = Loop(), join()
    loop.step()
    saving.attach(loop.optimizer, verify=verify)
    engine.gate.clear()
    yield loop, saving
    engine.gate.set()


def test_the_step_is_held_back_on_the_device_and_the_seal_comes_after_the_copy(pure, engine):
    loop, saving = pure
    expected = {name: tensor.detach().clone() for name, tensor in loop.model.named_parameters()}
    handle = late_save(loop, saving, engine)
    time.sleep(0.2)
    assert handle.milestone is None, "sealed before its bytes were there"
    assert engine.held_back == 0
    loop.backward()
    threading.Timer(0.2, engine.gate.set).start()
    loop.optimizer.step()
    assert engine.held_back == 1
    handle.wait("staged", 60)
    back = {"model": {name: torch.zeros_like(tensor) for name, tensor in expected.items()}}
    saving.load(back)
    assert not difference(expected, back["model"])


def test_a_write_before_the_step_is_found_out_though_the_copy_is_still_to_come(pure, engine):
    loop, saving = pure
    handle = late_save(loop, saving, engine)
    with torch.no_grad():
        loop.model[0].weight.add_(1)
    threading.Timer(0.2, engine.gate.set).start()
    loop.step()
    with pytest.raises(SaveFailedError, match=r"0\.weight.*written between save and the optimizer's step"):
        handle.wait("staged", 60)


def test_what_torch_does_not_count_is_seen_in_the_samples(pure, engine):
    loop, saving = pure
    handle = late_save(loop, saving, engine)
    loop.model[0].weight.data.add_(1)  # counts nothing
    threading.Timer(0.2, engine.gate.set).start()
    loop.optimizer.step()
    with pytest.raises(SaveFailedError, match="written between save and the optimizer's step"):
        handle.wait("staged", 60)


def test_the_optimizers_own_writes_are_no_finding(pure, engine):
    loop, saving = pure
    for _ in range(5):
        handle = late_save(loop, saving, engine)
        threading.Timer(0.05, engine.gate.set).start()
        loop.step()
        handle.wait("staged", 60)
        engine.gate.clear()


def test_what_is_written_after_the_hook_is_no_finding_though_the_copy_is_still_to_come(pure, engine):
    loop, saving = pure
    engine.holds_back = False  # as a device's own queue does, and not the thread that writes
    handle = late_save(loop, saving, engine)
    saving._saving.overlapping.before_step()
    with torch.no_grad():
        loop.model[0].weight.add_(0)  # counts, and leaves the bytes as they are
    engine.gate.set()
    handle.wait("staged", 60)


def test_an_engine_that_fails_costs_the_save_and_nothing_else(pure, engine):
    loop, saving = pure
    engine.gate.set()
    engine.broken = RuntimeError("CUDA error: an illegal memory access")
    handle = late_save(loop, saving, engine)
    with pytest.raises(SaveFailedError, match="illegal memory access"):
        handle.wait("staged", 60)
    loop.step()
    engine.broken = None
    late_save(loop, saving, engine).wait("staged", 60)


def test_the_whole_training_is_exact(trained, engine):
    loop, saving = trained
    engine.gate.set()
    for _ in range(10):
        expected = loop.snapshot()
        saving.save(loop.state()).wait("staged", 60)
        loop.step(micro=2)
    assert not difference(expected, restored(saving))


# --- what is said of replicas


def said(state, *, checked, turn=5):
    """What a save says of tensors that two ranks hold; to be asked for."""
    plan = make_plan(state, rank=0, world_size=2, replicated=("*",))
    sample = Sample(turn, {stream.cut for stream in plan.streams} if checked else ())
    return gather(plan, state, None, sample)


@pytest.mark.parametrize("checked", [False, True])
def test_what_is_said_of_replicas_does_not_depend_on_where_they_lie(checked, monkeypatch):
    state = {name: tensor for name, tensor in some_state().items() if name != "complex"}
    expected = said(state, checked=checked).plain.attestations
    assert expected
    monkeypatch.setattr(replica_slices, "_ON_HOST_NBYTES", 1000)
    with installed(monkeypatch) as engine:
        assert said(state, checked=checked).plain.attestations == expected
        assert engine.fetched


def test_a_window_of_replicas_is_of_the_moment_of_the_save_and_waits_for_nothing(engine):
    state = {"a": torch.randn(100_000), "b": torch.randn(333, 333).t()}
    first = said(state, checked=True).plain.attestations
    engine.gate.clear()
    before = engine.fetches
    values = said(state, checked=True)
    assert engine.fetches == before + 1, "not of the moment"
    threading.Timer(0.1, engine.gate.set).start()
    assert values.plain.attestations == first
    assert values.plain.attestations == first


def whole(state):
    """What is said of all bytes, which devices have been told to sum up; to be asked for."""
    plan = make_plan(state, rank=0, world_size=2, replicated=("*",))
    values = gather(plan, state, None, Sample(whole=True))
    for digest in values.digests:
        digest.take()
    return values


def a_shared_state():
    return {name: tensor for name, tensor in some_state().items() if name not in {"complex", "empty"}}


def test_devices_sum_up_all_bytes_by_themselves_and_send_next_to_nothing(engine):
    (found,) = whole(a_shared_state()).plain.attestations
    assert (found,) == whole(a_shared_state()).plain.attestations
    assert found.of_all_bytes
    assert engine.fetched == 0
    assert found.content[0] >= ON_DEVICES, "not to be held against hashes of the host"


@pytest.mark.parametrize("name", sorted(a_shared_state()))
@pytest.mark.parametrize("at", ["first", "last"])
def test_a_bit_that_differs_is_found_by_devices_and_in_its_tensor(name, at, engine):
    (mine,) = whole(a_shared_state()).plain.attestations
    theirs = a_shared_state()
    raw = flat_bytes(theirs[name]).clone()
    raw[0 if at == "first" else -1] ^= 1
    theirs[name] = raw.view(theirs[name].dtype).view(theirs[name].shape)
    (other,) = whole(theirs).plain.attestations
    assert (mine.cut, mine.content[:1]) == (other.cut, other.content[:1])
    assert mine.content != other.content
    runs = [i for i in range(0, len(mine.parts), PART_NBYTES) if mine.parts[i : i + 4] != other.parts[i : i + 4]]
    assert [list(theirs)[i // PART_NBYTES] for i in runs] == [name]


def test_signs_that_all_change_are_found_by_devices(engine):
    """Two words that differ in their highest bit only would make up for each other in sums of 64-bit words."""
    state = {"a": torch.ones(4096), "b": torch.ones(4096, dtype=torch.float64)}
    turned = {name: -tensor for name, tensor in state.items()}
    assert whole(state).plain.attestations[0].content != whole(turned).plain.attestations[0].content


def test_sums_are_of_the_moment_of_the_save(engine):
    state = {"a": torch.randn(100_000)}
    expected = whole(state).plain.attestations
    values = whole(state)
    state["a"].zero_()
    assert values.plain.attestations == expected
    assert values.plain.attestations == expected


# --- graphs that are captured


def test_a_save_into_a_graph_is_refused(join, monkeypatch):
    monkeypatch.setattr(copy_engines, "is_capturing", lambda: True)
    saving = join()
    for refused in (saving.save, saving.prepare):
        with pytest.raises(UsageError, match="CUDA graph is being captured"):
            refused({"a": torch.zeros(1)})


def test_an_optimizer_whose_step_was_captured_is_copied_at_once(pure, engine, monkeypatch, caplog):
    loop, saving = pure
    engine.gate.set()
    monkeypatch.setattr(optimizers, "is_capturing", lambda: True)
    loop.step()
    monkeypatch.undo()
    monkeypatch.setitem(copy_engines._engines, torch.device("cpu"), engine)
    late_save(loop, saving, engine).wait("staged", 60)
    assert "captured in a CUDA graph" in caplog.text
    assert not saving._saving.overlapping.running


# --- parts


@pytest.mark.parametrize("nbytes", [8, 24, 100, 1000, 1 << 20])
@pytest.mark.parametrize("shape", [(), (1,), (7,), (5, 6), (3, 1, 9), (2, 3, 4, 5)])
def test_parts_are_the_whole_and_each_small_enough(shape, nbytes):
    tensor = torch.arange(torch.Size(shape).numel(), dtype=torch.int64).reshape(shape)
    turned = tensor.permute(tuple(reversed(range(len(shape)))))
    view = torch.full_like(turned, -1, memory_format=torch.contiguous_format)
    for place, part in parts_of(view, turned, nbytes):
        assert part.nbytes <= nbytes
        assert place.is_contiguous()
        place.copy_(part)
    assert torch.equal(view, turned)


def test_devices_without_an_engine_are_for_the_thread(engine):
    tensors = [torch.zeros(2), torch.zeros(2, device="meta"), torch.zeros(3)]
    assert by_engine(tensors) == {engine: [0, 2]}
    assert list(DeviceCopy(tensors).others) == [1]


def test_without_engines_nothing_is_asked_of_a_tensor():
    assert by_engine([object()] * 3) == {}


# --- the CUDA engine, on a runtime that stands in for CUDA's: its streams are the thread, its copies real


class Runtime:
    """Notes what is asked of it, in order."""

    def __init__(self):
        self.notes = []
        self.code = 0

    def stream(self, which):
        return types.SimpleNamespace(__enter__=None) if which is None else Within(self, which)

    def device(self, which):
        return Within(self, which)

    def current_stream(self, _device=None):
        return Stream(self, "current")

    def cudart(self):
        return types.SimpleNamespace(
            cudaHostRegister=lambda *given: self.note(("register", *given)) or self.code,
            cudaHostUnregister=lambda address: self.note(("unregister", address)) or 0,
        )

    def note(self, what):
        self.notes.append(what)

    def namespace(self):
        return types.SimpleNamespace(
            Stream=lambda **_: Stream(self, "side"),
            Event=lambda **options: types.SimpleNamespace(options=options, synchronize=lambda: self.note("waited")),
            stream=self.stream,
            device=self.device,
            current_stream=self.current_stream,
            cudart=self.cudart,
            CudaError=lambda code: f"error {code}",
            is_initialized=lambda: True,
            is_current_stream_capturing=lambda: False,
        )


class Within:
    def __init__(self, runtime, which):
        self.runtime, self.which = runtime, which

    def __enter__(self):
        self.runtime.note(("in", str(self.which)))

    def __exit__(self, *_):
        self.runtime.note(("out", str(self.which)))


class Stream:
    def __init__(self, runtime, name):
        self.runtime, self.name = runtime, name

    def __str__(self):
        return self.name

    def wait_event(self, event):
        self.runtime.note(("waits", self.name))

    def record_event(self, event):
        self.runtime.note(("mark", self.name))
        return event

    def synchronize(self):
        self.runtime.note(("synchronized", self.name))


@pytest.fixture
def cuda(monkeypatch):
    runtime = Runtime()
    monkeypatch.setattr(copy_engines, "_cuda", runtime.namespace())
    monkeypatch.setattr(copy_engines, "STAGING_NBYTES", 1000)
    return runtime, CopyEngine(torch.device("cpu"))


def test_the_cuda_engine_copies_after_the_mark_and_marks_the_end(cuda):
    runtime, engine = cuda
    tensors = [t for t in some_state().values() if t.nbytes < 1 << 20]
    views = [torch.empty(t.shape, dtype=t.dtype) for t in tensors]
    mark = engine.fetch(views, tensors, after=engine.now())
    for view, tensor in zip(views, tensors, strict=True):
        assert torch.equal(view.view(torch.uint8) if view.dtype == torch.float8_e4m3fn else view,
                           tensor.view(torch.uint8) if view.dtype == torch.float8_e4m3fn else tensor)  # fmt: skip
    assert runtime.notes == [
        ("mark", "current"), ("in", "side"), ("waits", "side"), ("mark", "side"), ("out", "side"),
    ]  # fmt: skip
    mark.block_stream()
    assert runtime.notes[-1] == ("waits", "current")
    mark.wait()
    assert runtime.notes[-1] == "waited"


def test_the_cuda_engine_lets_nothing_run_on_after_an_error(cuda):
    runtime, engine = cuda
    with pytest.raises(RuntimeError):
        engine.fetch([torch.zeros(3)], [torch.zeros(4)], after=engine.now())
    assert ("synchronized", "side") in runtime.notes


def test_the_cuda_engine_compares_and_sends(cuda):
    _, engine = cuda
    tensors = [torch.arange(600).reshape(20, 30).t(), torch.tensor(float("nan")), torch.zeros(9, dtype=torch.bool)]
    views = [tensor.contiguous().clone() for tensor in tensors]
    assert engine.differing(views, tensors) == []
    views[0][29, 19] += 1
    views[2][8] = True
    assert engine.differing(views, tensors) == [0, 2]
    places = [torch.zeros(5, dtype=torch.uint8) for _ in range(2)]
    engine.send(places, [torch.full((5,), i, dtype=torch.uint8) for i in (3, 4)])
    assert [int(place.sum()) for place in places] == [15, 20]


def test_the_cuda_engine_registers_on_its_device_and_undoes_it(cuda):
    runtime, engine = cuda
    undo = engine.register(4096, 8192)
    assert runtime.notes == [("in", "cpu"), ("register", 4096, 8192, 1), ("out", "cpu")]
    undo()
    assert runtime.notes[3:] == [("in", "cpu"), ("unregister", 4096), ("out", "cpu")]
    runtime.code = 2
    with pytest.raises(PinningError, match="cudaHostRegister: error 2"):
        engine.register(4096, 8192)


def test_the_thread_engine_has_what_the_engine_has():
    wanted = {name for name in vars(copy_engines.CopyEngine) if not name.startswith("_")}
    assert wanted <= set(dir(ThreadEngine))
