"""No daemon listens: one is waited for, or started, and when none comes the error says why."""

import logging
import os
import re
import signal
import stat
import sys
import threading
import time

import pytest

import ckptd_client
from ckptd_client import ConnectError
from tests.cluster import Node, wait_for


@pytest.fixture(name="empty")
def fixture_empty(tmp_path, monkeypatch):
    """An arena that no daemon serves."""
    store = tmp_path / "store"
    store.mkdir()
    with Node(str(store)) as node:
        for name, value in node.environ().items():
            if name.startswith("CKPTD_"):
                monkeypatch.setenv(name, value)
        yield node


def connect(node, **settings):
    return ckptd_client.connect("job", store=node.store, arena=node.arena, alone=True, **settings)


def test_a_daemon_that_comes_later_is_waited_for(empty):
    timer = threading.Timer(1.5, lambda: empty.start(ready=False))
    timer.start()
    began = time.monotonic()
    with connect(empty, start=False) as client:
        assert client.latest() is None
    assert time.monotonic() - began > 1
    timer.join()


def test_a_rank_that_waits_learns_for_what_and_then_that_it_failed(empty, caplog):
    with caplog.at_level(logging.WARNING, "ckptd_client"):
        began = time.time()
        with pytest.raises(ConnectError) as error:
            connect(empty, start=False, connect_timeout_s=6)
        seconds = time.time() - began
    assert 5.9 < seconds < 20
    (told,) = [record for record in caplog.records if "no daemon listens" in record.getMessage()]
    assert 3 < told.created - began < 5
    assert f"ckptd run --arena {empty.arena}" in told.getMessage()
    assert f"no daemon listens at {empty.arena}/ckptd.sock, and none came in " in str(error.value)
    assert f"ckptd run --arena {empty.arena}" in str(error.value)


PROGRAMS = {
    "fails and says nothing": ("exit 7", "it ended with exit status 7: {log} says nothing of it", "see {log}"),
    "is killed": ("kill -9 $$", "it was killed by SIGKILL", "dmesg"),
    "says why": ("echo 'one\ntwo'; exit 1", "it ended with exit status 1: one | two", "see {log}"),
    "says what to type": ("echo 'error: no luck\nhint: try it'; exit 2", "exit status 2: no luck", "hint: try it"),
    "hangs": ("echo $$ >{arena}/pid; echo so far; exec sleep 60", "it does not listen after {limit} s", "so far"),
}  # fmt: skip


@pytest.mark.parametrize("what", PROGRAMS)
def test_a_daemon_that_does_not_start_has_a_reason(what, empty, tmp_path, monkeypatch):
    script, *expected = (text.replace("{arena}", empty.arena) for text in PROGRAMS[what])
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(program))
    began = time.monotonic()
    with pytest.raises(ConnectError) as error:
        connect(empty, connect_timeout_s=2)
    assert time.monotonic() - began < 20
    assert str(error.value).startswith("the daemon did not start: ")
    for text in expected:
        pattern = re.escape(text).replace(r"\{log\}", re.escape(f"{empty.arena}/ckptd.log"))
        assert re.search(pattern.replace(r"\{limit\}", r"(2(\.\d)?|1\.[89])"), str(error.value)), text
    if what == "hangs":
        with open(f"{empty.arena}/pid", encoding="ascii") as file:
            os.kill(int(file.read()), signal.SIGKILL)


def test_a_program_that_is_not_there_is_named(empty, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with pytest.raises(ConnectError, match="did not start: /nonexistent/python was not found: "):
        connect(empty)
    monkeypatch.setattr(sys, "executable", "/etc/passwd")
    with pytest.raises(ConnectError, match="did not start: /etc/passwd could not be executed: "):
        connect(empty)
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(ConnectError, match=r"does not know its own program(?s:.*)ckptd run --arena"):
        connect(empty)


def test_a_real_daemon_that_refuses_its_settings_is_quoted(empty, monkeypatch):
    monkeypatch.setenv("CKPTD_REDUNDANCY", "five-fold")
    began = time.monotonic()
    with pytest.raises(ConnectError) as error:
        connect(empty)
    assert time.monotonic() - began < 30, "as soon as it has ended"
    text = "it ended with exit status 2: redundancy='five-fold' (from CKPTD_REDUNDANCY) is not allowed"
    assert text in str(error.value)
    assert "hint: CKPTD_REDUNDANCY=xor" in str(error.value)


def test_nothing_of_the_starter_stays_and_the_daemon_outlives_it(empty):
    with connect(empty) as client:
        client.save({"a": 1}).wait("durable", 60)
        pid = empty.status().pid
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            parent = int(file.read().rsplit(")", 1)[1].split()[1])
        assert parent != os.getpid()
        with open(f"/proc/{parent}/cmdline", "rb") as file:
            assert empty.arena.encode() not in file.read()
    wait_for(lambda: not os.path.exists(f"/proc/{pid}"))
