"""The ROUTER socket by itself: frames in, checked messages out, and nothing that a peer does makes it wait."""

import contextlib
import os
import tempfile
import time

import pytest
import zmq

from ckptd.daemon.rank_socket import RankSocket
from ckptd.shared.protocol.messages import AskDrain, AskStatus, Done, Refused, decode_reply, encode
from tests.cluster import wait_for


@pytest.fixture
def path():
    with tempfile.TemporaryDirectory(prefix="ckptd-test-", dir="/dev/shm") as directory:
        yield os.path.join(directory, "s")


@pytest.fixture
def server(path):
    server = RankSocket(path)
    yield server
    server.close()


@pytest.fixture
def peer(path, server):
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.connect(f"ipc://{path}")
    yield socket
    socket.close()
    context.term()


def receive(server, count=1):
    incoming = []

    def enough():
        incoming.extend(server.receive())
        return len(incoming) >= count

    wait_for(enough)
    return incoming


def test_a_request_and_its_answer(server, peer):
    peer.send(encode(AskStatus(seq=7)))
    (incoming,) = receive(server)
    assert incoming.request == AskStatus(seq=7)
    server.send(incoming.identity, Done(reply_to=7))
    assert peer.poll(5000)
    assert decode_reply(peer.recv()) == Done(reply_to=7)


def test_nonsense_is_refused_counted_and_answered(server, peer):
    peer.send(b"\xff")
    peer.send_multipart([b"", b""])
    peer.send(encode(AskDrain(seq=1)))
    assert [type(incoming.request) for incoming in receive(server)] == [AskDrain]
    assert server.refused == 2
    assert peer.poll(5000)
    assert isinstance(decode_reply(peer.recv()), Refused)


def test_one_round_takes_no_more_than_its_share(server, peer):
    for seq in range(300):
        peer.send(encode(AskStatus(seq=seq)))
    wait_for(lambda: server.pollable.poll(10))
    time.sleep(0.2)
    assert 0 < len(server.receive(most=100)) <= 100
    assert len(receive(server, 200)) == 200


def test_answers_to_one_who_left_are_dropped(server, peer):
    peer.send(encode(AskStatus(seq=1)))
    (incoming,) = receive(server)
    peer.close()
    for _ in range(2000):
        server.send(incoming.identity, Done(reply_to=1))
    server.send(b"nobody", Done(reply_to=1))


def test_answers_to_one_who_does_not_read_do_not_block(server, peer):
    peer.send(encode(AskStatus(seq=1)))
    (incoming,) = receive(server)
    began = time.monotonic()
    for _ in range(20000):
        server.send(incoming.identity, Done(reply_to=1))
    assert time.monotonic() - began < 5


def test_the_socket_is_its_owners_only(server, path):
    assert os.stat(path).st_mode & 0o777 == 0o600


def test_what_a_dead_daemon_left_is_replaced(path):
    with open(path, "w"):
        pass
    server = RankSocket(path)
    server.close()
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
