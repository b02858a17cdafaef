"""Nodes that read a checkpoint together through peer exchanges: real sockets, memory, files, a thread for each rank."""

import contextlib
import gc
import os
import queue
import threading

import pytest

from ckptd.shared.base.errors import DamagedError, PeerError
from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.bulk import wire
from ckptd.shared.bulk.client import Address, Connection
from ckptd.shared.bulk.sockets import Cancel
from ckptd.shared.files.mapping import Mapping
from ckptd.shared.format.digest import BLOCK_NBYTES
from ckptd.shared.format.integrity import XXH3, Keyed
from ckptd.shared.format.manifest import FileRecord
from ckptd.shared.protocol import read_tree
from ckptd.shared.protocol.messages import PlaceKnown
from ckptd.shared.protocol.read_tree import Place
from ckptd.shared.stores.directory import OpenedFile
from ckptd_client._load.reader import Piece, Source, Target
from ckptd_client._load.shared_read import node_group, peer_exchange, plan
from ckptd_client._load.shared_read.node_group import NodeReaders
from ckptd_client._load.shared_read.participants import Participants
from ckptd_client._load.shared_read.peer_exchange import PeerExchange
from ckptd_client._load.shared_read.plan import Orders, Summary, column_of
from ckptd_client._load.shared_read.read import copy_out_together
from ckptd_client._load.shared_read.schedule import Blocks
from tests.runs import RUN

JOB = JobKey("/store", "job")
SAVE = SaveId(1, 1, 1, RUN)
KEYED = Keyed(bytes(32))
SIZES = (2 * BLOCK_NBYTES + 5000, 100, BLOCK_NBYTES)


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
        here = NodeReaders(str(directory), "s", SAVE, readers, rank, "load.1.1" if len(self.wants) > 1 else "")

        def find_place(own):
            place = Place(node, len(self.wants))
            for _ in range(len(self.wants)):
                self.addresses[node].put(own)
            silent = place.parent is None or place.parent in self.silent
            parent = None if silent else self.addresses[place.parent].get()
            return PlaceKnown(reply_to=1, number=node, count=place.nodes, parent=parent)

        return Participants(JOB, here, "127.0.0.1", find_place)

    def load(self, node, rank):
        images = self.wants[node][rank]
        sizes = [len(image) for image in self.checkpoint.images]
        found = {image: Mapping(None, sizes[image]) for image in images}
        targets = {image: [Target(0, sizes[image], memory.address)] for image, memory in found.items()}
        try:
            participants, integrity = self.participants(node, rank), self.keys[node]
            copy_out_together(self.checkpoint.open_source, targets, self.checkpoint.records, participants, integrity)
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


@pytest.mark.parametrize("nodes", [3, 5, 8])
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

    monkeypatch.setattr(peer_exchange._Image, "view", view)
    monkeypatch.setattr(Connection, "receive", receive)
    job = Job(checkpoint, tmp_path, [[ALL], [ALL]])
    job.run()
    assert job.failed == {}
    assert set(job.got) == {(0, 0), (1, 0)}


def test_who_lacks_the_secret_or_asks_for_another_job_gets_nothing():
    exchange = PeerExchange("127.0.0.1", JOB)
    good, met = exchange.address, []
    blocks = Blocks([3, 3])
    thread = threading.Thread(target=lambda: met.append(exchange.meet(Place(0, 2), None, b"\x01", blocks, SAVE)))
    thread.start()

    def ask(job, link, said):
        address = Address(good.host, good.port, link, good.secret)
        with contextlib.closing(Connection("n", address, Cancel(), timeout_s=5)) as connection:
            connection.ask(job, SAVE, 0, [wire.Range(wire.PARITY, 0, 8, checked=True)], said=said)
            length = bytearray(8)
            connection.receive(memoryview(length))
            raw = bytearray(int.from_bytes(length, "little"))
            connection.ask(job, SAVE, 0, [wire.Range(wire.PARITY, 8, len(raw), checked=True)])
            connection.receive(memoryview(raw))
            return Orders.unpack(bytes(raw), 2)

    theirs = Summary(column_of(1, b"\x03", 2), {1: good}).pack()
    try:
        with pytest.raises(PeerError):
            Connection("n", Address(good.host, good.port, "1", bytes(32)), Cancel(), timeout_s=3)
        for job, link, said, told in [
            (JobKey("/store", "other"), "1.child", theirs, "is not the one"),
            (JOB, "2.child", theirs, "is no child"),
            (JOB, "x.child", theirs, "is no link"),
            (JOB, "1", theirs, "is no link"),
            (JOB, "1.child", b"junk", "another read"),
        ]:
            with pytest.raises(PeerError, match=told):
                ask(job, link, said)
        orders = ask(JOB, "1.child", theirs)
    finally:
        exchange.close()
        thread.join()
    ((plan, addresses),) = met
    assert orders.edges.block.tolist() == [0]
    source = int(orders.edges.source[0])
    assert (plan.goes if source == 0 else plan.comes) == {1: [0]}
    assert addresses.keys() == {0, 1}
    assert "secret" not in repr(good)
    assert repr(good.secret) not in repr(good)


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
