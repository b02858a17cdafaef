"""What goes wrong between nodes: damage is found, named and never sealed; no thread hangs; a cut run leaves nothing."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

import msgspec
import pytest

from ckptd.arena.arena import Arena
from ckptd.parity.encode import encode
from ckptd.parity.files import Parities, open_parity
from ckptd.parity.rebuild import Place, copy_segment, rebuild_segment
from ckptd.shared.base.errors import DamagedError, PeerError, ProtocolError
from ckptd.shared.base.ids import SaveId
from ckptd.shared.bulk import wire
from ckptd.shared.bulk.client import Address, Connection
from ckptd.shared.bulk.sockets import Cancel
from ckptd.shared.format import arena_paths
from ckptd.shared.format.digest import BLOCK_NBYTES
from ckptd.shared.format.schemes import Scheme
from ckptd.shared.format.slot import SlotState
from ckptd.system import failpoints
from tests import pythons
from tests.cluster import ROOT
from tests.nodes import EPOCH, KEY, SAVE, SECRET, content, noise, start_set
from tests.runs import RUN
from tests.signals import stop

SIZE = 2 * BLOCK_NBYTES + 12_345  # of each of three columns: chunks with whole blocks and parts of some


@pytest.fixture
def directory():
    with tempfile.TemporaryDirectory(prefix="ckptd-test-", dir="/dev/shm") as directory:
        yield directory


@pytest.fixture
def nodes(directory):
    made = start_set(directory, 3)
    made.stage([[noise(i, SIZE)] for i in range(3)])
    yield made
    made.stop()


def ignore(_nbytes):
    return None


def encode_one(nodes, index, cancel=None, scheme=Scheme.XOR):
    node = nodes.nodes[index]
    encode(node.parities, KEY, nodes.parity_chunk(index, scheme), nodes.sources(node, cancel), ignore)


def rebuild_one(nodes, lost, at, cancel=None):
    node = nodes.nodes[at]
    place = Place(node.arena, KEY, nodes.columns[lost].seals[0])
    parity_chunk = nodes.parity_chunk(at, Scheme.XOR)
    return rebuild_segment(
        place, parity_chunk, nodes.homes([lost]), nodes.parity_chunks([lost]), nodes.sources(node, cancel), ignore
    )


def flip_slot(node, rank, at):
    view = node.arena.view(KEY, node.arena.slot_of(KEY, rank, SAVE))
    view[at] ^= 1


def nothing_sealed(nodes, index):
    assert open_parity(nodes.nodes[index].arena, KEY, SAVE, EPOCH) is None


class Relay:
    """Between a client and a server: passes bytes on, and may change or stop them."""

    def __init__(self, to, *, flip=-1, stop=-1):
        self._to, self._flip, self._stop = to, flip, stop
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = Address("127.0.0.1", self._socket.getsockname()[1], to.link, to.secret)
        self._open = [self._socket]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                client = self._socket.accept()[0]
                server = socket.create_connection((self._to.host, self._to.port))
                self._open += [client, server]
                threading.Thread(target=self._pass, args=(client, server, -1, -1), daemon=True).start()
                args = (server, client, self._flip, self._stop)
                threading.Thread(target=self._pass, args=args, daemon=True).start()

    @staticmethod
    def _pass(source, sink, flip, stop):
        done = 0
        with contextlib.suppress(OSError):
            while part := bytearray(source.recv(1 << 16)):
                if done <= flip < done + len(part):
                    part[flip - done] ^= 1
                if 0 <= stop < done + len(part):
                    break
                sink.sendall(part)
                done += len(part)
            sink.shutdown(socket.SHUT_RDWR)
            source.shutdown(socket.SHUT_RDWR)

    def close(self):
        for one in self._open:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()


@pytest.fixture
def relay(nodes):
    made = []

    def make(name, **faults):
        made.append(Relay(nodes.address_of(name), **faults))
        nodes.relays[name] = made[0].address

    yield make
    for one in made:
        one.close()


# --- flipped bits


@pytest.mark.parametrize("at", [5, SIZE - 1, BLOCK_NBYTES + 100, -3], ids=["first", "last", "middle", "tail"])
def test_a_flipped_bit_in_a_slot_is_named_and_no_parity_sealed(nodes, at):
    """Each byte of column 1 is in the group of node 0 or of node 2: one of them finds it."""
    seal = nodes.columns[1].seals[0]
    flip_slot(nodes.nodes[1], 1, at if at >= 0 else seal.content_nbytes + at)
    slot = nodes.nodes[1].arena.slot_of(KEY, 1, SAVE)
    what = "leaves" if at < 0 else f"block {at // BLOCK_NBYTES}"
    found = []
    for index in (0, 2):
        try:
            encode_one(nodes, index)
        except (DamagedError, PeerError) as error:
            found.append(error.message)
            nothing_sealed(nodes, index)
    assert found
    assert all("node n1" in text and slot in text and what in text for text in found), found


def test_padding_may_be_anything_at_any_time(nodes):
    for index in range(3):
        encode_one(nodes, index)
    seal = nodes.columns[0].seals[0]
    assert seal.table_offset > seal.image_nbytes
    flip_slot(nodes.nodes[0], 0, seal.image_nbytes)
    before = content(nodes.nodes[1].arena, 1)
    rebuild_one(nodes, 1, 2)
    assert content(nodes.nodes[2].arena, 1) == before


@pytest.mark.parametrize("where", ["slot", "parity"])
def test_a_flipped_bit_in_what_a_rebuild_reads_is_named_and_no_slot_sealed(nodes, where):
    for index in range(3):
        encode_one(nodes, index)
    if where == "slot":
        flip_slot(nodes.nodes[0], 0, SIZE - 1)  # of the half that is in a group with the lost node
        pattern = r"node n0.*slot r00000-000001.slot block 2"
    else:
        name = arena_paths.parity_name(SAVE, EPOCH)
        nodes.nodes[0].arena.view(KEY, name)[9] ^= 1
        pattern = rf"node n0.*parity file {name} block 0"
    before = nodes.nodes[2].arena.used_nbytes
    with pytest.raises(DamagedError, match=pattern):
        rebuild_one(nodes, 1, 2)
    assert nodes.nodes[2].arena.slot_of(KEY, 1, SAVE) is None
    assert nodes.nodes[2].arena.used_nbytes == before


def test_a_flipped_bit_in_a_copy_is_named(nodes):
    flip_slot(nodes.nodes[0], 0, BLOCK_NBYTES + 1)
    node = nodes.nodes[1]
    with pytest.raises(DamagedError, match=r"node n0: slot r00000-000001.slot block 1"):
        copy_segment(Place(node.arena, KEY, nodes.columns[0].seals[0]), "n0", nodes.sources(node), ignore)
    assert node.arena.slot_of(KEY, 0, SAVE) is None


@pytest.mark.parametrize("at", [100, 5000, 1 << 20, BLOCK_NBYTES], ids=["table", "early", "mid", "late"])
def test_a_flipped_bit_on_the_wire_seals_nothing(nodes, relay, at):
    relay("n1", flip=at)
    with pytest.raises((DamagedError, PeerError), match="node n1"):
        encode_one(nodes, 0)
    nothing_sealed(nodes, 0)
    del nodes.relays["n1"]
    encode_one(nodes, 0)
    assert open_parity(nodes.nodes[0].arena, KEY, SAVE, EPOCH) is not None


def test_a_flipped_bit_on_the_wire_of_a_rebuild_seals_nothing(nodes, relay):
    for index in range(3):
        encode_one(nodes, index)
    relay("n0", flip=2 << 20)
    with pytest.raises(DamagedError, match=r"on the wire|in place of"):
        rebuild_one(nodes, 1, 2)
    assert nodes.nodes[2].arena.slot_of(KEY, 1, SAVE) is None


# --- strangers


def dial(node):
    return socket.create_connection((node.server.host, node.server.port), timeout=10)


def test_a_wrong_secret_gets_nothing(nodes):
    wrong = nodes.nodes[1].address._replace(secret=bytes(32))
    with pytest.raises(PeerError, match="node n1 hung up at the hello"):
        Connection("n1", wrong, Cancel(), timeout_s=5)
    with pytest.raises(PeerError, match="hung up at the hello"):
        Connection("n1", nodes.nodes[1].address._replace(link="stranger"), Cancel(), timeout_s=5)


def test_a_server_without_the_secret_is_found_out(nodes):
    with socket.create_server(("127.0.0.1", 0)) as fake:

        def serve():
            with fake.accept()[0] as connection:
                connection.recv(wire.HELLO.size)
                connection.sendall(bytes(wire.PROOF_NBYTES))
                connection.recv(1)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(PeerError, match="node n1 does not know the secret"):
            Connection("n1", Address(*fake.getsockname(), "link", SECRET), Cancel(), timeout_s=5)
        thread.join()


def test_a_replayed_hello_gets_nothing(nodes):
    said = wire.hello(SECRET, "link-replayed", 7)
    for answer in (wire.PROOF_NBYTES, 0):
        with dial(nodes.nodes[0]) as connection:
            connection.sendall(said)
            assert len(connection.recv(wire.PROOF_NBYTES)) == answer


def test_counters_are_taken_once_in_any_order():
    counters = wire.Counters()
    assert [counters.take(n) for n in (5, 3, 5, 4, 3, 9000, 9000, 8999, 4000)] == [
        True, True, False, True, False, True, False, True, False,
    ]  # fmt: skip


@pytest.mark.parametrize("what", ["oversized", "malformed", "out of range", "no such rank", "negative"])
def test_asks_that_make_no_sense_are_refused(nodes, what):
    seal = nodes.columns[0].seals[0]
    connection = Connection("n0", nodes.nodes[0].address, Cancel(), timeout_s=5)
    into = memoryview(bytearray(16))
    try:
        if what == "oversized":
            connection._socket.sendall(wire.LENGTH.pack(wire.MAX_ASK_NBYTES + 1))
        elif what == "malformed":
            connection._socket.sendall(wire.LENGTH.pack(3) + b"abc")
        elif what == "negative":
            body = msgspec.msgpack.encode([KEY, SAVE, 1, [[0, -4096, 16, False]]])
            connection._socket.sendall(wire.LENGTH.pack(len(body)) + body)
        rank, offset = (9, 0) if what == "no such rank" else (0, seal.content_nbytes - 15)
        with contextlib.suppress(PeerError):
            connection.ask(KEY, SAVE, EPOCH, [wire.Range(rank, offset, 16, False)])
        with pytest.raises((PeerError, ProtocolError), match="node n0"):
            connection.receive(into)
        assert bytes(into) == bytes(16) or b"R" not in into
    finally:
        connection.close()
    encode_one(nodes, 2)  # and the server serves others


def test_silent_strangers_keep_no_node_out(nodes, monkeypatch):
    monkeypatch.setattr("ckptd.shared.bulk.server._HELLO_TIMEOUT_S", 0.3)
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(dial(nodes.nodes[1])) for _ in range(40)]
        time.sleep(0.5)
        encode_one(nodes, 0)
        for connection in silent:
            with contextlib.suppress(ConnectionError):
                assert connection.recv(1) == b""


# --- peers that go


def test_a_server_gone_in_mid_stream_is_named(nodes, relay):
    relay("n1", stop=3 << 20)
    with pytest.raises(PeerError, match="node n1"):
        encode_one(nodes, 0)
    nothing_sealed(nodes, 0)


def test_a_peer_without_a_link_is_named(nodes):
    nodes.down = {"n2"}
    with pytest.raises(PeerError, match="node n2 cannot be reached"):
        encode_one(nodes, 0)


def test_a_cancelled_encode_ends_at_once_and_leaves_nothing(nodes):
    nodes.timeout_s = 60
    with socket.create_server(("127.0.0.1", 0)) as hung:
        nodes.relays["n1"] = Address(*hung.getsockname(), "link", SECRET)
        cancel = Cancel()
        threading.Timer(0.3, cancel.cancel).start()
        start = time.monotonic()
        with pytest.raises(PeerError, match="cancelled"):
            encode_one(nodes, 0, cancel)
        assert time.monotonic() - start < 10
    nothing_sealed(nodes, 0)


def test_a_freed_slot_ends_the_encode(nodes):
    node = nodes.nodes[1]
    node.arena.free(KEY, node.arena.slot_of(KEY, 1, SAVE))
    with pytest.raises(PeerError, match="node n1: no segment of rank 1"):
        encode_one(nodes, 0)
    nothing_sealed(nodes, 0)


# --- the file


def test_pieces_are_found_again_and_what_is_not_whole_is_removed(nodes):
    for index in range(2):
        encode_one(nodes, index)
    first, second = nodes.nodes[0], nodes.nodes[1]
    name = arena_paths.parity_name(SAVE, EPOCH)
    assert Parities(first.arena).scan() == [(KEY, nodes.parity_chunk(0, Scheme.XOR))]
    path = second.arena.slot_path(KEY, name)
    with open(path, "r+b") as file:
        file.seek(os.path.getsize(path) - 8192)
        file.write(bytes(8192))
    assert Parities(second.arena).scan() == []
    assert not os.path.exists(path)


def test_two_files_are_kept_and_used_again(nodes):
    node = nodes.nodes[0]
    encode_one(nodes, 0)
    used = node.arena.used_nbytes
    node.parities.give_back(KEY, SAVE, EPOCH)
    nothing_sealed(nodes, 0)
    assert node.arena.used_nbytes == used
    encode_one(nodes, 0)
    assert node.arena.used_nbytes == used
    assert Parities(node.arena).scan() == [(KEY, nodes.parity_chunk(0, Scheme.XOR))]


# --- processes


class Process:
    """A node of its own."""

    def __init__(self, directory, index, failpoint=""):
        env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/client"}
        if failpoint:
            env[failpoints.VARIABLE] = failpoint
        self.process = pythons.Popen(
            [sys.executable, "-m", "tests.nodes", directory, f"n{index}", str(index), str(SIZE)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, cwd=ROOT,
        )  # fmt: skip
        said = json.loads(self.process.stdout.readline())
        self.index, self.port, self.seal = index, said["port"], said["seal"]

    def tell(self, do, others, lost=0):
        nodes = sorted([self, *others], key=lambda one: one.index)
        said = {
            "do": do,
            "index": self.index,
            "lost": lost,
            "columns": [(f"n{n.index}", n.seal) for n in nodes],
            "ports": {f"n{n.index}": n.port for n in nodes},
        }
        self.process.stdin.write(json.dumps(said) + "\n")
        self.process.stdin.flush()

    def done(self):
        return bool(self.process.stdout.readline())

    def end(self):
        with contextlib.suppress(OSError):
            self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture
def processes(directory):
    made = []

    def start(index, failpoint=""):
        made.append(Process(directory, index, failpoint))
        return made[-1]

    yield start
    for one in made:
        one.end()


def in_arena(directory, index):
    """What a new daemon would find there."""
    arena = Arena(os.path.join(directory, f"n{index}"))
    arena.open()
    slots = [s for s in arena.scan() if s.seal.state is not SlotState.FREE]
    parity_chunks = Parities(arena).scan()
    files = [n for n in os.listdir(arena.job_path(KEY)) if n.endswith(arena_paths.PARITY_SUFFIX)]
    arena.close(remove=False)
    return slots, parity_chunks, files


@pytest.mark.parametrize("point", [name for name in failpoints.POINTS if name.startswith("encode.")])
def test_an_encode_cut_anywhere_leaves_a_whole_piece_or_none(directory, processes, point):
    others = [processes(0), processes(1)]
    victim = processes(2, point)
    victim.tell("encode", others)
    assert not victim.done()
    assert victim.process.wait(30) == -signal.SIGKILL
    _, parity_chunks, files = in_arena(directory, 2)
    whole = point == "encode.after-seal"
    assert len(parity_chunks) == len(files) == int(whole)


@pytest.mark.parametrize("point", [name for name in failpoints.POINTS if name.startswith("rebuild.")])
def test_a_rebuild_cut_anywhere_leaves_a_whole_slot_or_none(directory, processes, point):
    others = [processes(0), processes(1)]
    victim = processes(2, point)
    trio = [*others, victim]
    for one in trio:
        one.tell("encode", [other for other in trio if other is not one])
        assert one.done()
    victim.tell("rebuild", others, lost=0)
    assert not victim.done()
    assert victim.process.wait(30) == -signal.SIGKILL
    slots, parity_chunks, _ = in_arena(directory, 2)
    assert sorted(slot.rank for slot in slots) == ([0, 2] if point == "rebuild.after-seal" else [2])
    assert len(parity_chunks) == 1


def test_a_stopped_peer_does_not_hang_an_encode(directory, nodes, processes):
    peer = processes(7)
    stop(peer.process.pid)
    nodes.timeout_s = 1.0
    nodes.relays["n1"] = Address("127.0.0.1", peer.port, "link", SECRET)
    start = time.monotonic()
    with pytest.raises(PeerError, match="node n1 does not answer"):
        encode_one(nodes, 0)
    assert time.monotonic() - start < 10
    nothing_sealed(nodes, 0)


def test_a_save_that_is_not_here_is_refused(nodes):
    connection = Connection("n0", nodes.nodes[0].address, Cancel(), timeout_s=5)
    connection.ask(KEY, SaveId(9, 9, 9, RUN), EPOCH, [wire.Range(wire.PARITY, 0, 0, True)])
    with pytest.raises(PeerError, match=r"node n0: no parity of step 9"):
        connection.receive(memoryview(b""))
    connection.close()
