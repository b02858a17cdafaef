"""Against a real datagram socket, as systemd has one."""

import os
import socket

import pytest

from ckptd.daemon import systemd


@pytest.fixture(params=["path", "abstract"])
def manager(request, tmp_path, monkeypatch):
    name = str(tmp_path / "notify") if request.param == "path" else f"\0ckptd-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(name)
        listener.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", name.replace("\0", "@"))
        yield listener


def test_what_the_manager_receives(manager):
    assert systemd.ready("serving 2 jobs")
    assert manager.recv(4096) == b"READY=1\nSTATUS=serving 2 jobs"
    assert systemd.status("draining step 5")
    assert manager.recv(4096) == b"STATUS=draining step 5"
    assert systemd.watchdog()
    assert manager.recv(4096) == b"WATCHDOG=1"
    assert systemd.stopping("SIGTERM")
    assert manager.recv(4096) == b"STOPPING=1\nSTATUS=SIGTERM"
    assert systemd.stopping("a drain", drain_s=0.5)
    assert manager.recv(4096) == b"STOPPING=1\nEXTEND_TIMEOUT_USEC=25500000\nSTATUS=a drain"


def test_a_status_cannot_smuggle_an_assignment(manager):
    assert systemd.status("a\nMAINPID=1")
    assert manager.recv(4096) == b"STATUS=a MAINPID=1"


@pytest.mark.parametrize("address", ["", "relative", "vsock:2:1234"])
def test_no_manager_to_speak_to(address):
    assert not systemd.notify("READY=1", environ={"NOTIFY_SOCKET": address})
    assert not systemd.notify("READY=1", environ={})


def test_a_manager_that_is_gone_is_no_error(tmp_path):
    assert not systemd.notify("READY=1", environ={"NOTIFY_SOCKET": str(tmp_path / "gone")})
    assert not systemd.notify("READY=1", environ={"NOTIFY_SOCKET": "/" + "x" * 200})


@pytest.mark.parametrize(
    ("environ", "interval_s"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "30000000"}, 15.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "42"}, 15.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "43"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
    ],
)
def test_watchdog_interval(environ, interval_s):
    assert systemd.watchdog_interval_s(environ, pid=42) == interval_s


def test_the_manager_learns_once_a_second_what_the_daemon_does(manager, monkeypatch):
    monkeypatch.setenv("WATCHDOG_USEC", "4000000")
    told = systemd.Manager(lambda: "one job")
    assert told.next_deadline() == 2.0
    for now in (10.0, 10.5, 10.9):
        told.tell(now)
    assert told.next_deadline() == 12.0
    told.tell(11.0)
    assert [manager.recv(4096) for _ in range(4)] == [b"WATCHDOG=1", b"STATUS=one job"] * 2
    manager.setblocking(False)
    with pytest.raises(BlockingIOError):
        manager.recv(4096)
