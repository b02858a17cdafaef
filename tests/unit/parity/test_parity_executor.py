"""Actions in, events out: real threads, real sockets, the daemon's own way of waiting for them."""

import select
import tempfile
import threading
import time

import pytest

from ckptd.core import actions as act
from ckptd.core import events as ev
from ckptd.daemon.background import Background
from ckptd.daemon.parity_executor import ParityExecutor
from ckptd.parity.files import open_parity
from ckptd.shared.format.schemes import Scheme
from ckptd.shared.protocol.messages import Tier
from tests.nodes import EPOCH, KEY, SAVE, content, noise, start_set

SIZE = 3 << 20


class Daemon:
    """One node's effects and its loop."""

    def __init__(self, nodes, index):
        self.node = nodes.nodes[index]
        self.events = []
        self.bulk_address = lambda _job, node: nodes.address_of(node)
        self.encoding, self.fetching = Background(2, "encode"), Background(2, "fetch")
        self.cleaning = Background(1, "clean")
        self.all = [self.encoding, self.fetching, self.cleaning]
        self.effects = ParityExecutor(
            node=self.node.name, arena=self.node.arena, peers=self, encoding=self.encoding, fetching=self.fetching,
            cleaning=self.cleaning, deliver=self.events.append, timeout_s=5,
        )  # fmt: skip

    def settle(self):
        deadline = time.monotonic() + 30
        while any(work.busy for work in self.all):
            assert time.monotonic() < deadline
            select.select(self.all, [], [], 1)
            for work in self.all:
                work.deliver()

    def close(self):
        self.effects.close()
        self.settle()
        for work in self.all:
            work.close()


@pytest.fixture
def nodes():
    with tempfile.TemporaryDirectory(prefix="ckptd-test-", dir="/dev/shm") as directory:
        made = start_set(directory, 3)
        made.stage([[noise(i, SIZE)] for i in range(3)])
        yield made
        made.stop()


@pytest.fixture
def daemons(nodes):
    made = [Daemon(nodes, i) for i in range(3)]
    yield made
    for one in made:
        one.close()


def has_chunk(daemon):
    return open_parity(daemon.node.arena, KEY, SAVE, EPOCH) is not None


def encode(nodes, daemon, index):
    daemon.effects.perform(act.Encode(job=KEY, chunk=nodes.parity_chunk(index, Scheme.XOR)))


def test_an_encode_ends_as_one_event_however_often_it_is_asked_for(nodes, daemons):
    for _ in range(3):
        encode(nodes, daemons[0], 0)
    daemons[0].settle()
    assert daemons[0].events == [ev.Encoded(job=KEY, save=SAVE, epoch=EPOCH)]
    assert has_chunk(daemons[0])


def test_a_failed_encode_says_why(nodes, daemons):
    nodes.down = {"n1"}
    encode(nodes, daemons[0], 0)
    daemons[0].settle()
    (event,) = daemons[0].events
    assert "node n1 cannot be reached" in event.problem
    assert not has_chunk(daemons[0])


def test_a_stopped_encode_is_silent_and_may_be_asked_for_again(nodes, daemons):
    encode(nodes, daemons[0], 0)
    daemons[0].effects.perform(act.StopEncode(job=KEY, save=SAVE, epoch=EPOCH))
    encode(nodes, daemons[0], 0)
    daemons[0].settle()
    assert daemons[0].events == [ev.Encoded(job=KEY, save=SAVE, epoch=EPOCH)]
    assert has_chunk(daemons[0])


def test_a_dropped_piece_is_gone_also_while_it_is_made(nodes, daemons):
    drop = act.DropChunk(job=KEY, save=SAVE, epoch=EPOCH)
    encode(nodes, daemons[0], 0)
    daemons[0].effects.perform(drop)
    daemons[0].settle()
    assert daemons[0].events == []
    assert not has_chunk(daemons[0])
    encode(nodes, daemons[0], 0)
    daemons[0].settle()
    daemons[0].effects.perform(drop)
    encode(nodes, daemons[0], 0)
    daemons[0].settle()
    assert has_chunk(daemons[0])
    assert daemons[0].effects.parities.scan() == [(KEY, nodes.parity_chunk(0, Scheme.XOR))]


@pytest.mark.parametrize("tier", [Tier.PEER, Tier.REBUILT])
def test_a_segment_is_fetched(nodes, daemons, tier):
    for index, daemon in enumerate(daemons):
        encode(nodes, daemon, index)
        daemon.settle()
    at, seal = daemons[2], nodes.columns[0].seals[0]
    at.events.clear()
    at.effects.perform(
        act.FetchSegment(
            job=KEY, rank=0, save=SAVE, tier=tier, holder="n0", seal=seal,
            chunk=nodes.parity_chunk(2, Scheme.XOR), homes=tuple(nodes.homes([0]).items()),
            chunks=tuple(nodes.parity_chunks([0]).items()),
        )
    )  # fmt: skip
    at.settle()
    (event,) = at.events
    assert (event.problem, event.tier, event.seal) == ("", tier, seal)
    assert at.node.arena.seal_of(KEY, event.slot) == seal
    assert content(at.node.arena, 0) == content(nodes.nodes[0].arena, 0)


def test_a_fetch_that_fails_says_why(nodes, daemons):
    daemons[2].effects.perform(act.FetchSegment(job=KEY, rank=0, save=SAVE, tier=Tier.REBUILT))
    daemons[2].settle()
    (event,) = daemons[2].events
    assert "no seal of rank 0" in event.problem


def test_a_job_that_is_forgotten_while_it_is_encoded_and_fetched_leaves_nothing(nodes, daemons):
    at, arena = daemons[2], daemons[2].node.arena
    before = arena.used_nbytes
    hold = threading.Event()
    for _ in range(2):
        for work in (at.encoding, at.fetching):
            work.run(hold.wait, lambda _: None)  # no thread is free yet
    encode(nodes, at, 2)
    at.effects.perform(
        act.FetchSegment(
            job=KEY, rank=0, save=SAVE, tier=Tier.PEER, holder="n0", seal=nodes.columns[0].seals[0],
            chunk=None, homes=(), chunks=(),
        )
    )  # fmt: skip
    at.effects.forget(KEY)
    hold.set()
    at.settle()
    (fetched,) = at.events
    assert (fetched.problem, fetched.slot) == ("cancelled", "")
    assert arena.used_nbytes == before
    assert not arena.sizes(KEY, ".parity")


def test_an_encode_that_is_broken_off_for_good_keeps_no_spare(nodes, daemons, monkeypatch):
    at, arena = daemons[2], daemons[2].node.arena
    made = threading.Event()
    real = at.effects.parities.make

    def make(job, parity_chunk):
        name = real(job, parity_chunk)
        at.effects.forget(job)
        arena.forget_job(job)  # too early to see what is made next
        arena.reserve(0, 1, 1 << 20)
        arena.allocate_file(job, name, 1 << 20)
        made.set()
        return name

    monkeypatch.setattr(at.effects.parities, "make", make)
    encode(nodes, at, 2)
    at.settle()
    assert made.is_set()
    assert not arena.sizes(KEY, ".parity")


def test_a_fetch_does_not_wait_for_encodes(nodes, daemons):
    at, hold = daemons[2], threading.Event()
    for _ in range(8):
        at.encoding.run(hold.wait, lambda _: None)
    at.effects.perform(
        act.FetchSegment(
            job=KEY, rank=0, save=SAVE, tier=Tier.PEER, holder="n0", seal=nodes.columns[0].seals[0],
            chunk=None, homes=(), chunks=(),
        )
    )  # fmt: skip
    select.select([at.fetching], [], [], 10)
    at.fetching.deliver()
    (event,) = at.events
    hold.set()
    assert (event.problem, at.node.arena.slot_of(KEY, 0, SAVE)) == ("", event.slot)
