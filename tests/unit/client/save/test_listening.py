"""The thread that hears of saves: that it cannot run costs no save."""

import threading

import pytest
import torch

from ckptd.shared.base.errors import SaveFailedError, WaitTimeoutError
from ckptd_client._local.why_late import Cause
from tests.cluster import wait_for


def state():
    return {"w": torch.arange(9.0)}


def listeners():
    return [thread for thread in threading.enumerate() if thread.name == "ckptd-listen"]


def test_a_thread_that_cannot_be_started_costs_no_save(join, monkeypatch):
    client = join()
    start = threading.Thread.start

    def refuse(thread):
        if thread.name == "ckptd-listen":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert client.save(state(), 1).wait("durable", 60).step == 1
    monkeypatch.undo()
    client.save(state(), 2).wait("staged", 60)
    wait_for(listeners)
    assert client.stats().failed == 0


def test_what_a_look_meets_ends_it_not(join, monkeypatch):
    client = join(drain_every=1000)
    looks = []

    def fail(_staging, _waiting):
        looks.append(1)
        raise OSError("no descriptor is left")

    monkeypatch.setattr("ckptd_client._save.lost_daemon.LostDaemon.check", lambda _self, *args: fail(*args))
    client.save(state(), 1).wait("durable", 60)
    client.save(state(), 2).wait("staged", 60)  # in memory alone: it is listened for
    wait_for(lambda: len(looks) > 3)
    assert listeners()


@pytest.mark.parametrize("timeout_s", [0, 0.0])
def test_a_poll_asks_none(join, timeout_s):
    client = join(drain_every=1000)
    client.save(state(), 1).wait("durable", 60)
    handle = client.save(state(), 2).wait("staged", 60)
    asked = []
    client._link.book.outlook.why_late = lambda *args: (asked.append(args), Cause())[1]
    with pytest.raises((WaitTimeoutError, SaveFailedError), match="step 2"):
        handle.wait("durable", timeout_s)
    assert asked == []
