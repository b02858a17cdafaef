"""What is copied while training goes on is what was saved, or the save fails: whoever writes, in whatever way."""

import ctypes
import errno
import mmap
import os
import threading
import time

import pytest
import torch

from ckptd_client import SaveFailedError
from ckptd_client._local.late_memory import LateMemory, late_memory
from ckptd_client._local.page_guard import HUGE_NBYTES, NoProofError, PageGuard, Range, pieces
from ckptd_client._save.late import copies as late_copies
from ckptd_client._save.late import overlapping
from ckptd_client._save.late.thread import Overlap
from ckptd_client._save.slot_writer import copy_all
from tests.cluster import ROOT, wait_for
from tests.unit.client.save.writers import (
    EITHER,
    NBYTES,
    NO_HARM,
    WRITERS,
    Touch,
    Victim,
    average_in_and_back,
    data_copy,
    dlpack,
    foreach,
    in_place,
    load_state_dict,
    memory_of,
    numpy_alias,
    same_bits_again,
    sharpness_ascent,
    thread,
    unattached_fused,
)

LONG = os.environ.get("FAULTS") == "long"
MOMENTS = ("before the copy", "in mid-copy", "during a slowed copy", "after the copy")
CASES = [  # each writer at one moment, and one of them at each
    (writer, name)
    for number, writer in enumerate(WRITERS)
    for name in (MOMENTS if LONG or writer is in_place else (MOMENTS[number % len(MOMENTS)],))
]


def _refusal():
    try:
        late_memory()
    except NoProofError as error:
        return str(error)
    return ""


pytestmark = [pytest.mark.skipif(bool(_refusal()), reason=_refusal()), pytest.mark.timeout(240)]


class Moment:
    """Runs something at one moment of the next late copy."""

    def __init__(self, monkeypatch, name):
        self.name, self.act, self.count = name, lambda: None, 0
        self.done = threading.Event()
        self._copy = late_copies.copy
        monkeypatch.setattr(late_copies, "copy", self.copy)
        monkeypatch.setattr(late_copies, "batches", self.batches)

    def batches(self, found):
        """Small ones: a copy has a middle."""
        for to, start, nbytes in found.tolist():
            for done in range(0, nbytes, 1 << 20):
                yield pieces([(to + done, start + done, min(1 << 20, nbytes - done))])

    def copy(self, found):
        self.count += 1
        if self.count == {"before the copy": 1, "in mid-copy": 5, "during a slowed copy": 3}.get(self.name, 0):
            self.act()
            self.done.set()
        if self.name == "during a slowed copy":
            time.sleep(0.01)
        self._copy(found)


@pytest.fixture
def late(join, job):
    """Makes a Victim whose saves are late, as far as its memory can be, and its client."""
    made = []

    def make(kind="malloc", **options):
        victim, client = Victim(kind), join(f"{job}-{len(made)}")
        made.append(victim)
        client.attach(victim.optimizer, **options)
        client.save(victim.state).wait("staged", 60)
        wait_for(lambda: not late_memory().busy)
        victim.optimizer.step()
        return victim, client

    yield make
    for victim in made:
        victim.keep.clear()


def outcome(victim, client, act, moment):
    """Whether the save failed; asserts that it is exact otherwise."""
    expected = {name: tensor.detach().clone() for name, tensor in victim.state.items()}
    moment.act = act
    handle = client.save(victim.state)
    nbytes = client.stats().last_late_nbytes
    if moment.name == "after the copy":
        wait_for(
            lambda: client._saving.overlapping._running is None or client._saving.overlapping._running._copied.is_set()
        )
        act()
    elif nbytes:
        assert moment.done.wait(30)
    victim.optimizer.step()
    try:
        handle.wait("staged", 60)
    except SaveFailedError:
        assert handle.reason.startswith("'large': it was written"), handle.reason
        return nbytes, True
    back = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    assert client.load(back) is not None
    for name, tensor in expected.items():
        assert torch.equal(back[name], tensor), f"{name} came back wrong in silence"
    return nbytes, False


@pytest.mark.parametrize(("writer", "name"), CASES, ids=lambda part: getattr(part, "__name__", part))
def test_no_writer_is_silent(writer, name, late, monkeypatch):
    for _ in range(3 if LONG else 1):
        kind = memory_of(writer)
        victim, client = late(kind)
        with monkeypatch.context() as patched:
            moment = Moment(patched, name)
            nbytes, failed = outcome(victim, client, lambda victim=victim: writer(victim), moment)
        assert bool(nbytes) == (kind != "shared"), "what is tested is not late"
        if writer not in EITHER:  # what is written after the copy does no harm
            assert failed == (name != "after the copy" and writer not in NO_HARM)
        client.close()


@pytest.mark.parametrize("view", ["transposed", "conjugate"])
def test_another_view_of_the_same_memory_is_saved_as_it_is(view, late):
    """One that lies otherwise, at the same address, of the same shape: its bytes are not those that are saved."""
    victim, client = late()
    side = 1024
    dtype = torch.complex64 if view == "conjugate" else torch.float32
    memory = victim.large.detach().view(dtype)[: side * side].view(side, side)
    client.save({"w": memory}).wait("staged", 60)
    wait_for(lambda: not late_memory().busy)
    assert client.save({"w": memory}).wait("staged", 60)
    assert client.stats().last_late_nbytes
    victim.optimizer.step()
    shown = memory.t() if view == "transposed" else memory.conj()
    expected = shown.clone()
    client.save({"w": shown}).wait("staged", 60)
    back = {"w": torch.zeros(side, side, dtype=dtype)}
    client.load(back)
    assert torch.equal(back["w"], expected)


def test_two_clients_of_one_memory_are_in_each_others_way_and_never_wrong(late, join, job, monkeypatch):
    """What one copies under its protection, the other copies before save returns."""
    victim, client = late()
    other = join(f"{job[:50]}-b")
    other.attach(victim.optimizer)
    moment = Moment(monkeypatch, "in mid-copy")
    moment.act = lambda: other.save(victim.state)
    expected = victim.large.detach().clone()
    handle = client.save(victim.state)
    assert moment.done.wait(20)
    victim.optimizer.step()
    handle.wait("staged", 60)
    for one in (client, other):
        back = {name: torch.zeros_like(tensor) for name, tensor in victim.state.items()}
        one.load(back)
        assert torch.equal(back["large"], expected)


@pytest.mark.parametrize("when", ["before its thread has begun", "when it copies"])
def test_a_copy_whose_begin_is_interrupted_ends_no_other_copy(when, late, monkeypatch):
    victim, client = late()
    start, run, go_on = threading.Thread.start, Overlap._run, threading.Event()

    def late_run(overlap):
        """A thread that the system has made, and not let run yet."""
        go_on.wait(10)
        run(overlap)

    def interrupted(thread):
        start(thread)
        if thread.name == "ckptd-overlap":
            raise KeyboardInterrupt

    if when == "before its thread has begun":
        monkeypatch.setattr(Overlap, "_run", late_run)
        threading.Timer(1.0, go_on.set).start()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            client.save(victim.state)
    victim.optimizer.step()
    for _ in range(3):
        expected = victim.large.detach().clone()
        handle = client.save(victim.state)
        victim.optimizer.step()
        handle.wait("staged", 60)
    back = {name: torch.zeros_like(tensor) for name, tensor in victim.state.items()}
    client.load(back)
    assert torch.equal(back["large"], expected)
    client.close()
    assert client._saving.overlapping._running is None


def test_the_document_names_every_writer():
    with open(os.path.join(ROOT, "docs/failures.md")) as file:
        text = file.read().split("## Which code may write", 1)[1].split("\n## ", 1)[0]
    assert all(f"`{writer.__name__}`" in text for writer in WRITERS)


def test_a_step_that_was_replaced_on_the_instance_is_an_objection(late, caplog):
    victim, client = late()
    victim.optimizer.step = lambda: in_place(victim)
    client.save(victim.state).wait("staged", 60)
    assert "was replaced on the instance" in caplog.text
    assert client.stats().last_late_nbytes == 0
    del victim.optimizer.step
    torch.optim.lr_scheduler.ConstantLR(victim.optimizer)  # puts its own around the class's
    client.save(victim.state).wait("staged", 60)
    assert client.stats().last_late_nbytes > 0


def test_a_save_that_none_disturbs_is_staged_late_and_the_memory_is_free_again(late, monkeypatch):
    victim, client = late()
    moment = Moment(monkeypatch, "before the copy")
    for _ in range(3):
        moment.count = 0
        nbytes, failed = outcome(victim, client, lambda: None, moment)
        assert not failed
        assert nbytes > 4 << 20
    assert not client._saving.overlapping._running._copies
    client.close()
    assert not late_memory()._ready


def test_a_late_save_is_handed_over_and_reported_without_another_call_of_the_users(late, node):
    """The last save of a run, after which nothing calls the client."""
    victim, client = late()
    handle = client.save(victim.state, 9)
    assert client.stats().last_late_nbytes > 4 << 20
    wait_for(lambda: (9, "durable") in [(c.step, c.milestone) for j in node.status().jobs for c in j.checkpoints])
    assert handle.milestone == "durable", "and the handle knows"


# --- between the moment at which memory is protected and the copy


def loaded(client, like):
    back = {name: torch.zeros_like(tensor) for name, tensor in like.items()}
    assert client.load(back) is not None
    return back


def exact_or_failed(client, handle, expected):
    """Asserts that a save holds this, or says that it does not count; whether it counts."""
    try:
        handle.wait("staged", 60)
    except SaveFailedError:
        return False
    back = loaded(client, expected)
    assert all(torch.equal(back[name], tensor) for name, tensor in expected.items())
    return True


def test_memory_that_another_thread_gives_a_tensor_while_it_is_looked_at_is_never_copied_without_protection(
    late, monkeypatch
):
    """Its old memory is free, and used for something else, before it is protected."""
    victim, client = late()
    lease = LateMemory.lease

    def swap_and_lease(memory, units):
        room = torch.frombuffer((ctypes.c_char * NBYTES).from_address(victim.address), dtype=torch.float32)
        victim.keep.append(victim.large.data)
        victim.large.data = victim.large.detach().clone()
        room.fill_(-7)
        return lease(memory, units)

    expected = {name: tensor.detach().clone() for name, tensor in victim.state.items()}
    with monkeypatch.context() as patched:
        patched.setattr(LateMemory, "lease", swap_and_lease)
        handle = client.save(victim.state)
    victim.optimizer.step()
    assert exact_or_failed(client, handle, expected)


def test_who_writes_to_pages_of_tensors_alone_while_save_runs_is_found(late, monkeypatch):
    """After what is early was copied, and before the copy in the background begins."""
    victim, client = late()
    expected = {name: tensor.detach().clone() for name, tensor in victim.state.items()}
    with monkeypatch.context() as patched:
        patched.setattr(overlapping, "copy_all", lambda *args: (victim.large.data.fill_(-7), copy_all(*args)))
        handle = client.save(victim.state)
    victim.optimizer.step()
    assert not exact_or_failed(client, handle, expected)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["after it was protected", "while it is protected"])
def test_what_goes_wrong_before_the_copy_begins_leaves_nothing_protected(where, error, late, monkeypatch):
    victim, client = late()
    protected, protect = [], PageGuard.protect

    def broken(*args, **kwargs):
        raise error("on the way")

    def protect_and_break(guard, found):
        protect(guard, found)
        protected.append(found)
        if where == "while it is protected":
            broken()

    with monkeypatch.context() as patched:
        patched.setattr(PageGuard, "protect", protect_and_break)
        patched.setattr(Overlap, "__init__", broken)
        if error is KeyboardInterrupt:
            with pytest.raises(KeyboardInterrupt):
                client.save(victim.state)
        else:
            assert "on the way" in client.save(victim.state).reason
    assert protected
    guard = late_memory().guard
    assert not any(guard.unwritten(Range(at, at + HUGE_NBYTES)) for one in protected for at in range(*one, HUGE_NBYTES))
    client.save(victim.state).wait("staged", 60)
    assert client.stats().last_late_nbytes > 4 << 20


# --- what saves cost when somebody writes, or states come in turn


class Many:
    """Some large parameters, and their optimizer."""

    def __init__(self, count):
        self.large = [torch.nn.Parameter(torch.full((NBYTES // 4,), float(i))) for i in range(count)]
        self.optimizer = Touch(self.large)
        self.state = {f"w{i}": tensor for i, tensor in enumerate(self.large)}


def settle(client, state, optimizer):
    """Until what is attached is late."""
    client.save(state).wait("staged", 60)
    wait_for(lambda: not late_memory().busy)
    optimizer.step()


def test_a_writer_that_goes_from_tensor_to_tensor_costs_three_saves(join, monkeypatch, caplog):
    many, client = Many(6), join()
    client.attach(many.optimizer)
    settle(client, many.state, many.optimizer)
    failed = []
    for step, tensor in enumerate(many.large):
        with monkeypatch.context() as patched:
            moment = Moment(patched, "before the copy")
            moment.act = lambda tensor=tensor: tensor.data.add_(1)
            expected = {name: one.detach().clone() for name, one in many.state.items()}
            handle = client.save(many.state)
            many.optimizer.step()
            try:
                handle.wait("staged", 60)
            except SaveFailedError:
                failed.append(step)
                continue
        back = loaded(client, expected)
        assert all(torch.equal(back[name], one) for name, one in expected.items())
    assert failed == [0, 1, 2]
    assert client.stats().last_late_nbytes == 0
    assert client.stats().late.startswith("off: it cost 3 saves: others than the optimizer wrote")
    assert caplog.text.count("others than the optimizer wrote") == 1


def test_an_address_that_cannot_be_read_although_none_wrote_costs_one_save(late, monkeypatch):
    victim, client = late()

    def fail(found):
        raise OSError(errno.EFAULT, "not mapped")

    with monkeypatch.context() as patched:
        patched.setattr(late_copies, "copy", fail)
        handle = client.save(victim.state)
        victim.optimizer.step()
        with pytest.raises(SaveFailedError, match="not mapped"):
            handle.wait("staged", 60)
    client.save(victim.state).wait("staged", 60)
    assert client.stats().last_late_nbytes > 4 << 20, "no tensor is blamed for it"


def test_states_that_are_saved_in_turn_stay_late_and_are_put_together_once(join, monkeypatch):
    many, client = Many(3), join()
    client.attach(many.optimizer)
    states = [many.state, {"w1": many.large[1]}]
    for state in states:
        settle(client, state, many.optimizer)
    collapsed, collapse = [], PageGuard.collapse
    monkeypatch.setattr(PageGuard, "collapse", lambda guard, run: (collapsed.append(run), collapse(guard, run)))
    for _ in range(2):
        for state in states:
            client.save(state).wait("staged", 60)
            assert client.stats().last_late_nbytes > len(state) * (5 << 20)
            many.optimizer.step()
    wait_for(lambda: not late_memory().busy)
    assert not collapsed
    client.save({"note": torch.zeros(3)}).wait("staged", 60)
    assert client.stats().last_late_nbytes == 0, "it is of the last save"


def test_another_view_of_a_tensor_costs_one_save_its_lateness(late):
    victim, client = late()
    side = 1024
    memory = victim.large.detach()[: side * side].view(side, side)
    client.save({"w": memory}).wait("staged", 60)
    wait_for(lambda: not late_memory().busy)
    found = []
    for shown in (memory, memory.t(), memory):
        client.save({"w": shown}).wait("staged", 60)
        found.append(client.stats().last_late_nbytes > 0)
        victim.optimizer.step()
    assert found == [True, False, True]


@pytest.mark.parametrize("verify", ["samples", None])
def test_an_optimizer_that_is_objected_to_is_copied_early_at_once(verify, join, monkeypatch, caplog):
    one, other, client = Victim(), Victim(), join()
    client.attach(one.optimizer, other.optimizer, verify=verify)
    state = {"one": one.large, "other": other.large}
    for _ in range(2):
        client.save(state).wait("staged", 60)
        wait_for(lambda: not late_memory().busy)
        one.optimizer.step()
        other.optimizer.step()
    both = client.stats().last_late_nbytes
    other.optimizer.step = lambda: other.large.data.add_(1)  # its hook is not called any more
    client.save(state).wait("staged", 60)
    assert "was replaced on the instance" in caplog.text
    assert 0 < client.stats().last_late_nbytes <= both // 2


def test_an_optimizer_that_is_attached_later_is_late_too(late):
    victim, client = late()
    other = Victim()
    state = {**victim.state, "other": other.large}
    client.save(state).wait("staged", 60)
    before = client.stats().last_late_nbytes
    client.attach(other.optimizer)
    settle(client, state, other.optimizer)
    client.save(state).wait("staged", 60)
    assert client.stats().last_late_nbytes > before + (4 << 20)


def test_one_page_that_is_other_memory_now_takes_nothing_from_the_others(late):
    victim, client = late()
    memory = late_memory()
    unit = min(memory._ready)
    memory.guard.unregister(Range(unit, unit + HUGE_NBYTES))  # as memory is that was mapped anew, huge from birth
    client.save(victim.state).wait("staged", 60)
    assert client.stats().last_late_nbytes > 3 << 20
    wait_for(lambda: not late_memory().busy)
    victim.optimizer.step()
    client.save(victim.state).wait("staged", 60)
    assert unit in memory._ready, "it is taken in again"


def test_copies_that_are_slower_than_the_steps_cost_three_saves(join, job, monkeypatch):
    victim, client = Victim(), join(save_timeout_s=0.3)
    client.attach(victim.optimizer)
    client.prepare(victim.state)
    settle(client, victim.state, victim.optimizer)
    moment = Moment(monkeypatch, "slow")
    moment._copy = lambda found, copy=moment._copy: (time.sleep(0.2), copy(found))
    failed = []
    for _ in range(5):
        expected = {name: tensor.detach().clone() for name, tensor in victim.state.items()}
        handle = client.save(victim.state)
        victim.optimizer.step()
        failed.append(not exact_or_failed(client, handle, expected))
    assert failed == [True, True, True, False, False]
    assert client.stats().late.startswith("off: it cost 3 saves: copies are not done")


def test_a_lease_that_none_refers_to_is_over(late):
    late()
    memory = late_memory()
    units = [Range(min(memory._ready), min(memory._ready) + HUGE_NBYTES)]
    lease = memory.lease(units)
    assert lease.protect(units)
    assert lease.unwritten(units[0])
    assert not memory.lease(units).ranges, "it is one save's"
    memory.forget(units)
    assert units[0].start in memory._ready, "and is kept for that"
    del lease
    assert not memory.guard.unwritten(units[0])
    assert memory.lease(units).ranges == units


# --- pages that hold other memory besides tensors


class Close:
    """Small parameters in one mapping, with a little other memory between them."""

    def __init__(self, count=100, nbytes=64 << 10, gap=128):
        self.room = mmap.mmap(-1, count * (nbytes + gap) + gap, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        room = torch.frombuffer(self.room, dtype=torch.float32)
        starts = range(gap // 4, count * (nbytes + gap) // 4, (nbytes + gap) // 4)
        self.small = [torch.nn.Parameter(room[at : at + nbytes // 4].fill_(i)) for i, at in enumerate(starts)]
        self.gaps = torch.frombuffer(self.room, dtype=torch.uint8)[gap + nbytes :: gap + nbytes]
        self.optimizer = Touch(self.small)
        self.state = {f"w{i}": tensor for i, tensor in enumerate(self.small)}


@pytest.fixture
def close(join, monkeypatch):
    monkeypatch.setattr(late_memory(), "alone", False)  # another test's neighbours may have written
    close, client = Close(), join()
    client.attach(close.optimizer)
    settle(client, close.state, close.optimizer)
    return close, client


def save_exactly(close, client):
    """One save; bytes that were late."""
    expected = {name: tensor.detach().clone() for name, tensor in close.state.items()}
    handle = client.save(close.state)
    handle.wait("staged", 60)  # a step that comes before breaks the rehearsal off
    close.optimizer.step()
    back = loaded(client, expected)
    assert all(torch.equal(back[name], tensor) for name, tensor in expected.items())
    return client.stats().last_late_nbytes


def test_pages_of_small_tensors_are_late_once_none_wrote_beside_them_in_three_saves(close):
    assert [save_exactly(*close) for _ in range(3)] == [0, 0, 0]
    assert close[1].stats().late.startswith("proof, but nothing is late yet: it is watched")
    assert save_exactly(*close) > 3 << 20
    assert close[1].stats().late == "proof"


def test_pages_beside_which_another_process_writes_are_never_late_and_no_save_fails(close, monkeypatch):
    small, client = close
    moment = Moment(monkeypatch, "before the copy")
    moment.act = lambda: small.gaps.add_(1)
    assert [save_exactly(*close) for _ in range(2)] == [0, 0]
    assert moment.done.is_set()
    assert [save_exactly(*close) for _ in range(3)] == [0, 0, 0]
    assert client.stats().failed == 0
    assert client.stats().late == "off: others write to the pages that its tensors share"


def test_who_writes_beside_late_tensors_after_all_costs_one_save_and_no_tensor_is_blamed(close, monkeypatch):
    small, client = close
    for _ in range(3):
        save_exactly(*close)
    with monkeypatch.context() as patched:
        moment = Moment(patched, "before the copy")
        moment.act = lambda: small.gaps.add_(1)
        with pytest.raises(SaveFailedError, match="memory was written that shares a page with 'w"):
            save_exactly(*close)
    assert [save_exactly(*close) for _ in range(2)] == [0, 0]
    assert client._saving.overlapping._written == frozenset()
    assert client.stats().late == "off: others write to the pages that its tensors share"


class SmallVictim:
    """What a writer of writers.py is given: one of the small tensors, in the middle of a shared page."""

    def __init__(self, close):
        self.large, self.small, self.keep = close.small[50], close.small[51], []
        self.large.grad = torch.ones_like(self.large)

    @property
    def numbers(self):
        return self.large.detach().numpy()


def one_byte(victim):
    ctypes.memset(victim.large.data_ptr() + 4096, 0x55, 1)


def swapped_out_and_in(victim):
    """Other tensors' values, as of an average, and back."""
    with torch.no_grad():
        kept = victim.large.detach().clone()
        torch._foreach_copy_([victim.large], [victim.small.detach()])
        torch._foreach_copy_([victim.large], [kept])


SMALL_WRITERS = [
    in_place, data_copy, average_in_and_back, same_bits_again, one_byte, foreach, numpy_alias, dlpack, unattached_fused,
    thread, load_state_dict, sharpness_ascent, swapped_out_and_in,
]  # fmt: skip


@pytest.mark.parametrize("name", MOMENTS[: 3 if LONG else 1])
@pytest.mark.parametrize("writer", SMALL_WRITERS[:: 1 if LONG else 4], ids=lambda writer: writer.__name__)
def test_no_writer_to_a_late_tensor_in_a_shared_page_is_silent(writer, name, close, monkeypatch):
    small, client = close
    for _ in range(3):
        save_exactly(small, client)
    expected = {key: tensor.detach().clone() for key, tensor in small.state.items()}
    with monkeypatch.context() as patched:
        moment = Moment(patched, name)
        moment.act = lambda: writer(SmallVictim(small))
        handle = client.save(small.state)
        assert client.stats().last_late_nbytes > 3 << 20, "what is tested is not late"
        assert moment.done.wait(30)
    small.optimizer.step()
    assert not exact_or_failed(client, handle, expected)
    assert "memory was written that shares a page with 'w" in handle.reason
    assert save_exactly(small, client) == 0, "such pages are copied before save returns from here on"
