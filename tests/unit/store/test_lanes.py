"""What nobody waits for has lanes of its own: a scrub that hangs, or goes on for hours, costs no drain anything."""

import socket
import threading
import time

import pytest

from ckptd.shared.format.integrity import XXH3
from ckptd.shared.protocol.scrubbing import BEGIN
from ckptd.store import worker, worker_link
from ckptd.store.messages import (
    DAEMON,
    WORKER,
    Done,
    Failed,
    FrameReader,
    Probe,
    Space,
    decode_reply,
    encode_frame,
    hello_frame,
)
from ckptd.store.opening import open_store
from ckptd.store.posix.store import PosixStore
from ckptd.store.scrub_messages import MendCheckpoint, Mended, PieceRead, ScrubCheckpoint
from tests.cluster import wait_for
from tests.parity_store import SAVE
from tests.unit.store.test_stores import Answers, Threaded


class Hang:
    """What a scrub asks for goes on until ``over``; ``says`` whether there is word of it meanwhile."""

    def __init__(self):
        self.over, self.says, self.begun = threading.Event(), False, []

    def carry_out(self, _store, request, alive):
        self.begun.append(request.id)
        while not self.over.wait(0.02):
            if self.says:
                alive()
        return PieceRead(None, 0, []) if isinstance(request, ScrubCheckpoint) else Mended()


@pytest.fixture(name="hang")
def fixture_hang(monkeypatch):
    """Workers are threads of this process, so that one of theirs can hang alone, as in one server of a file system."""
    hang = Hang()
    monkeypatch.setattr(worker, "loaded", lambda _name: hang.carry_out)
    monkeypatch.setattr(worker_link, "_popen", lambda fd, _niceness, store: Threaded(fd, store))
    yield hang
    hang.over.set()


@pytest.fixture(name="slow")
def fixture_slow(monkeypatch):
    """A probe, the main lane, waits for it."""
    over = threading.Event()
    monkeypatch.setattr(PosixStore, "space", lambda _self: (over.wait(20), (1, 2))[1])
    yield over
    over.set()


@pytest.fixture(name="store_id")
def fixture_store_id(tmp_path):
    return open_store(str(tmp_path), XXH3).open("job").store_id


def piece(store_id):
    return lambda i: ScrubCheckpoint(id=i, store_id=store_id, job="job", save=SAVE, place=BEGIN, nbytes=1)


def mend(store_id):
    return lambda i: MendCheckpoint(id=i, store_id=store_id, job="job", save=SAVE, ranks=[0])


def test_scrubs_that_hang_take_no_thread_of_a_drain(tmp_path, store_id, hang):
    ours, theirs = socket.socketpair()
    serving = threading.Thread(target=worker.Worker(theirs, str(tmp_path), lambda: None).serve)
    serving.start()
    frames, got = FrameReader(decode_reply, theirs=WORKER, ours=DAEMON), []
    with theirs, ours:
        ours.settimeout(5)
        ours.sendall(hello_frame())
        for i in range(1, 10):
            ours.sendall(encode_frame((piece if i % 2 else mend)(store_id)(i)))
        ours.sendall(encode_frame(Probe(id=99)))
        while not got:
            got += frames.feed(ours.recv(1 << 16))
        assert [(type(one), one.id) for one in got] == [(Done, 99)]
        wait_for(lambda: hang.begun)
        assert hang.begun == [1]
        hang.over.set()
        ours.shutdown(socket.SHUT_RDWR)
        serving.join()


def test_one_is_carried_out_at_a_time(make, tmp_path, store_id, hang):
    answers = Answers(make(), tmp_path)
    hang.says = True
    for request in (mend, piece, mend):
        answers.ask(request(store_id))
    answers.ask()
    assert isinstance(answers.turn(1)[0].result, Space)
    wait_for(lambda: hang.begun)
    assert len(hang.begun) == 1
    assert not answers.stores.busy
    hang.over.set()
    assert [type(one.result) for one in answers.turn(4)[1:]] == [Mended, PieceRead, Mended]


def test_word_of_a_mend_does_not_hide_a_drain_that_hangs(make, tmp_path, store_id, hang, slow):
    stores = make(hang_s=1.0)
    answers = Answers(stores, tmp_path)
    hang.says = True
    answers.ask(mend(store_id), patience_s=30.0)
    wait_for(lambda: hang.begun)
    answers.ask()
    probe = next(one for one in answers.turn(2, timeout_s=5.0) if one.id == 2)
    assert isinstance(probe, Failed)
    assert "hangs" in probe.message


def test_a_mend_of_which_there_is_word_is_not_late(make, tmp_path, store_id, hang):
    answers = Answers(make(hang_s=0.5), tmp_path)
    hang.says = True
    answers.ask(mend(store_id))
    began = time.monotonic()
    threading.Timer(1.5, hang.over.set).start()
    assert isinstance(answers.turn(1)[0], Done)
    assert time.monotonic() - began > 1.4


def test_the_worker_is_replaced_after_a_late_one_and_not_under_a_drain(make, tmp_path, store_id, hang, slow):
    stores = make()
    answers = Answers(stores, tmp_path)
    answers.ask(piece(store_id), patience_s=0.2)
    answers.ask()
    (first,) = stores.links
    assert answers.turn(1)[0].code == "late"
    wait_for(lambda: hang.begun)
    answers.ask(piece(store_id))
    assert answers.turn(2)[1].code == "hung", "the lane is held until it ends"
    assert stores.links == [first]
    assert len(hang.begun) == 1
    slow.set()
    assert isinstance(answers.turn(3)[2], Done)
    assert stores.links == [], "nothing but what hangs was left"
    answers.ask(piece(store_id))
    hang.over.set()
    assert isinstance(answers.turn(4)[3], Done)
    assert len(hang.begun) == 2


def test_beside_a_killed_worker_that_does_not_end_no_other_is_killed(make, tmp_path, store_id, hang, monkeypatch):
    monkeypatch.setattr(Threaded, "poll", lambda _self: None)  # as one that sleeps in its file system
    stores = make()
    answers = Answers(stores, tmp_path)
    for count in range(1, 6):
        answers.ask(piece(store_id), patience_s=0.2)
        answers.turn(count)
    assert [one.code for one in answers] == ["late", "late", "hung", "hung", "hung"]
    assert len(stores._stores[str(tmp_path)].stuck) == 1
    answers.ask()
    assert isinstance(answers.turn(6)[5], Done)
