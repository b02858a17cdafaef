"""A client that is interrupted, used by several threads, or left alone by its daemon: every save has an end."""

import contextlib
import os
import shutil
import signal
import threading
import time

import pytest
import torch

import ckptd_client
from ckptd.shared.base.ids import SaveId
from ckptd.shared.protocol.messages import End, HandOver, Milestone, Progress
from ckptd_client._local.save_record import MAX_HANDLES, HandleBook, SaveRecord
from tests.cluster import Node, wait_for
from tests.runs import RUN

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240)]

STATE = {"w": torch.arange(1000)}
SLACK_S = 2.5


def kill_daemon(node: Node, client) -> None:
    """The daemon that the client started; returns when the client, which may have a thread of its own, knows it."""
    os.kill(node.status().pid, signal.SIGKILL)
    channel = client._link._channel
    wait_for(lambda: channel.lost or (channel.pump(time.monotonic() + 0.1) and channel.lost))


def failing(monkeypatch, error: BaseException, times: int = 1):
    """The next copies raise error."""
    plain, left = torch._foreach_copy_, [error] * times

    def copy(targets, sources):
        if left:
            raise left.pop()
        plain(targets, sources)

    monkeypatch.setattr(torch, "_foreach_copy_", copy)


# --- save ends, whatever happens in it


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_a_save_that_is_interrupted_has_ended_and_the_next_one_works(kind, node, join, monkeypatch):
    node.start()
    client = join()
    client.save(STATE, 1).wait("durable", 60)
    failing(monkeypatch, kind())
    with pytest.raises(kind):
        client.save(STATE, 2)
    interrupted = client._link.book.of_step(client.incarnation, 2)
    assert interrupted.end == "failed"
    assert kind.__name__ in interrupted.reason
    assert client.save(STATE, 3).wait("durable", 60).step == 3


@pytest.mark.parametrize("error", [MemoryError(), ValueError("x"), KeyError("x"), OSError(24, "many files")], ids=repr)
def test_no_fault_of_the_staging_part_reaches_training(error, node, join, monkeypatch):
    node.start()
    client = join()
    failing(monkeypatch, error)
    handle = client.save(STATE, 1)
    assert handle.end == "failed"
    assert type(error).__name__ in handle.reason
    assert client.save(STATE, 1).wait("durable", 60).step == 1, "a step that came to nothing may be saved again"
    with pytest.raises(ckptd_client.UsageError, match="already saved"):
        client.save(STATE, 1)


def test_a_daemon_that_cannot_be_started_is_no_fault_of_training(node, join, monkeypatch):
    client = join(start=True, save_timeout_s=30.0)
    client.save(STATE, 1).wait("durable", 60)
    kill_daemon(node, client)

    def refuse(*args, **named):
        raise OSError(12, "Cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr("subprocess.Popen", refuse)
        handle = client.save(STATE, 2)
        assert handle.end == "failed"
        assert "Cannot allocate memory" in handle.reason
    client._link._retry_at = 0.0
    assert client.save(STATE, 3).wait("durable", 60).step == 3


def test_an_arena_that_was_wiped_is_made_again(node, join):
    client = join(start=True)
    client.save(STATE, 1).wait("durable", 60)
    kill_daemon(node, client)
    shutil.rmtree(node.arena)
    handle = client.save(STATE, 2)
    assert handle.wait("durable", 60).step == 2
    assert not client._link._rank_file.lost
    state = {"w": torch.zeros(1000, dtype=torch.int64)}
    assert client.load(state).step == 2
    assert torch.equal(state["w"], STATE["w"])


# --- threads


def test_a_save_is_not_held_up_by_a_thread_that_waits(node, join):
    node.start()
    client = join(save_timeout_s=3.0)
    client.prepare(STATE)
    node.stop()
    handle = client.save(STATE, 1)
    assert handle.end == "failed"
    client._link._retry_at = 0.0
    threads = [threading.Thread(target=client.steps) for _ in range(2)]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    began = time.monotonic()
    handle = client.save(STATE, 2)
    assert time.monotonic() - began <= 3.0 + SLACK_S
    assert handle.end == "failed"
    began = time.monotonic()
    assert handle.milestone is None
    assert time.monotonic() - began <= SLACK_S
    node.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert client.save(STATE, 3).wait("durable", 60).step == 3


def test_a_save_that_cannot_have_the_client_ends_failed(node, join):
    node.start()
    client = join(save_timeout_s=0.5)
    held, done = threading.Event(), threading.Event()

    def hold():
        with client._staging.lock:
            held.set()
            done.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(20)
    began = time.monotonic()
    handle = client.save(STATE, 1)
    assert time.monotonic() - began <= 0.5 + SLACK_S
    assert "another thread" in handle.reason
    done.set()
    thread.join()
    assert handle.end == "failed"
    assert client.save(STATE, 2).save_id.counter == 2
    assert client.save(STATE, 3).wait("durable", 60).step == 3


# --- handles


def handle_of(counter: int) -> SaveRecord:
    return SaveRecord(SaveId(1, counter, counter, RUN), lambda seconds: None)


def test_handles_that_have_not_ended_are_kept_and_others_receive_while_they_are_held():
    book = HandleBook()
    for counter in range(MAX_HANDLES + 50):
        book.add(handle_of(counter))
    book.hear([Progress(save=SaveId(1, 0, 0, RUN), milestone=Milestone.DURABLE, end=End.DURABLE)])
    assert book.of_step(1, 0).reached(Milestone.DURABLE)
    held = book.of_step(1, 0)
    book.add(handle_of(1000))
    assert SaveId(1, 0, 0, RUN) not in book._handles
    book.hear([Progress(save=SaveId(1, 0, 0, RUN), milestone=Milestone.DURABLE, end=End.FAILED, reason="later")])
    assert held.reason == "later"


def test_handles_that_the_next_daemon_does_not_know_end():
    book = HandleBook()
    old, new, lost, told_later = (handle_of(counter) for counter in (1, 2, 3, 4))
    for handle in (old, new, lost, told_later):
        book.add(handle)
    book.hear([Progress(save=handle.save_id, milestone=Milestone.STAGED) for handle in (old, new)])
    book.orphan([new.save_id], [told_later.save_id])
    assert [h.end for h in (old, new, lost, told_later)] == ["superseded", None, "failed", None]
    assert old.reason == lost.reason == "the daemon that knew of it is gone"


def test_a_handle_does_not_wait_for_ever_for_a_daemon_that_was_replaced_twice(node, join):
    node.start("--drain-bandwidth", "1M")
    client = join()
    big = {"x": torch.zeros(2 << 20)}
    first, second = client.save(big, 1), client.save(big, 2)
    assert second.wait("staged", 60)
    node.kill()
    for _ in range(2):
        node.start()
        time.sleep(1.0)
        node.kill()
    node.start()
    assert second.wait("durable", 60)
    with contextlib.suppress(ckptd_client.SaveFailedError):  # unless it was durable before it was outrun
        first.wait("durable", 60)


def test_an_old_hand_over_is_no_reason_to_be_taken_for_replaced(node, join):
    node.start()
    client = join()
    client.save(STATE, 1).wait("durable", 60)
    old = client.save(STATE, 2).wait("durable", 60).save_id
    name = next(iter(client._link.slots.granted))
    client.load({"w": torch.zeros(1000, dtype=torch.int64)})
    client._link.outbox._unacknowledged[old] = HandOver(seq=0, slot=name, save=old)
    node.kill()
    node.start()
    assert client.save(STATE, 3).wait("durable", 60).step == 3
    assert not client._link.outbox.holds(old)
