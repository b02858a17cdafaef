"""Peer exchanges hand blocks to nodes that found the same checkpoint only; the end of what a node wants is said."""

import contextlib
import queue
import threading
import time

import pytest

from ckptd.shared.base.errors import PeerError
from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.bulk import wire
from ckptd.shared.bulk.client import Address, Connection
from ckptd.shared.bulk.sockets import Cancel
from ckptd.shared.files.mapping import Mapping
from ckptd.shared.format.digest import BLOCK_NBYTES
from ckptd.shared.format.integrity import XXH3
from ckptd.shared.format.manifest import FileRecord
from ckptd.shared.protocol.messages import PlaceKnown
from ckptd.shared.protocol.read_tree import Place
from ckptd_client._load.reader import Target
from ckptd_client._load.shared_read import node_group, senders
from ckptd_client._load.shared_read.found import DifferentError, Found
from ckptd_client._load.shared_read.group_memory import LEFT
from ckptd_client._load.shared_read.meeting import NodeReaders
from ckptd_client._load.shared_read.node_group import NodeGroup, Plan
from ckptd_client._load.shared_read.participants import Participants
from ckptd_client._load.shared_read.peer_exchange import PeerExchange
from ckptd_client._load.shared_read.read import copy_out_together
from ckptd_client._load.shared_read.schedule import Blocks, bits_of
from ckptd_client._load.shared_read.senders import Read, Senders
from tests.runs import RUN
from tests.stored import Listed

JOB = JobKey("/store", "job")
SAVE, OTHER = SaveId(1, 1, 100, RUN), SaveId(1, 2, 200, RUN)


@contextlib.contextmanager
def serving(tmp_path, blocks):
    """The first rank of a node that sends its first two blocks to node 1, and has read and taken all it wants."""
    entered = NodeReaders(str(tmp_path), "s", (0,), 0, "load.1.1", nodes=True).enter()
    found = Found.of(0, SAVE, b"", 0)
    group = NodeGroup(entered, blocks, found)
    exchange = PeerExchange("127.0.0.1", JOB, SAVE, found)
    try:
        assert group.join(range(4), lambda _: Plan({}, {1: [0, 1]}))
        exchange.serve(group, blocks)
        for one in group.own_reads:
            group.fill(one, lambda _: None)
        for one in group.shared:
            group.take(one)
            group.release(one)
        group.done()
        yield group, exchange, found
    finally:
        group.leave()
        exchange.close()
        entered.close()


@pytest.mark.parametrize(("save", "content"), [(OTHER, b""), (SAVE, b"other bytes")])
def test_a_node_that_found_another_checkpoint_gets_no_block(tmp_path, save, content):
    with serving(tmp_path, Blocks([BLOCK_NBYTES] * 4)) as (_, exchange, _found):
        address = Address("127.0.0.1", exchange.address.port, "1", exchange.address.secret)
        with contextlib.closing(Connection("n", address, Cancel(), steady=False)) as connection:
            theirs = Found.of(1, save, content, 0)
            connection.ask(JOB, save, 0, [wire.Range(0, 0, BLOCK_NBYTES, checked=False)], said=theirs.proof)
            with pytest.raises(PeerError, match="another checkpoint"):
                connection.receive(memoryview(bytearray(BLOCK_NBYTES)))


@pytest.mark.parametrize("ends", ["after the block", "by close"])
def test_a_node_that_paused_and_wants_nothing_more_says_so(tmp_path, ends):
    with serving(tmp_path, Blocks([BLOCK_NBYTES] * 4)) as (group, exchange, found):
        receiving = Senders(Read(JOB, SAVE, 1, found.proof, XXH3), {0: exchange.address})
        sender = receiving._take(0)
        sender.receive(wire.Range(0, 0, BLOCK_NBYTES, checked=False), memoryview(bytearray(BLOCK_NBYTES)))
        receiving._put_back(sender)
        with receiving._lock:
            receiving._idle.pop(0)
            receiving._paused.add(0)
        receiving._pause(sender)
        if ends == "by close":
            receiving.close()
        else:
            receiving._end(0)
        began = time.monotonic()
        group.wait_for_nodes()
        assert time.monotonic() - began < 5.0


def test_a_node_is_not_left_while_it_pauses(tmp_path):
    with serving(tmp_path, Blocks([BLOCK_NBYTES] * 4)) as (group, exchange, found):
        receiving = Senders(Read(JOB, SAVE, 1, found.proof, XXH3), {0: exchange.address})
        for offset in (0, 1):
            sender = receiving._take(0)
            sender.receive(wire.Range(offset, 0, BLOCK_NBYTES, checked=False), memoryview(bytearray(BLOCK_NBYTES)))
            receiving._pause(sender)
            time.sleep(0.2)
            assert group._targets[1] != LEFT
        receiving.close()


@pytest.mark.parametrize("got", [1, 2])
def test_a_node_whose_connection_broke_is_waited_for_if_blocks_are_due_to_it(tmp_path, monkeypatch, got):
    monkeypatch.setattr(node_group, "_AGAIN_S", 2.0)
    with serving(tmp_path, Blocks([BLOCK_NBYTES] * 4)) as (group, exchange, found):
        sender = Senders(Read(JOB, SAVE, 1, found.proof, XXH3), {0: exchange.address})._take(0)
        for rank in range(got):
            sender.receive(wire.Range(rank, 0, BLOCK_NBYTES, checked=False), memoryview(bytearray(BLOCK_NBYTES)))
        began = time.monotonic()
        sender.close()
        group.wait_for_nodes()
        assert (time.monotonic() - began >= 2.0) == (got == 1)


def meet_all(saves, blocks=4):
    """What the orders of each node say that was found; nodes of a tree of one level."""
    found = [Found.of(node, save, b"", 1) for node, save in enumerate(saves)]
    exchanges = [PeerExchange("127.0.0.1", JOB, save, one) for save, one in zip(saves, found, strict=True)]
    orders = {}

    def meet(node):
        images = Blocks([BLOCK_NBYTES] * (blocks + (saves[node] == OTHER)))
        wants = bits_of(range(blocks), images.total)
        parent = exchanges[0].address if node else None
        orders[node] = exchanges[node].meet(Place(node, len(saves)), parent, wants, images, found[node])

    threads = [threading.Thread(target=meet, args=(node,)) for node in range(len(saves))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for exchange in exchanges:
        exchange.close()
    return [
        (sorted(one.step for one in orders[node].found), len(orders[node].edges.block)) for node in range(len(saves))
    ]


def test_nodes_that_found_different_checkpoints_plan_nothing_and_all_learn_it():
    began = time.monotonic()
    assert meet_all([SAVE, SAVE, OTHER]) == [([100, 200], 0)] * 3
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("ranks", [1, 2])
def test_all_ranks_of_all_nodes_learn_which_ranks_found_which_step(tmp_path, ranks):
    """Node 1 opened latest when it had moved on."""
    places = {node: queue.Queue() for node in range(2)}
    errors = {}

    def load(node, rank):
        number = node * ranks + rank
        directory = tmp_path / f"node{node}"
        directory.mkdir(exist_ok=True)
        numbers = tuple(range(node * ranks, (node + 1) * ranks))
        here = NodeReaders(str(directory), "s", numbers, number, "all", nodes=True, number=1)

        def find_place(own, _number):
            places[node].put(own)
            return PlaceKnown(reply_to=1, number=node, count=2, parent=places[0].get() if node else None)

        record = FileRecord(name="r", rank=0, nbytes=8, digests=bytes(16), plan=b"", form=b"", own=b"", leaves=b"")
        memory = Mapping(None, 8)
        try:
            with Participants(JOB, here, (SAVE, OTHER)[node], "127.0.0.1", find_place) as taking:
                copy_out_together(lambda _: None, {0: [Target(0, 8, memory.address)]}, Listed([record]), taking)
        except DifferentError as error:
            errors[number] = str(error)

    threads = [threading.Thread(target=load, args=(node, rank)) for node in range(2) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors.keys() == set(range(2 * ranks))
    assert all("step 100" in text and "step 200" in text for text in errors.values()), errors
    assert [*tmp_path.glob("node*/*")] == []


def test_a_sender_without_an_address_is_no_sender():
    read = Read(JOB, SAVE, 1, b"", XXH3)
    with pytest.raises(PeerError, match="no address"):
        senders._Sender(read, 0, None).connect()
