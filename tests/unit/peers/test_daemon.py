"""The plane within real daemons: what they say of themselves, and what they leave."""

import contextlib
import errno
import fcntl
import itertools
import os
import shutil
import stat
import tempfile
import threading
import time
from collections import deque

import msgspec
import pytest
import zmq

from ckptd.arena.arena import Arena
from ckptd.arena.saved_topology import Kept, keep_topology, kept_topologies
from ckptd.core import actions as act
from ckptd.core.jobs import Catalogue
from ckptd.core.policy import Policy
from ckptd.daemon.action_executor import ActionExecutor
from ckptd.daemon.background import Background
from ckptd.daemon.loop import Daemon
from ckptd.daemon.status_service import Sources, StatusService
from ckptd.parity.encode import encode
from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.format import arena_paths, rank_file
from ckptd.shared.format.schemes import Scheme
from ckptd.shared.protocol import messages as m
from ckptd.shared.protocol.topology import Peer, Rendezvous, Topology
from tests.cluster import Node, wait_for
from tests.nodes import EPOCH, KEY, SAVE, start_set
from tests.runs import RUN

_SEQ = itertools.count(1)


@contextlib.contextmanager
def asking(node):
    """A socket to the daemon, for whatever is to be said."""
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.linger, socket.rcvtimeo = 0, 5000
    try:
        socket.connect(f"ipc://{node.arena}/{arena_paths.SOCKET}")
        yield socket
    finally:
        socket.close()
        context.term()


def ask_node(node):
    with asking(node) as socket:
        socket.send(m.encode(m.AskNode(seq=next(_SEQ))))
        return m.decode_reply(socket.recv())


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
    assert stat.S_IMODE(os.stat(os.path.join(node.arena, arena_paths.IDENTITY)).st_mode) == 0o600
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
        assert os.path.exists(os.path.join(arena, arena_paths.IDENTITY))
        assert node.daemon.wait(20) == 0
        assert not os.path.exists(arena)
        os.mkdir(arena, 0o700)  # for the node to remove


def test_the_topology_of_a_job_that_left_nothing_goes(node):
    node.start(CKPTD_NODE="n1")
    peer = ask_node(node).peer
    node.kill()
    job = JobKey(str(node.store), "job")
    keep_topology(node.arena, Kept(job, "s", Topology((peer,), (0,)), 1, 1))
    assert kept_topologies(node.arena)
    node.start(CKPTD_NODE="n1")
    wait_for(lambda: not kept_topologies(node.arena))
    wait_for(lambda: not os.listdir(os.path.join(node.arena, arena_paths.JOBS)))
    assert node.status().jobs == []


def test_parity_that_belongs_to_nothing_here_goes_at_the_start(node):
    node.start(CKPTD_NODE="n1")
    node.kill()
    made = start_set(node.arena, 2)
    try:
        made.stage([[b"one" * 1000], [b"two" * 1000]])
        own = made.nodes[0]
        encode(own.parities, KEY, made.parity_chunk(0, Scheme.XOR), made.sources(own), lambda _: None)
        name = arena_paths.parity_name(SAVE, EPOCH)
        directory = os.path.join(node.arena, arena_paths.job_dir(KEY))
        os.makedirs(directory)
        os.rename(own.arena.slot_path(KEY, name), os.path.join(directory, name))
    finally:
        made.stop()
        for one in made.nodes:
            shutil.rmtree(one.arena.path)
    node.start(CKPTD_NODE="n1")
    assert not os.path.exists(directory)
    assert node.status().used_nbytes == 0


def test_a_topology_that_cannot_be_kept_is_reported():
    with tempfile.TemporaryDirectory(prefix="ckptd-test-", dir="/dev/shm") as directory:
        cleaning, told = Background(1, "clean"), []
        effects = ActionExecutor(
            node="n1", arena=Arena(os.path.join(directory, "lock", "no")), known_stores=None, stores=None,
            digesting=None, allocating=None, cleaning=cleaning, deliver=None, store_timeout_s=1.0, bandwidth=0,
            note=lambda *words: told.append(words),
        )  # fmt: skip
        with open(os.path.join(directory, "lock"), "w"):
            job = JobKey("/store", "job")
        effects.perform(
            act.KeepTopology(
                job=job, session="s", topology=Topology((Peer("n1", "a", "", "k" * 40),), (0,)), epoch=1, since=1
            )
        )
        deadline = time.monotonic() + 5
        while not told and time.monotonic() < deadline:
            cleaning.deliver()
        cleaning.close()
        assert told[0][0] == job
        assert "could not be kept" in told[0][1]


def test_a_topology_is_kept_in_its_turn_and_goes_with_the_job(tmp_path):
    """Files of a job are removed in a thread: what is kept for its next life must come after."""
    directory = tempfile.mkdtemp(prefix="ckptd-test-", dir="/dev/shm")
    arena, cleaning = Arena(directory), Background(1, "clean")
    arena.open()
    try:
        effects = ActionExecutor(
            node="n1", arena=arena, known_stores=None, stores=None, digesting=None,
            allocating=None, cleaning=cleaning, deliver=None,
            store_timeout_s=1.0, bandwidth=0,
        )  # fmt: skip
        job = JobKey("/store", "job")
        one, two = (Topology((Peer(name, "arena", "", "k" * 40),), (0,)) for name in ("n1", "n2"))
        let_go = threading.Event()
        cleaning.run(let_go.wait, lambda _: None)
        for action in (
            act.KeepTopology(job=job, session="s", topology=one, epoch=1, since=1),
            act.ForgetJob(job=job),
            act.KeepTopology(job=job, session="s", topology=two, epoch=1, since=1),
        ):
            effects.perform(action)
        assert kept_topologies(directory) == []
        let_go.set()
        wait_for(lambda: kept_topologies(directory) == [Kept(job, "s", two, 1, 1)])
        effects.perform(act.ForgetJob(job=job))
        wait_for(lambda: os.listdir(os.path.join(directory, arena_paths.JOBS)) == [])
    finally:
        cleaning.close()
        arena.close(remove=True)
    assert not os.path.exists(directory)


def hold(node, job, rank=0):
    """A rank file, locked as a rank's is while it waits for the others of its job."""
    directory = os.path.join(node.arena, arena_paths.job_dir(job))
    os.makedirs(directory, mode=0o700, exist_ok=True)
    path = os.path.join(directory, arena_paths.rank_file_name(rank, "s"))
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.lockf(fd, fcntl.LOCK_EX)
    os.pwrite(fd, rank_file.encode(rank_file.RankRecord(job, rank, "s", "h")), 0)
    return fd


def test_a_daemon_stays_while_a_rank_waits_for_the_others_whatever_else_is_asked(tmp_path):
    arena = tempfile.mkdtemp(prefix="ckptd-test-", dir="/dev/shm")
    with Node(str(tmp_path), arena=arena) as node:
        node.start("--exit-when-empty")
        fd = hold(node, JobKey(str(node.store), "job"))
        info = ask_node(node)
        ask_anything(node)  # of somebody else: it must not shorten anybody's stay
        time.sleep(4.5)
        assert node.daemon.poll() is None
        assert ask_node(node).peer == info.peer
        os.close(fd)
        assert node.daemon.wait(10) == 0


def ask_anything(node):
    with asking(node) as socket:
        socket.send(m.encode(m.Skip(seq=1, save=SaveId(1, 1, 1, RUN), reason="")))
        assert isinstance(m.decode_reply(socket.recv()), m.Refused)


def test_the_identity_stays_while_a_job_has_anything_here():
    directory = tempfile.mkdtemp(prefix="ckptd-test-", dir="/dev/shm")
    try:
        arena = Arena(directory)
        arena.open()
        identity = os.path.join(directory, arena_paths.IDENTITY)
        with open(identity, "wb"):
            arena.job_path(JobKey("/store", "job"))
        arena.close(remove=True)
        assert os.path.exists(identity)
    finally:
        shutil.rmtree(directory)


@pytest.mark.parametrize("word", ["arena", "key"])
def test_a_rendezvous_at_another_daemon_of_this_node_is_refused(node, word):
    node.start(CKPTD_NODE="n1")
    peer = ask_node(node).peer
    wrong = msgspec.structs.replace(peer, **{word: {"arena": "another", "key": "x" * 40}[word]})
    job = JobKey(str(node.store), "job")
    fd = hold(node, job)
    with asking(node) as socket:
        attach = m.Attach(
            seq=1, version=m.VERSION, job=job, session="s", rank=0, world_size=2, host="h", pid=os.getpid(),
            rendezvous=Rendezvous(wrong, bytes(range(32))),
        )  # fmt: skip
        socket.send(m.encode(attach))
        reply = m.decode_reply(socket.recv())
    os.close(fd)
    assert (reply.code, reply.hint) == ("connect", "connect again")
    assert "was replaced" in reply.message


def test_a_daemon_at_an_ipv6_address_serves_bytes(node):
    node.start(CKPTD_NODE="n1", CKPTD_PEER_ADDRESS="::1")
    peer = ask_node(node).peer
    job = JobKey(str(node.store), "job")
    fd = hold(node, job)
    with asking(node) as socket:
        attach = m.Attach(
            seq=1, version=m.VERSION, job=job, session="s", rank=0, world_size=2, host="h", pid=os.getpid(),
            rendezvous=Rendezvous(peer, bytes(range(32))),
        )  # fmt: skip
        socket.send(m.encode(attach))
        assert not socket.poll(1000)  # it waits for the other
    assert ask_node(node).peer == peer
    os.close(fd)
    assert node.daemon.poll() is None


class Broken:
    """What fails at every touch."""

    def __getattr__(self, name):
        raise OSError(errno.EMFILE, "Too many open files")


def test_what_cannot_be_done_for_peers_is_reported_and_the_daemon_goes_on():
    daemon, job = object.__new__(Daemon), JobKey("/store", "job")
    daemon._queue, daemon._handling = deque(), False
    daemon._plane, daemon._catalogue = Broken(), Catalogue("n1", Policy())
    daemon.actions = {act.MeetPeers: (lambda action: daemon._plane.meet(action.job, action.peers),)}
    sources = Sources("n1", None, daemon._catalogue, None, daemon._plane, None, str, refused=int, problems=list)
    daemon._status_service = StatusService(sources, None)
    daemon._perform(act.MeetPeers(job=job, peers=()))
    assert "Too many open files" in daemon._status_service.errors[job][0]
