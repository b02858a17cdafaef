"""A man in the middle between two real sockets: he changes what one node sends another, and makes its digests right."""

import contextlib
import socket
import tempfile
import threading

import pytest

from ckptd.parity.encode import encode
from ckptd.parity.rebuild import Place, copy_segment, rebuild_segment
from ckptd.shared.base.errors import DamagedError, PeerError
from ckptd.shared.bulk import wire
from ckptd.shared.bulk.client import Connection
from ckptd.shared.bulk.sockets import Cancel
from ckptd.shared.format.digest import BLOCK_NBYTES, digest
from ckptd.shared.format.integrity import XXH3, Keyed
from ckptd.shared.format.schemes import Scheme
from tests import collide
from tests.nodes import KEY, SAVE, content, noise, start_set

ONE, OTHER = Keyed(bytes(range(32))), Keyed(bytes(32))
SIZE = BLOCK_NBYTES + 50_000
FRAME_NBYTES = 1 << 20  # of what a copy asks for
HEAD = wire.FRAME.size
EVIL = b"weights of somebody else's choice"


class Middle:
    """Relays connections to a node. change: of the frames, heads and all, that it sends; None drops one."""

    def __init__(self, target, change):
        self._target, self._change = target, change
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = target._replace(port=self._listener.getsockname()[1])
        self._threads = [threading.Thread(target=self._run, daemon=True)]
        self._threads[0].start()
        self._sockets = []

    def _run(self):
        while True:
            try:
                theirs = self._listener.accept()[0]
            except OSError:
                return
            ours = socket.create_connection((self._target.host, self._target.port))
            self._sockets += [theirs, ours]
            for work in (self._up, self._down):
                self._threads.append(threading.Thread(target=work, args=(theirs, ours), daemon=True))
                self._threads[-1].start()

    @staticmethod
    def _up(theirs, ours):
        try:
            while data := theirs.recv(1 << 16):
                ours.sendall(data)
            ours.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def _down(self, theirs, ours):
        try:
            theirs.sendall(exactly(ours, wire.PROOF_NBYTES))
            while True:
                head = exactly(ours, HEAD)
                _, nbytes, _ = wire.FRAME.unpack(head)
                for frame in self._change(head + exactly(ours, nbytes)):
                    theirs.sendall(frame)
        except (OSError, EOFError):
            theirs.close()

    def close(self):
        for one in (self._listener, *self._sockets):
            with_shutdown(one)


def with_shutdown(one):
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
    one.close()


def exactly(sock, nbytes):
    parts = bytearray()
    while len(parts) < nbytes:
        part = sock.recv(nbytes - len(parts))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)


@pytest.fixture
def make():
    """Two nodes, the first with an image, the second with what lies in the middle."""
    made, middles = [], []
    with tempfile.TemporaryDirectory(prefix="ckptd-test-", dir="/dev/shm") as directory:

        def start(integrity, change):
            nodes = start_set(directory, 2, integrity)
            nodes.stage([[noise(i, SIZE)] for i in range(2)])
            middles.append(Middle(nodes.nodes[0].address, change))
            nodes.relays["n0"] = middles[0].address
            made.append(nodes)
            return nodes

        yield start
        for one in middles + made:
            one.close() if isinstance(one, Middle) else one.stop()


def copied(nodes):
    """Rank 0's segment as the second node got it."""
    at = nodes.nodes[1]
    copy_segment(Place(at.arena, KEY, nodes.columns[0].seals[0]), "n0", nodes.sources(at), lambda _: None)
    return content(at.arena, 0)


def collider():
    """Puts other bytes into the first block, whose XXH3 does not change: he knows the block by the time it ends.

    He needs its first frame only, and what the block was before: he saw it go by in an earlier save, say.
    """
    block = noise(0, SIZE)[:BLOCK_NBYTES]
    forged = collide.forge(block, 4096, EVIL)
    assert digest(forged) == digest(block)

    def change(frame):
        if frame[HEAD : HEAD + 64] == block[:64]:
            frame = frame[:HEAD] + forged[: len(frame) - HEAD]
        return [frame]

    return change


def test_without_a_key_forged_bytes_are_sealed_on_the_other_node(make):
    """What XXH3 is not for. docs/security.md says so."""
    nodes = make(XXH3, collider())
    assert EVIL in copied(nodes)


def test_with_a_key_they_are_refused(make):
    nodes = make(ONE, collider())
    with pytest.raises(DamagedError, match="or are not from that node"):
        copied(nodes)
    assert nodes.nodes[1].arena.slot_of(KEY, 0, SAVE) is None


def test_with_a_key_forged_bytes_reach_no_parity_and_no_rebuild(make):
    nodes = make(ONE, collider())
    node = nodes.nodes[1]
    with pytest.raises(DamagedError, match="or are not from that node"):
        encode(node.parities, KEY, nodes.parity_chunk(1, Scheme.XOR), nodes.sources(node), lambda _: None)


def once(act):
    """A change of the second frame of data."""
    seen = []

    def change(frame):
        if frame[:4] != wire.DATA:
            return [frame]
        seen.append(frame)
        return act(seen) if len(seen) == 2 else [frame]

    return change


def flipped(seen):
    frame = bytearray(seen[1])
    frame[-1] ^= 1
    return [bytes(frame)]


def relabelled(seen):
    """The end of the answer before its time."""
    return [wire.FRAME.pack(wire.DONE, 0, b"")]


def reordered():
    held = []

    def change(frame):
        if frame[:4] == wire.DATA and not held:
            held.append(frame)
            return []
        if len(held) == 1:
            held.append(None)
            return [frame, held[0]]
        return [frame]

    return change


TAMPERED = {  # made anew for each test: they remember what they saw
    "a byte flipped": lambda: once(flipped),
    "an earlier frame again in place of one": lambda: once(lambda seen: [seen[0]]),
    "a frame twice": lambda: once(lambda seen: [seen[1], seen[1]]),
    "one left out": lambda: once(lambda _seen: []),
    "an end that nobody said": lambda: once(relabelled),
    "two in another order": reordered,
}


@pytest.mark.parametrize("what", TAMPERED)
def test_with_a_key_every_frame_is_the_one_that_was_sent(make, what):
    """Ranges of equal length, whose bytes are compared by nobody else."""
    nodes = make(ONE, TAMPERED[what]())
    image, got = content(nodes.nodes[0].arena, 0), []

    def receive():
        connection = Connection("n0", nodes.relays["n0"], Cancel(), timeout_s=2, integrity=ONE)
        with contextlib.closing(connection):
            connection.ask(KEY, SAVE, 0, [wire.Range(0, 4096 * i, 4096, False) for i in range(4)])
            for _ in range(4):
                into = memoryview(bytearray(4096))
                connection.receive(into)
                got.append(bytes(into))

    with pytest.raises((DamagedError, PeerError)):
        receive()
    assert got == [image[4096 * i : 4096 * (i + 1)] for i in range(len(got))], "nothing else ever passed"


def test_without_a_key_an_earlier_frame_passes_for_a_later_one(make):
    """The same that is refused above: whoever asks compares whole blocks, later."""
    nodes = make(XXH3, once(lambda seen: [seen[0]]))
    connection = Connection("n0", nodes.relays["n0"], Cancel(), timeout_s=2)
    connection.ask(KEY, SAVE, 0, [wire.Range(0, 4096 * i, 4096, False) for i in range(2)])
    got = [memoryview(bytearray(4096)) for _ in range(2)]
    for into in got:
        connection.receive(into)
    connection.close()
    assert got[0] == got[1]


def test_with_a_key_asks_are_those_of_the_peer(make):
    """Another range of the same length, in an ask on its way."""
    nodes = make(ONE, lambda frame: [frame])
    target = nodes.nodes[0].address
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def relay():
            theirs = listener.accept()[0]
            with theirs, socket.create_connection((target.host, target.port)) as ours:
                ours.sendall(exactly(theirs, wire.HELLO.size))
                theirs.sendall(exactly(ours, wire.PROOF_NBYTES))
                (nbytes,) = wire.LENGTH.unpack(head := exactly(theirs, wire.LENGTH.size))
                body = exactly(theirs, nbytes + wire.MARK_NBYTES)
                changed = wire.encode_ask(wire.Ask(KEY, SAVE, 0, [wire.Range(0, 8192, 4096, False)]))
                assert len(changed) == nbytes
                ours.sendall(head + changed + body[nbytes:])
                theirs.sendall(ours.recv(1 << 16))

        thread = threading.Thread(target=relay)
        thread.start()
        connection = Connection(
            "n0", target._replace(port=listener.getsockname()[1]), Cancel(), timeout_s=5, integrity=ONE
        )
        connection.ask(KEY, SAVE, 0, [wire.Range(0, 4096, 4096, False)])
        with pytest.raises(PeerError, match="an ask that is not from that node"):
            connection.receive(memoryview(bytearray(4096)))
        connection.close()
        thread.join()


@pytest.mark.parametrize(("server", "client"), [(ONE, XXH3), (XXH3, ONE), (ONE, OTHER)])
def test_nodes_with_other_settings_get_no_byte_of_each_other(make, server, client):
    nodes = make(server, lambda frame: [frame])
    with pytest.raises(PeerError, match="or other integrity settings than this one"):
        Connection("n0", nodes.nodes[0].address, Cancel(), timeout_s=5, integrity=client)


def test_what_is_asked_for_in_parts_is_proved_at_its_end(make):
    nodes = make(ONE, lambda frame: [frame])
    nodes.relays.clear()
    at = nodes.nodes[1]
    for node in nodes.nodes:
        index = nodes.nodes.index(node)
        encode(node.parities, KEY, nodes.parity_chunk(index, Scheme.XOR), nodes.sources(node), lambda _: None)
    place = Place(at.arena, KEY, nodes.columns[0].seals[0])
    rebuild_segment(
        place,
        nodes.parity_chunk(1, Scheme.XOR),
        nodes.homes([0]),
        nodes.parity_chunks([0]),
        nodes.sources(at),
        lambda _: None,
    )
    assert content(at.arena, 0) == content(nodes.nodes[0].arena, 0)
