"""Nodes that read a checkpoint together through peer exchanges: real sockets, memory, files, a thread for each rank."""

import contextlib
import gc
import os
import queue
import threading
import time
from collections import Counter

import numpy as np
import pytest

from ckptd.shared.base.errors import DamagedError, PeerError
from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.bulk import wire
from ckptd.shared.bulk.client import Address, Connection
from ckptd.shared.bulk.server import BulkServer
from ckptd.shared.bulk.sockets import Cancel
from ckptd.shared.files.mapping import Mapping
from ckptd.shared.format.digest import BLOCK_NBYTES
from ckptd.shared.format.integrity import XXH3, Keyed
from ckptd.shared.format.manifest import FileRecord
from ckptd.shared.protocol import read_tree
from ckptd.shared.protocol.messages import PlaceKnown
from ckptd.shared.protocol.read_tree import ExchangeAddress, Place
from ckptd.shared.stores.directory import OpenedFile
from ckptd_client._load.reader import Piece, Source, Target
from ckptd_client._load.shared_read import node_group, peer_exchange, plan, senders
from ckptd_client._load.shared_read.found import Found, pack
from ckptd_client._load.shared_read.meeting import NodeReaders
from ckptd_client._load.shared_read.parent import Parent
from ckptd_client._load.shared_read.participants import Participants
from ckptd_client._load.shared_read.peer_exchange import PeerExchange
from ckptd_client._load.shared_read.plan import Summary, column_of
from ckptd_client._load.shared_read.read import copy_out_together
from ckptd_client._load.shared_read.schedule import Blocks
from tests.long_form import in_long
from tests.runs import RUN
from tests.stored import Listed

JOB = JobKey("/store", "job")
SAVE = SaveId(1, 1, 1, RUN)
KEYED = Keyed(bytes(32))
SIZES = (BLOCK_NBYTES + 5000, 100, BLOCK_NBYTES)


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(node_group, "_JOIN_S", 5.0)
    monkeypatch.setattr(peer_exchange, "NODES_JOIN_S", 3.0)
    monkeypatch.setattr(peer_exchange, "LEVEL_S", 1.0)
    monkeypatch.setattr(node_group, "_PATIENCE_S", 5.0)
    monkeypatch.setattr(node_group, "_NODE_PATIENCE_S", 2.5)


class Checkpoint:
    """Images in files, and how often each block of each was read."""

    def __init__(self, directory, sizes=SIZES, integrity=XXH3):
        self.directory, self.integrity = directory, integrity
        self.open_source = self.open
        self.images = [os.urandom(nbytes) for nbytes in sizes]
        self.records = []
        self.read = []
        for rank, image in enumerate(self.images):
            (directory / f"{rank}").write_bytes(image)
            blocks = [image[at : at + BLOCK_NBYTES] for at in range(0, len(image), BLOCK_NBYTES)]
            table = b"".join(map(integrity.digest, blocks))
            record = FileRecord(
                name=f"r{rank:05d}",
                rank=rank,
                nbytes=len(image),
                digests=table,
                plan=b"",
                form=b"",
                own=b"",
                leaves=b"",
            )
            self.records.append(record)

    def open(self, rank):
        read = self.read

        class Counted(Source):
            def checked(self, index, buffer):
                read.append((rank, index))
                return super().checked(index, buffer)

        path, record = str(self.directory / f"{rank}"), self.records[rank]
        piece = Piece(OpenedFile(os.open(path, os.O_RDONLY)), path, 0, record.nbytes)
        return Counted((piece,), path, record.nbytes, record.digests, None, None, readers=2, integrity=self.integrity)


@pytest.fixture
def checkpoint(tmp_path):
    (tmp_path / "store").mkdir()
    return Checkpoint(tmp_path / "store")


class Job:
    """Nodes, each with its ranks: wants by node and local rank, the numbers of the images that a rank wants whole."""

    def __init__(self, checkpoint, directory, wants, keys=None):
        self.checkpoint, self.directory, self.wants = checkpoint, directory, wants
        self.keys = keys or [checkpoint.integrity] * len(wants)
        self.addresses = {node: queue.Queue() for node in range(len(wants))}
        self.silent = set()  # nodes whose address is not known
        self.got, self.failed = {}, {}

    def participants(self, node, rank):
        directory = self.directory / f"node{node}"
        directory.mkdir(exist_ok=True)
        readers = tuple(range(len(self.wants[node])))
        here = NodeReaders(str(directory), "s", readers, rank, "load.1.1", nodes=len(self.wants) > 1)

        def find_place(own, _number):
            place = Place(node, len(self.wants))
            for _ in range(len(self.wants)):
                self.addresses[node].put(own)
            silent = place.parent is None or place.parent in self.silent
            parent = None if silent else self.addresses[place.parent].get()
            return PlaceKnown(reply_to=1, number=node, count=place.nodes, parent=parent)

        return Participants(JOB, here, SAVE, "127.0.0.1", find_place)

    def load(self, node, rank):
        images = self.wants[node][rank]
        sizes = [len(image) for image in self.checkpoint.images]
        found = {image: Mapping(None, sizes[image]) for image in images}
        targets = {image: [Target(0, sizes[image], memory.address)] for image, memory in found.items()}
        try:
            with self.participants(node, rank) as taking:
                records, integrity = Listed(self.checkpoint.records), self.keys[node]
                copy_out_together(self.checkpoint.open_source, targets, records, taking, integrity)
        except (DamagedError, OSError) as error:
            self.failed[node, rank] = error
        self.got[node, rank] = {image: bytes(memory.view[: sizes[image]]) for image, memory in found.items()}

    def run(self, absent=()):
        places = [(node, rank) for node, ranks in enumerate(self.wants) for rank in range(len(ranks))]
        threads = [threading.Thread(target=self.load, args=place) for place in places if place[0] not in absent]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for (node, rank), found in self.got.items():
            if (node, rank) not in self.failed:
                assert found == {image: self.checkpoint.images[image] for image in self.wants[node][rank]}
        assert list(self.directory.glob("node*/*")) == []


ALL = (0, 1, 2)


@pytest.mark.parametrize(
    "wants",
    [
        [[ALL], [ALL]],
        [[ALL, ALL], [ALL, ALL]],
        [[ALL], [ALL, ALL, ALL], [ALL, (0,)]],
        [[(0,)], [(1,)], [(2, 0)]],
        [[(), (0,)], [(0, 2), ()], [()]],
    ],
)
def test_each_block_is_read_once_by_all_nodes(checkpoint, tmp_path, wants):
    job = Job(checkpoint, tmp_path, wants)
    job.run()
    assert job.failed == {}
    assert len(checkpoint.read) == len(set(checkpoint.read)), checkpoint.read


def test_with_a_key_each_block_is_read_once_by_all_nodes(tmp_path):
    (tmp_path / "keyed").mkdir()
    checkpoint = Checkpoint(tmp_path / "keyed", integrity=KEYED)
    job = Job(checkpoint, tmp_path, [[ALL], [ALL, ALL]])
    job.run()
    assert job.failed == {}
    assert len(checkpoint.read) == len(set(checkpoint.read)), checkpoint.read


def test_a_node_without_the_key_reads_by_itself(tmp_path):
    """It gets no byte of the others, nor they of it."""
    (tmp_path / "keyed").mkdir()
    checkpoint = Checkpoint(tmp_path / "keyed", integrity=KEYED)
    job = Job(checkpoint, tmp_path, [[ALL], [ALL]], keys=[KEYED, Keyed(bytes([1]) * 32)])
    job.run()
    assert job.failed == {}
    assert len(checkpoint.read) == 2 * len(set(checkpoint.read))


def test_a_node_that_does_not_come_costs_the_others_patience_only(checkpoint, tmp_path):
    job = Job(checkpoint, tmp_path, [[ALL], [ALL], [ALL, ALL]])
    job.run(absent={1})
    assert job.failed == {}
    assert set(job.got) == {(0, 0), (2, 0), (2, 1)}
    assert len(checkpoint.read) == len(set(checkpoint.read)), checkpoint.read


def test_a_node_that_does_not_find_its_parent_reads_by_itself_with_those_below_it(checkpoint, tmp_path, small_tree):
    """Nodes 2 and 3 are a subtree: they read each block once more, and no node waits for anything but its patience."""
    job = Job(checkpoint, tmp_path, [[ALL]] * 4)
    job.silent = {0}
    job.addresses[0].put = lambda _own: None
    job.run()
    assert job.failed == {}
    assert set(job.got) == {(node, 0) for node in range(4)}
    places = set(checkpoint.read)
    assert len(checkpoint.read) == 3 * len(places)  # nodes 0 and 1 find no parent: 0 is root of itself; 2 and 3


@pytest.fixture
def small_tree(monkeypatch):
    """A tree of pairs: four levels for 16 nodes."""
    monkeypatch.setattr(read_tree, "FANOUT", 2)


@pytest.mark.parametrize("nodes", [8, *in_long(3)])
def test_nodes_of_a_tree_of_several_levels_read_each_block_once(checkpoint, tmp_path, small_tree, nodes):
    job = Job(checkpoint, tmp_path, [[ALL, ALL] if node % 3 else [ALL] for node in range(nodes)])
    job.run()
    assert job.failed == {}
    assert len(checkpoint.read) == len(set(checkpoint.read)), checkpoint.read


@pytest.mark.parametrize("when", ["before it sends", "in the middle"])
def test_the_place_of_a_source_that_fails_is_taken_by_one_that_it_sends_to(checkpoint, tmp_path, monkeypatch, when):
    """Of the nodes below it none reads the store but those that it sends to."""
    real, failing = peer_exchange._Image.view, []

    def view(self, offset, nbytes):
        if not failing and (when == "before it sends" or offset):
            failing.append(self.group)
        if failing and self.group is failing[0]:
            raise OSError("gone")
        return real(self, offset, nbytes)

    monkeypatch.setattr(peer_exchange._Image, "view", view)
    job = Job(checkpoint, tmp_path, [[ALL]] * 8)
    job.run()
    assert job.failed == {}
    assert set(job.got) == {(node, 0) for node in range(8)}
    assert failing
    places = set(checkpoint.read)
    assert len(checkpoint.read) <= len(places) * (1 + plan.SENDS)


@pytest.mark.parametrize(("streams", "most_open"), [(1, 32), (8, 1), *in_long((2, 0))])
def test_few_threads_and_connections_receive_from_many_nodes(tmp_path, monkeypatch, streams, most_open):
    """Each node gets its blocks of up to seven others; no order in which they come holds up another."""
    monkeypatch.setattr(senders, "_STREAMS", streams)
    monkeypatch.setattr(senders, "_MOST_OPEN", most_open)
    (tmp_path / "store").mkdir()
    images = Checkpoint(tmp_path / "store", sizes=(40,) * 32)
    threads, idle, sources = set(), [], set()
    real = senders.Senders._put_back

    def put_back(self, sender):
        threads.add((id(self), threading.current_thread().name))
        sources.add((self._read.number, sender.node))
        real(self, sender)
        idle.append(len(self._idle))

    monkeypatch.setattr(senders.Senders, "_put_back", put_back)
    job = Job(images, tmp_path, [[tuple(range(32))]] * 8)
    job.run()
    assert job.failed == {}
    assert len(images.read) == len(set(images.read)), images.read
    assert max(Counter(one for one, _ in threads).values()) <= streams
    assert max(idle) <= most_open
    assert max(Counter(node for node, _ in sources).values()) > streams or streams == 8


@pytest.mark.parametrize("place", [(0, 1), (2, 0)])
def test_a_block_that_is_damaged_on_the_store_fails_every_rank_that_wants_it(checkpoint, tmp_path, place):
    rank, index = place
    with (checkpoint.directory / str(rank)).open("r+b") as file:
        file.seek(index * BLOCK_NBYTES + 77)
        file.write(b"damage")
    job = Job(checkpoint, tmp_path, [[ALL, ALL], [ALL]])
    job.run()
    assert {place: type(error) for place, error in job.failed.items()} == dict.fromkeys(job.got, DamagedError)


def test_bytes_that_change_on_the_way_are_read_again_from_the_store(checkpoint, tmp_path, monkeypatch):
    real = peer_exchange._Image.view

    def damaged(self, offset, nbytes):
        found = bytearray(real(self, offset, nbytes))
        found[3] ^= 1
        return memoryview(found)

    monkeypatch.setattr(peer_exchange._Image, "view", damaged)
    job = Job(checkpoint, tmp_path, [[ALL], [ALL]])
    job.run()
    assert job.failed == {}
    assert len(checkpoint.read) == 2 * len(set(checkpoint.read))


@pytest.mark.parametrize("cut", ["server", "client"])
def test_a_connection_that_ends_in_the_middle_costs_what_was_still_to_come(checkpoint, tmp_path, monkeypatch, cut):
    real_view, real_receive = peer_exchange._Image.view, Connection.receive

    def view(self, offset, nbytes):
        if cut == "server" and offset:
            raise OSError("gone")
        return real_view(self, offset, nbytes)

    def receive(self, into):
        real_receive(self, into)
        if cut == "client" and len(into) == BLOCK_NBYTES:
            self._socket.close()
            time.sleep(0.3)  # the source, which has all, sees the end before it is asked again

    monkeypatch.setattr(peer_exchange._Image, "view", view)
    monkeypatch.setattr(Connection, "receive", receive)
    if cut == "client":
        monkeypatch.setattr(node_group, "_AGAIN_S", 10.0)
    job = Job(checkpoint, tmp_path, [[ALL], [ALL]])
    job.run()
    assert job.failed == {}
    assert set(job.got) == {(0, 0), (1, 0)}
    if cut == "client":  # it asks once more, over a new connection
        assert len(checkpoint.read) == len(set(checkpoint.read)), checkpoint.read


PAIR = Place(0, 2)
FOUND = Found.of(0, SAVE, b"", 0)


@contextlib.contextmanager
def met(place=PAIR, total=2, wants=b"\x01", parent=None):
    """An exchange that meets others as a node of the tree, and where its plan appears."""
    exchange, found = PeerExchange("127.0.0.1", JOB, SAVE, FOUND), []
    blocks = Blocks([3] * total)
    thread = threading.Thread(target=lambda: found.append(exchange.meet(place, parent, wants, blocks, FOUND)))
    thread.start()
    try:
        yield exchange, found, thread
    finally:
        exchange.close()
        thread.join()


def child_of(good, link="1.child", secret=None):
    return contextlib.closing(
        Connection("n", Address(good.host, good.port, link, secret or good.secret), Cancel(), timeout_s=30)
    )


def send(connection, what, offset=0, said=b"", job=JOB):
    connection.ask(job, SAVE, 0, [wire.Range(what, offset, 0, checked=False)], said=said)
    connection.receive(memoryview(b""))


def test_a_node_without_the_secret_or_of_another_job_gets_nothing():
    theirs = Summary(column_of(1, b"\x03", 2), {1: ExchangeAddress("h", 1, bytes(32))}).pack()
    with met() as (exchange, found, thread):
        good = exchange.address
        with pytest.raises(PeerError), child_of(good, secret=bytes(32)):
            pass
        for job, link, what, offset, said, reason in [
            (JobKey("/store", "other"), "1.child", wire.SUMMARY, 0, theirs, "is not the one"),
            (JOB, "2.child", wire.SUMMARY, 0, theirs, "is no child"),
            (JOB, "x.child", wire.SUMMARY, 0, theirs, "is no link"),
            (JOB, "1", wire.SUMMARY, 0, theirs, "is no link"),
            (JOB, "1", wire.LEAVE, 0, b"", "is no link"),
            (JOB, "1.child", wire.PAUSE, 0, b"", "is no link"),
            (JOB, "1.child", wire.SUMMARY, 9, theirs, "another read"),
            (JOB, "1.child", wire.SUMMARY, 0, bytes(1 << 19), "another read"),
        ]:
            with pytest.raises(PeerError, match=reason), child_of(good, link) as connection:
                send(connection, what, offset, said, job)
        with child_of(good) as connection:
            send(connection, wire.SUMMARY, 0, b"junk")
            connection.ask(JOB, SAVE, 0, [wire.Range(wire.ORDERS, 0, 8, checked=True)], said=pack([FOUND]))
            with pytest.raises(PeerError, match="another read"):
                connection.receive(memoryview(bytearray(8)))
        parent = Parent(JOB, SAVE, Place(1, 2), good, XXH3)
        orders = parent.ask(Summary.unpack(theirs, 2, range(1, 2)), [FOUND], time.monotonic() + 5)
        thread.join()
        (ours,) = found
    assert orders.edges.block.tolist() == [0]
    source = int(orders.edges.source[0])
    edges = ours.edges
    assert (edges.by_target(0) if source == 0 else edges.by_source(0)) == {1: [0]}
    assert ours.addresses.keys() == {0, 1}
    assert "secret" not in repr(good)
    assert repr(good.secret) not in repr(good)


def test_a_summary_of_any_size_reaches_the_parent(monkeypatch):
    """Larger than an ask may be: it goes up in parts."""
    monkeypatch.setattr(peer_exchange, "NODES_JOIN_S", 60.0)
    total = 1 << 20
    column = np.random.default_rng(0).integers(32, 64, total, dtype=np.int32)
    addresses = {node: ExchangeAddress("h", node, bytes(32)) for node in range(32, 64)}
    summary = Summary(column, addresses)
    assert len(summary.pack()) > wire.MAX_ASK_NBYTES
    with met(Place(0, 64), total, wants=b"\xff" * (total // 8)) as (exchange, found, thread):
        for node in range(1, 32):
            with child_of(exchange.address, f"{node}.child") as connection:
                send(connection, wire.LEAVE)
        orders = Parent(JOB, SAVE, Place(32, 64), exchange.address, XXH3).ask(summary, [FOUND], time.monotonic() + 60)
        thread.join()
    assert len(orders.edges.block) == total
    assert found[0].addresses.keys() == {0, *addresses}


def orders_of(nbytes, slow_s=0.0, served=None):
    """A server in the place of a parent: orders that it says are so long, a byte at a time."""

    class Orders:
        nbytes = 1 << 40

        def view(self, offset, wanted):
            time.sleep(slow_s)
            return memoryview(nbytes.to_bytes(8, "little"))[:wanted] if offset == 0 else memoryview(bytes(wanted))

        def check(self, offset, wanted):
            pass

        def still(self):
            return True

    def opened(_link, ask, rank):
        asked.append((rank, len(ask.ranges)))
        if rank == wire.ORDERS:
            return Orders()
        return peer_exchange._Bytes(b"", ask.ranges[0].offset)

    asked = []
    secret = bytes(32)
    server = BulkServer(opened, lambda _link: secret)
    server.start()
    return server, Parent(JOB, SAVE, Place(1, 2), ExchangeAddress("127.0.0.1", server.port, secret), XXH3), asked


def test_orders_that_are_longer_than_the_plan_can_be_are_not_received(caplog):
    """The length is what the other side says: no memory is taken for it."""
    server, parent, asked = orders_of(1 << 40)
    with contextlib.closing(server):
        orders = parent.ask(Summary(column_of(1, b"\x03", 2), {1: parent.address}), [FOUND], time.monotonic() + 5)
    assert len(orders.edges.block) == 0
    assert "has orders of 1099511627776 bytes for 2 blocks, at most" in caplog.text
    assert [one for one in asked if one[0] == wire.ORDERS] == [(wire.ORDERS, 1)]
    assert asked[-1][0] == wire.LEAVE


def test_a_parent_that_answers_too_slowly_costs_the_patience_in_all(caplog):
    """Each answer is in time; all of them are not."""
    server, parent, asked = orders_of(300 << 10, slow_s=1.5)
    summary = Summary(column_of(1, bytes(1 << 10), 1 << 13), {1: parent.address})
    began = time.monotonic()
    with contextlib.closing(server):
        orders = parent.ask(summary, [FOUND], began + 2.0)
    assert time.monotonic() - began < 3.5
    assert len(orders.edges.block) == 0
    assert "gave no orders in 2 s" in caplog.text
    assert asked[-1][0] == wire.LEAVE


def test_a_parent_without_room_for_a_connection_is_asked_again(monkeypatch):
    """A full server hangs up at the hello."""
    turned_away = []
    real = BulkServer._greet

    def greet(self, connection):
        if len(turned_away) < 3:
            turned_away.append(connection)
            raise PeerError("no room")
        return real(self, connection)

    monkeypatch.setattr(BulkServer, "_greet", greet)
    with met() as (exchange, _, _):
        theirs = Summary(column_of(1, b"\x03", 2), {1: exchange.address})
        orders = Parent(JOB, SAVE, Place(1, 2), exchange.address, XXH3).ask(theirs, [FOUND], time.monotonic() + 5)
    assert orders.edges.block.tolist() == [0]
    assert len(turned_away) == 3


def test_a_node_below_that_leaves_is_not_waited_for():
    """Its summary was there, or not: the plan is made without it, at once."""
    with met(place=Place(0, 3)) as (exchange, found, thread):
        began = time.monotonic()
        for link in ("1.child", "2.child"):
            with child_of(exchange.address, link) as connection:
                send(connection, wire.LEAVE)
        thread.join()
        assert time.monotonic() - began < 4
        assert len(found[0].edges.block) == 0


def test_a_node_that_leaves_after_the_plan_was_made_delays_no_block(checkpoint, tmp_path, monkeypatch):
    """Node 1 sends up what it wants, then loses patience with node 0 as that makes the plan."""
    real = Parent._ask

    def impatient(self, summary, cancel):
        real(self, summary, cancel)
        raise PeerError("no patience")

    monkeypatch.setattr(Parent, "_ask", impatient)
    monkeypatch.setattr(node_group, "_NODE_PATIENCE_S", 20.0)
    monkeypatch.setattr(node_group, "_PATIENCE_S", 20.0)
    job = Job(checkpoint, tmp_path, [[ALL, ALL], [ALL]])
    began = time.monotonic()
    job.run()
    assert time.monotonic() - began < 10
    assert job.failed == {}


def test_an_exchange_that_is_closed_releases_its_node_group(checkpoint, tmp_path):
    job = Job(checkpoint, tmp_path, [[ALL], [ALL]])
    gc.collect()
    gc.disable()
    try:
        job.run()
        assert [one for one in gc.get_objects() if type(one) is node_group.NodeGroup] == []
    finally:
        gc.enable()


def test_images_are_open_only_while_they_are_read(tmp_path):
    (tmp_path / "store").mkdir()
    images = Checkpoint(tmp_path / "store", sizes=(4096,) * 200)
    before, most = len(os.listdir("/proc/self/fd")), []

    def counted(rank):
        most.append(len(os.listdir("/proc/self/fd")))
        return images.open(rank)

    every = tuple(range(200))
    job = Job(images, tmp_path, [[every, every]])
    images.open_source = counted
    job.run()
    assert job.failed == {}
    assert len(images.read) == 200
    assert max(most) - before < 40
