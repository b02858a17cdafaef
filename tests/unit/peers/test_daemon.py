"""The plane within real daemons: what they say of themselves, and what they leave."""

import itertools
import os
import stat
import tempfile
import threading

import pytest
import zmq

from ckptd.arena import Arena
from ckptd.background import Background
from ckptd.core import actions as act
from ckptd.effects import Effects
from ckptd.peers.kept import keep_topology, kept_topologies
from ckptd.protocol import messages as m
from ckptd.protocol import places
from ckptd.protocol.ids import JobKey
from ckptd.protocol.topology import Peer, Scheme, Topology
from tests.cluster import Node, wait_for

_SEQ = itertools.count(1)


def ask_node(node):
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    try:
        socket.connect(f"ipc://{node.arena}/{places.SOCKET}")
        socket.send(m.encode(m.AskNode(seq=next(_SEQ))))
        assert socket.poll(5000)
        return m.decode_reply(socket.recv())
    finally:
        socket.close()
        context.term()


@pytest.fixture
def node(tmp_path):
    with Node(str(tmp_path)) as made:
        yield made


def test_a_daemon_says_how_it_is_reached(node):
    node.start("--redundancy", "double", "--set-size", "5", CKPTD_NODE="n1", CKPTD_DOMAIN="rack 1")
    info = ask_node(node)
    assert (info.scheme, info.set_size) == (Scheme.DOUBLE, 5)
    assert (info.peer.node, info.peer.domain) == ("n1", "rack 1")
    assert info.peer.endpoint.startswith("tcp://127.0.0.1:")
    assert node.status().node == "n1"
    assert stat.S_IMODE(os.stat(os.path.join(node.arena, places.IDENTITY)).st_mode) == 0o600
    node.kill()
    node.start(CKPTD_NODE="n1", CKPTD_DOMAIN="rack 1")
    again = ask_node(node)
    assert again.peer == info.peer  # also the port
    assert (again.scheme, again.set_size) == (Scheme.XOR, 8)


def test_a_port_that_is_taken_says_what_to_set(node):
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    try:
        daemon = node.start("--peer-port", str(port), CKPTD_PEER_ADDRESS="127.0.0.1", ready=False)
        assert daemon.wait(10) == 2
        assert "set peer_address" in node.log_text()
    finally:
        socket.close(0)
        context.term()


def test_an_empty_daemon_takes_its_keys_along(tmp_path):
    arena = tempfile.mkdtemp(prefix="ckptd-test-", dir="/dev/shm")
    with Node(str(tmp_path), arena=arena) as node:
        node.start("--exit-when-empty")
        assert os.path.exists(os.path.join(arena, places.IDENTITY))
        assert node.daemon.wait(20) == 0
        assert not os.path.exists(arena)
        os.mkdir(arena, 0o700)  # for the node to remove


def test_the_topology_of_a_job_that_left_nothing_goes(node):
    node.start(CKPTD_NODE="n1")
    peer = ask_node(node).peer
    node.kill()
    job = JobKey(str(node.store), "job")
    keep_topology(node.arena, job, Topology((peer,), (0,)))
    assert kept_topologies(node.arena)
    node.start(CKPTD_NODE="n1")
    wait_for(lambda: not kept_topologies(node.arena))
    wait_for(lambda: not os.listdir(os.path.join(node.arena, places.JOBS)))
    assert node.status().jobs == []


def test_a_topology_is_kept_in_its_turn_and_goes_with_the_job(tmp_path):
    """Files of a job are removed in a thread: what is kept for its next life must come after."""
    directory = tempfile.mkdtemp(prefix="ckptd-test-", dir="/dev/shm")
    arena, cleaning = Arena(directory), Background(1, "clean")
    arena.open()
    try:
        effects = Effects(
            node="n1", arena=arena, stores=None, digesting=None, allocating=None, cleaning=cleaning, deliver=None,
            store_timeout_s=1.0, bandwidth=0,
        )  # fmt: skip
        job = JobKey("/store", "job")
        one, two = (Topology((Peer(name, "arena", "", "k" * 40),), (0,)) for name in ("n1", "n2"))
        let_go = threading.Event()
        cleaning.run(let_go.wait, lambda _: None)
        for action in (
            act.KeepTopology(job=job, topology=one),
            act.ForgetJob(job=job),
            act.KeepTopology(job=job, topology=two),
        ):
            effects.perform(action)
        assert kept_topologies(directory) == {}
        let_go.set()
        wait_for(lambda: kept_topologies(directory) == {job: two})
        effects.perform(act.ForgetJob(job=job))
        wait_for(lambda: os.listdir(os.path.join(directory, places.JOBS)) == [])
    finally:
        cleaning.close()
        arena.close(remove=True)
    assert not os.path.exists(directory)
