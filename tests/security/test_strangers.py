"""Strangers on the network, without a key, at real daemons: no answer, bounded memory, nothing in the log."""

import contextlib
import os
import random
import select
import socket
import subprocess
import sys
import time
import urllib.request

import pytest
import zmq

from ckptd.arena.ask import Daemon
from ckptd.peers.keys import make_keys
from ckptd.shared.bulk import wire
from ckptd.shared.protocol import messages as m
from tests import pythons
from tests.cluster import Node, wait_for
from tests.faults.nodes.clusters import Zygote, a_cluster
from tests.ports import free_port

pytestmark = [pytest.mark.faults, pytest.mark.timeout(120)]

CROWD = 300
HANDSHAKE_S = 3.0
MOST_GROWTH = 48 << 20  # of resident memory, for the crowd; each may keep a few buffers of ZeroMQ
GREETING_NBYTES = 64  # of ZMTP, which says its version and CURVE to anybody


@pytest.fixture(name="node", scope="module")
def fixture_node(tmp_path_factory):
    with Node(str(tmp_path_factory.mktemp("store"))) as node:
        node.start()
        yield node


@pytest.fixture(name="peer", scope="module")
def fixture_peer(node):
    """As ranks hear of the daemon."""
    with Daemon(node.arena) as daemon:
        return daemon._ask(m.AskNode(seq=1), m.NodeInfo).peer


@pytest.fixture(name="control")
def fixture_control(peer):
    host, _, port = peer.endpoint.removeprefix("tcp://").rpartition(":")
    return host, int(port)


def resident(pid):
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def descriptors(pid):
    return len(os.listdir(f"/proc/{pid}/fd"))


@contextlib.contextmanager
def crowd(place, count=CROWD):
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(socket.create_connection(place)) for _ in range(count)]


def heard_until_the_end(connection, timeout_s):
    """All bytes until the other side hangs up; fails when it does not."""
    connection.settimeout(timeout_s)
    heard = b""
    with contextlib.suppress(ConnectionError):
        while more := connection.recv(1 << 16):
            heard += more
    return heard


def quick_status(node):
    began = time.monotonic()
    status = node.status()
    assert time.monotonic() - began < 10
    return status


# --- the control port


def test_a_silent_crowd_is_sent_away_and_keeps_none_out(node, control):
    pid, log = node.status().pid, len(node.log_text())
    before = descriptors(pid), resident(pid)
    with crowd(control) as strangers:
        quick_status(node)
        for stranger in strangers:
            assert len(heard_until_the_end(stranger, 4 * HANDSHAKE_S)) <= GREETING_NBYTES
    wait_for(lambda: descriptors(pid) <= before[0] + 4)
    assert resident(pid) - before[1] < MOST_GROWTH
    assert node.log_text()[log:].count("\n") <= 2
    assert quick_status(node).jobs == []


def test_who_trickles_is_sent_away_by_the_same_deadline(control):
    with crowd(control, 1) as (slow,):
        began = time.monotonic()
        with contextlib.suppress(ConnectionError):
            for byte in (b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE").ljust(GREETING_NBYTES - 2, b"\0"):
                slow.send(bytes([byte]))
                if select.select([slow], [], [], 0.2)[0] and not slow.recv(1 << 16):
                    break
        assert time.monotonic() - began < 3 * HANDSHAKE_S


GREETING = b"\xff" + bytes(7) + b"\x01\x7f\x03\x00" + b"%s" + bytes(1) + bytes(31)
WORDS = {
    "noise": random.Random(1).randbytes(100_000),
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "no security": GREETING.replace(b"%s", b"NULL".ljust(20, b"\0"))
    + b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x06DEALER",
    "a password": GREETING.replace(b"%s", b"PLAIN".ljust(20, b"\0")) + b"\x04\x08\x05HELLO\x00\x00",
    "a curve that is none": GREETING.replace(b"%s", b"CURVE".ljust(20, b"\0")) + b"\x04\xc8\x05HELLO" + bytes(194),
    "a huge frame": GREETING.replace(b"%s", b"CURVE".ljust(20, b"\0"))
    + b"\x06"
    + (1 << 60).to_bytes(8, "big")
    + bytes(1 << 16),
}


@pytest.mark.parametrize("said", WORDS)
def test_what_is_no_handshake_ends_the_connection(node, control, said):
    pid = node.status().pid
    before = resident(pid)
    for _ in range(20):
        with crowd(control, 1) as (stranger,):
            with contextlib.suppress(OSError):
                stranger.sendall(WORDS[said])
                stranger.shutdown(socket.SHUT_WR)
            assert len(heard_until_the_end(stranger, 4 * HANDSHAKE_S)) <= 2 * GREETING_NBYTES
    assert resident(pid) - before < MOST_GROWTH
    quick_status(node)


def test_unknown_keys_are_held_and_reported_once_each_and_only_the_last_of_them(node, peer):
    log, refused = len(node.log_text()), node.status().refused_messages
    with contextlib.ExitStack() as stack:
        context = stack.enter_context(zmq.Context())
        for _ in range(40):
            keys, made = make_keys(), stack.enter_context(context.socket(zmq.DEALER))
            made.linger, made.immediate, made.sndtimeo = 0, 1, 0
            made.curve_serverkey = peer.key.encode()
            made.curve_publickey, made.curve_secretkey = keys.public.encode(), keys.secret.encode()
            made.connect(peer.endpoint)
        wait_for(lambda: any("was refused" in line for line in node.status().errors))
        time.sleep(1.0)
        status = quick_status(node)
        assert len(status.errors) <= 20
        assert len([line for line in status.errors if "was refused" in line]) <= 16
        assert status.refused_messages == refused, "none came so far as to say something"
        assert node.log_text()[log:].count("\n") <= 2


# --- the bulk port, of daemons that have a job together


@pytest.fixture(name="pair", scope="module")
def fixture_pair():
    zygote = Zygote()
    try:
        with a_cluster(zygote, "b", CKPTD_LOG_LEVEL="info") as cluster:
            port = free_port()
            cluster.add("a", CKPTD_BULK_PORT=str(port))
            ranks = cluster.ranks("ab", "bulk")
            ranks.connect()
            ranks.call("load")
            ranks.save(10, "protected", "durable")
            yield cluster.nodes["a"], ("127.0.0.1", port)
            cluster.end(ranks)
    finally:
        zygote.close()


HELLOS = {
    "nothing": b"",
    "half a hello": wire.MAGIC + bytes(20),
    "an unknown link": wire.hello(bytes(32), "0" * 32, 1),
    "another version": b"CKPTDBK9" + bytes(wire.HELLO.size - 8),
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".ljust(wire.HELLO.size),
    "an ask without a hello": wire.LENGTH.pack(1 << 31) + bytes(wire.HELLO.size),
}


def test_the_bulk_port_says_nothing_to_who_has_no_token(pair):
    """Eight of each kind at once, more than it holds of strangers."""
    node, place = pair
    log, before = len(node.log_text()), resident(node.daemon.pid)
    said = [hello for hello in HELLOS.values() for _ in range(8)]
    with crowd(place, len(said)) as strangers:
        for stranger, hello in zip(strangers, said, strict=True):
            with contextlib.suppress(OSError):
                stranger.sendall(hello)
        for stranger in strangers:
            assert heard_until_the_end(stranger, 10.0) == b""
    assert resident(node.daemon.pid) - before < MOST_GROWTH
    assert [line for line in node.log_text()[log:].splitlines() if "bulk" in line and "job=bulk" not in line] == []


# --- the metrics, which are another process


@pytest.fixture(name="exporter")
def fixture_exporter(node):
    port = free_port()
    verb = [sys.executable, "-m", "ckptd", "metrics", "--port", str(port)]
    process = pythons.Popen(verb, env=node.environ(), stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr.readline() == f"serving http://127.0.0.1:{port}/metrics\n"
        yield process, port
    finally:
        process.kill()
        process.communicate()


def test_metrics_are_served_on_loopback_alone_and_beside_any_crowd(exporter):
    process, port = exporter
    with open("/proc/net/tcp") as file:
        listening = [
            words[1] for words in map(str.split, file) if words[1].endswith(f":{port:04X}") and words[3] == "0A"
        ]
    assert listening == [f"0100007F:{port:04X}"]
    before = resident(process.pid)
    with crowd(("127.0.0.1", port), 200) as strangers:
        for stranger in strangers[::2]:
            with contextlib.suppress(ConnectionError):
                stranger.sendall(b"GET /metrics HTTP/1.0\r\nX: ")
        assert len(os.listdir(f"/proc/{process.pid}/task")) < 40
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            assert b"ckptd_up 1.0" in answer.read()
    assert resident(process.pid) - before < MOST_GROWTH


@pytest.mark.parametrize(
    "said",
    [
        b"POST /metrics HTTP/1.0\r\n\r\n",
        b"\x00" * 100_000 + b"\r\n\r\n",
        b"GET " + b"x" * 70_000 + b" HTTP/1.0\r\n\r\n",
    ],
)
def test_metrics_answer_a_get_and_nothing_else(exporter, said):
    _, port = exporter
    with crowd(("127.0.0.1", port), 1) as (stranger,):
        with contextlib.suppress(ConnectionError):
            stranger.sendall(said)
        assert b"ckptd_" not in heard_until_the_end(stranger, 10.0)
