"""The bulk server among strangers and in want: who has the secret is served, and what keeps others out is told."""

import contextlib
import logging
import select
import socket
import threading
import time

import pytest

from ckptd.daemon.background import Background
from ckptd.shared.base.errors import PeerError
from ckptd.shared.bulk import server as server_module
from ckptd.shared.bulk import wire
from ckptd.shared.bulk.client import Address, Connection
from ckptd.shared.bulk.server import BulkServer
from ckptd.shared.bulk.sockets import Cancel
from tests.nodes import EPOCH, KEY, SAVE, SECRET

LINKS = {"link": SECRET}


def refuse(_link, _ask, _rank):
    raise PeerError("no\x1b[2J such\nthing")


@pytest.fixture
def server():
    made = BulkServer(refuse, LINKS.get)
    made.start()
    yield made
    made.close()


def connect(server, link="link"):
    address = Address(server.host, server.port, link, SECRET)
    return contextlib.closing(Connection("n0", address, Cancel(), timeout_s=3))


@contextlib.contextmanager
def strangers(server, count):
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(socket.create_connection((server.host, server.port))) for _ in range(count)]


def test_who_comes_last_is_served_however_many_say_nothing(server):
    with strangers(server, 40), connect(server):
        pass


def test_a_hello_that_trickles_ends_by_its_deadline(server, monkeypatch):
    monkeypatch.setattr(server_module, "_HELLO_TIMEOUT_S", 0.6)
    with strangers(server, 1) as (slow,):
        began = time.monotonic()
        with contextlib.suppress(OSError):
            for byte in wire.MAGIC * 20:
                slow.send(bytes([byte]))
                if select.select([slow], [], [], 0.1)[0]:
                    break
        assert time.monotonic() - began < 8


def test_a_thread_that_cannot_be_had_is_reported_and_the_next_one_is_served(server, monkeypatch):
    assert server.problem() == ""
    real = threading.Thread.start

    def start(thread):
        if thread.name == "bulk":
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(PeerError), connect(server):
        pass
    assert "can't start new thread" in server.problem()
    monkeypatch.undo()
    with connect(server):
        pass


def test_work_without_a_thread_fails_and_does_not_end_the_loop(monkeypatch):
    work, outcomes = Background(1, "test"), []

    def start(_thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    work.run(lambda: "first", outcomes.append)
    monkeypatch.undo()
    work.run(lambda: "second", outcomes.append)
    deadline = time.monotonic() + 5
    while work.busy and time.monotonic() < deadline:
        select.select([work], [], [], 1)
        work.deliver()
    work.close()
    assert [str(outcome) for outcome in outcomes] == ["can't start new thread", "second"]


def test_strangers_leave_nothing_in_the_log(server, caplog):
    with caplog.at_level(logging.INFO, "ckptd"):
        for _ in range(5):
            with strangers(server, 1) as (one,):
                one.sendall(bytes(wire.HELLO.size))
                one.settimeout(3)
                with contextlib.suppress(ConnectionError):
                    assert one.recv(1) == b""
    assert caplog.records == []


def test_links_that_are_over_are_forgotten_and_their_connections_ended(server, monkeypatch):
    monkeypatch.setitem(LINKS, "former", SECRET)
    with connect(server, "former") as connection:
        assert set(server._counters) == {"former"}
        del LINKS["former"]
        with connect(server):
            assert set(server._counters) == set(server._peers) == {"link"}
            assert connection._socket.recv(1) == b""
    LINKS["former"] = SECRET  # for monkeypatch to remove


def test_what_another_node_says_is_printable(server):
    with connect(server) as connection:
        connection.ask(KEY, SAVE, EPOCH, [wire.Range(0, 0, 16, True)])
        with pytest.raises(PeerError, match=r"^node n0: no\?\[2J such\?thing$"):
            connection.receive(memoryview(bytearray(16)))


def test_a_bulk_port_that_does_not_answer_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(PeerError, match=f"port {port}; is that port .bulk_port. let through"):
        Connection("n0", Address("127.0.0.1", port, "link", SECRET), Cancel(), timeout_s=1)


class Slow:
    """Bytes after which the server needs some time for what it says last, and of which the last ones come late."""

    nbytes = (4 << 20) + 100

    def view(self, offset, nbytes):
        time.sleep(0.3 if offset else 0)
        return memoryview(bytes(nbytes))

    def check(self, offset, nbytes):
        pass

    def still(self):
        time.sleep(0.3)
        return True


@pytest.mark.parametrize("rest", [0, 100])
def test_little_that_comes_after_much_wakes_the_thread_that_waits_for_it(rest):
    """Seen as 20 s of waiting for a node that had sent all: a socket that wakes for much only slept over the end."""
    server = BulkServer(lambda *_: Slow(), LINKS.get)
    server.start()
    ranges = [wire.Range(0, 0, 4 << 20, checked=False)] + [wire.Range(0, 4 << 20, rest, checked=False)] * bool(rest)
    try:
        with connect(server) as connection:
            began = time.monotonic()
            connection.ask(KEY, SAVE, EPOCH, ranges)
            for asked in ranges:
                connection.receive(memoryview(bytearray(asked.nbytes)))
            assert time.monotonic() - began < 2.9  # the connection's patience is 3
    finally:
        server.close()
