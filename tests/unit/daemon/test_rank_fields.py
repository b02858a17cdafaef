"""No field that a rank sends ends the daemon: each message type, each field at its edges, over the real socket."""

import contextlib
import itertools
import os
import random

import msgspec
import pytest

from ckptd.shared.base.errors import DamagedError
from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.format.digest import digest
from ckptd.shared.format.rank_members import members_of
from ckptd.shared.format.replica_attestations import Attestation
from ckptd.shared.format.slot import Seal, SlotState, decode_seals, encode_seal
from ckptd.shared.protocol import messages as m
from tests.cluster import Node, wait_for
from tests.unit.daemon.test_rank_gateway import Rank, Stranger, attach_words, slot_nbytes

pytestmark = pytest.mark.timeout(300)
REQUESTS = {kind.__name__: kind for kind in m.Request.__args__ if kind is not m.AskStop}
ROUNDS = int(os.environ.get("RANK_FIELDS", "60"))  # of each kind
SURROGATE = b"\xed\xa0\x80"

INTS = [0, 1, 2, 7, 99_999_999, 1 << 20, 1 << 31, 1 << 46, (1 << 53) - 1, (1 << 62) - 1, (1 << 64) - 1, -1, -(1 << 63)]
TEXTS = ["", "a", "a\0b", "\n", "é" * 300, "x" * 4096, "../..", "/", "/x", "s", "latest", "r00000-000001.slot", "arena"]
FLOATS = [0.0, -0.0, 1e308, float("inf"), float("nan"), -1.0, 1e-320]


def anything(chance, depth=0):
    """A value of any kind, most of them absurd."""
    kinds = [INTS, TEXTS, FLOATS, [None, True, False], [b"", b"\0" * 8, b"x" * 32, msgspec.Raw(b"\xa3" + SURROGATE)]]
    if depth < 3 and chance.random() < 0.3:
        many = [anything(chance, depth + 1) for _ in range(chance.randrange(5))]
        return many if chance.random() < 0.6 else {str(i): item for i, item in enumerate(many)}
    return chance.choice(chance.choice(kinds))


def sound(chance, kind, job, incarnation):
    """Fields that the daemon takes, so that one absurd field gets further than its decoder."""
    save = [incarnation, chance.randrange(1, 9), chance.choice([0, 7, 10**12 - 1]), b"r" * 16]
    exchange = ["127.0.0.1", 7, b"s" * 32]
    peer = ["n1", "arena", "tcp://127.0.0.1:1", "k" * 40, "rack"]
    words = {
        "Attach": attach_words([job.store, job.job], 0, 1, "s") | {
            "incarnation": incarnation, "takeover": False, "cadence": [1, 0.0], "rendezvous": [peer, b"", "xor", 8],
        },
        "AskSlots": {"capacity": 1 << 20},
        "HandOver": {"slot": "r00000-000001.slot", "save": save, "drain": True},
        "Skip": {"save": save, "reason": "none free"},
        "AskDrain": {"job": None},
        "AskLoad": {"step": None},
        "AskPlace": {"read": "load.1.1", "exchange": exchange},
        "AskSegments": {"save": save, "wanted": [[0, b""], [1, bytes(32)]]},
        "DropSegments": {"save": save},
        "ReportLoad": {"save": save, "tier": "pfs", "problem": "", "fatal": False, "reshape": False},
        "AskStatus": {"nodes": True},
        "AskForget": {"job": [job.store, f"{job.job}-other"], "force": True},
    }  # fmt: skip
    return words.get(kind.__name__, {})


def altered(chance, value):
    """One place of the value, at any depth, is something else."""
    if isinstance(value, list) and value and chance.random() < 0.8:
        at = chance.randrange(len(value))
        return [altered(chance, item) if index == at else item for index, item in enumerate(value)]
    return anything(chance)


def frames(chance, kind, job, incarnation, count):
    for number in range(count):
        words = sound(chance, kind, job, incarnation)
        if words and number % 4:
            key = chance.choice(sorted(words))
            words[key] = altered(chance, words[key])
        seq = number + 1 if number % 7 else chance.choice(INTS)
        yield msgspec.msgpack.encode({"type": kind.__name__, "seq": seq} | words)


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    with Node(str(tmp_path_factory.mktemp("store"))) as node:
        node.start("--budget-nbytes", "64M")
        yield node


def heard(rank):
    """All that the daemon has answered so far."""
    while rank.socket.poll(50):
        m.decode_reply(rank.socket.recv())


_NUMBERS = itertools.count()


@pytest.mark.parametrize("name", REQUESTS)
def test_every_field_of_every_message(node, name):
    chance, job = random.Random(name), JobKey(node.store, f"fields-{next(_NUMBERS)}")
    rank = Rank(node, job)
    try:
        assert isinstance(rank.welcome, m.Attached)
        for frame in frames(chance, REQUESTS[name], job, rank.welcome.incarnation, ROUNDS):
            rank.send(frame)
            if chance.random() < 0.1:
                heard(rank)
        heard(rank)
    finally:
        rank.close()
    assert node.daemon.poll() is None, node.log_text()[-3000:]
    assert "met a bug" not in node.log_text(), node.log_text()[-3000:]
    assert node.status().pid == node.daemon.pid
    with contextlib.closing(Rank(node, JobKey(node.store, f"after-{next(_NUMBERS)}"))) as other:
        assert isinstance(other.welcome, m.Attached)


# --- what a rank has in its slot


def granted(node, job, capacity):
    rank = Rank(node, job)
    assert isinstance(rank.ask(m.AskSlots, capacity=capacity), m.SlotsComing | m.Done)
    return rank, rank.granted()[0]


ROOM = 4096 - 20 - 16  # of a seal's body


def nbytes_of(seal):
    return len(msgspec.msgpack.encode(seal))


def page_of(seal):
    """As encode_seal makes it, whatever it holds."""
    body = msgspec.msgpack.encode(seal)
    head = (b"CKPTDSL4" + (9).to_bytes(8, "little") + len(body).to_bytes(4, "little") + body).ljust(4080, b"\0")
    return head + digest(head)


@pytest.mark.parametrize("left", [0, 1, 20, 33, 34, 60])
def test_a_rank_seals_nothing_that_leaves_no_room_for_the_daemons_word(left):
    """The daemon writes "digested" where the rank wrote "sealed", and a digest more: what came of that ended it."""
    attestation = Attestation(members_of((0, 1)), bytes(8), bytes(8))
    seal = Seal(state=SlotState.SEALED, job=JobKey("/" + "\U0001f600" * 900, "demo"), attestations=(attestation,) * 9)
    missing = ROOM - left - nbytes_of(seal)
    seal = msgspec.structs.replace(seal, job=JobKey(seal.job.store + "x" * missing, "demo"))
    digested = msgspec.structs.replace(seal, state=SlotState.DIGESTED, table_digest=b"x" * 16)
    assert nbytes_of(seal) == ROOM - left
    fits = nbytes_of(digested) <= ROOM
    assert (decode_seals(page_of(seal) + bytes(4096))[2] == seal) == fits
    if fits:
        encode_seal(seal, 1)
        encode_seal(digested, 2)
    else:
        with pytest.raises(DamagedError, match="seal body"):
            encode_seal(seal, 1)


@pytest.mark.parametrize("capacity", [1, 4095, 8191, 8193])
def test_a_slot_too_small_for_its_seals_is_refused(node, capacity):
    with contextlib.closing(Rank(node, JobKey(node.store, f"small-{next(_NUMBERS)}"))) as rank:
        reply = rank.ask(m.AskSlots, capacity=capacity)
        assert (type(reply), reply.code) == (m.Refused, "protocol"), reply


# --- a bug, in whatever a rank's word reaches

BUG = """
import sys
from ckptd.core.jobs import Catalogue
from ckptd.core import events as ev
stock = Catalogue.handle
def handle(self, event, now):
    if isinstance(event, ev.SaveSkipped) and event.reason == "boom":
        raise ZeroDivisionError("a bug")
    return stock(self, event, now)
Catalogue.handle = handle
from ckptd.cli import main
sys.exit(main())
"""


def test_a_bug_that_a_rank_meets_is_answered_counted_and_reported_and_the_job_goes_on(tmp_path):
    (tmp_path / "with_a_bug.py").write_text(BUG)
    with Node(str(tmp_path)) as node:
        node.start(program=(str(tmp_path / "with_a_bug.py"),))
        job = JobKey(node.store, "demo")
        rank, slot = granted(node, job, slot_nbytes(node, job))
        with contextlib.closing(rank):
            before = node.status().refused_messages
            save = SaveId(rank.welcome.incarnation, 1, 10, rank.welcome.run)
            reply = rank.ask(m.Skip, save=save, reason="boom")
            assert (type(reply), reply.code) == (m.Refused, "bug"), reply
            assert "ZeroDivisionError" in reply.message
            assert node.status().refused_messages == before + 1
            assert "a bug" in node.log_text()
            save = SaveId(rank.welcome.incarnation, 2, 20, rank.welcome.run)
            rank.fill(slot, save)
            assert isinstance(rank.ask(m.HandOver, slot=slot, save=save, drain=True), m.Done)
            wait_for(lambda: any(c.end == "durable" for c in node.job("demo").checkpoints))
            assert any("ZeroDivisionError" in error for error in node.status().errors)
        assert node.daemon.poll() is None


def test_strangers_say_nothing_that_ends_it(node):
    """Without an attachment."""
    chance = random.Random(1)
    with contextlib.closing(Stranger(node)) as stranger:
        for kind in REQUESTS.values():
            for frame in frames(chance, kind, JobKey(node.store, "none"), 1, 20):
                stranger.send(frame)
        heard(stranger)
    assert SlotState.FREE == "free"
    assert node.status().pid == node.daemon.pid
