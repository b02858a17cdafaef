"""What is copied while training goes on is what was saved, or the save fails: whoever writes, in whatever way."""

import os
import threading
import time

import pytest
import torch

from ckptd_client import SaveFailedError
from ckptd_client import _late_copies as late_copies
from ckptd_client._late_memory import late_memory
from ckptd_client._overlap import Overlap
from ckptd_client._page_guard import NoProofError
from tests.cluster import ROOT, wait_for
from tests.unit.client.writers import WRITERS, Victim, in_place, memory_of

LONG = os.environ.get("FAULTS") == "long"
MOMENTS = ("before the copy", "in mid-copy", "during a slowed copy", "after the copy")


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

    def batches(self, pieces):
        """Small ones: a copy has a middle."""
        for piece in pieces:
            for done in range(0, piece.nbytes, 1 << 20):
                yield [
                    piece._replace(
                        to=piece.to + done, start=piece.start + done, nbytes=min(1 << 20, piece.nbytes - done)
                    )
                ]

    def copy(self, pieces):
        self.count += 1
        if self.count == {"before the copy": 1, "in mid-copy": 5, "during a slowed copy": 3}.get(self.name, 0):
            self.act()
            self.done.set()
        if self.name == "during a slowed copy":
            time.sleep(0.01)
        self._copy(pieces)


@pytest.fixture
def late(join, job):
    """Makes a Victim whose saves are late, as far as its memory can be, and its client."""
    made = []

    def make(kind="malloc", **options):
        victim, client = Victim(kind), join(f"{job}-{len(made)}")
        made.append(victim)
        client.attach(victim.optimizer, **options)
        client.save(victim.state).wait("staged", 20)
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
        wait_for(lambda: client._overlapping._running is None or client._overlapping._running._copied.is_set())
        act()
    elif nbytes:
        assert moment.done.wait(30)
    victim.optimizer.step()
    try:
        handle.wait("staged", 30)
    except SaveFailedError:
        assert handle.reason.startswith("'large': it was written"), handle.reason
        return nbytes, True
    back = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    assert client.load(back) is not None
    for name, tensor in expected.items():
        assert torch.equal(back[name], tensor), f"{name} came back wrong in silence"
    return nbytes, False


@pytest.mark.parametrize("name", MOMENTS if LONG else MOMENTS[1:2])
@pytest.mark.parametrize("writer", WRITERS, ids=lambda writer: writer.__name__)
def test_no_writer_is_silent(writer, name, late, monkeypatch):
    for _ in range(3 if LONG else 1):
        kind = memory_of(writer)
        victim, client = late(kind)
        with monkeypatch.context() as patched:
            moment = Moment(patched, name)
            nbytes, failed = outcome(victim, client, lambda victim=victim: writer(victim), moment)
        assert bool(nbytes) == (kind != "shared"), "what is tested is not late"
        if name == "after the copy":
            assert not failed, "what is written after the copy does no harm"
        client.close()


@pytest.mark.parametrize("view", ["transposed", "conjugate"])
def test_another_view_of_the_same_memory_is_saved_as_it_is(view, late):
    """One that lies otherwise, at the same address, of the same shape: its bytes are not those that are saved."""
    victim, client = late()
    side = 1024
    dtype = torch.complex64 if view == "conjugate" else torch.float32
    memory = victim.large.detach().view(dtype)[: side * side].view(side, side)
    client.save({"w": memory}).wait("staged", 20)
    wait_for(lambda: not late_memory().busy)
    assert client.save({"w": memory}).wait("staged", 20)
    assert client.stats().last_late_nbytes
    victim.optimizer.step()
    shown = memory.t() if view == "transposed" else memory.conj()
    expected = shown.clone()
    client.save({"w": shown}).wait("staged", 20)
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
    handle.wait("staged", 20)
    for one in (client, other):
        back = {name: torch.zeros_like(tensor) for name, tensor in victim.state.items()}
        one.load(back)
        assert torch.equal(back["large"], expected)


@pytest.mark.parametrize("when", ["before its thread has begun", "when it copies"])
def test_a_copy_whose_begin_is_interrupted_ends_nothing_of_anybody_elses(when, late, monkeypatch):
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
        handle.wait("staged", 20)
    back = {name: torch.zeros_like(tensor) for name, tensor in victim.state.items()}
    client.load(back)
    assert torch.equal(back["large"], expected)
    client.close()
    assert client._overlapping._running is None


def test_the_document_names_every_writer():
    with open(os.path.join(ROOT, "docs/failures.md")) as file:
        text = file.read().split("## Who may write", 1)[1].split("\n## ", 1)[0]
    assert all(f"`{writer.__name__}`" in text for writer in WRITERS)


def test_a_step_that_was_replaced_on_the_instance_is_an_objection(late, caplog):
    victim, client = late()
    victim.optimizer.step = lambda: in_place(victim)
    client.save(victim.state).wait("staged", 20)
    assert "was replaced on the instance" in caplog.text
    assert client.stats().last_late_nbytes == 0
    del victim.optimizer.step
    torch.optim.lr_scheduler.ConstantLR(victim.optimizer)  # puts its own around the class's
    client.save(victim.state).wait("staged", 20)
    assert client.stats().last_late_nbytes > 0


def test_a_save_that_nobody_disturbs_is_staged_late_and_the_memory_is_free_again(late, monkeypatch):
    victim, client = late()
    moment = Moment(monkeypatch, "before the copy")
    for _ in range(3):
        moment.count = 0
        nbytes, failed = outcome(victim, client, lambda: None, moment)
        assert not failed
        assert nbytes > 4 << 20
    assert not client._overlapping._running._copies
    client.close()
    assert not late_memory()._ready
