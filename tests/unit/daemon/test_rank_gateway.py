"""Whatever is said to a real daemon, it refuses what it must, counts it, and goes on serving."""

import contextlib
import fcntl
import itertools
import os
import random
import time

import msgspec
import pytest
import zmq

from ckptd import __version__
from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.format import arena_paths, rank_file
from ckptd.shared.format.slot import SlotState
from ckptd.shared.protocol import messages as m
from tests.cluster import Node, wait_for
from tests.runs import RUN
from tests.slots import write_slot

DEADLINE_S = 10
_NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    with Node(str(tmp_path_factory.mktemp("store"))) as node:
        node.start("--budget-nbytes", "64M")
        yield node


@pytest.fixture
def job(node):
    return JobKey(node.store, f"job-{next(_NUMBERS)}")


class Stranger:
    """A DEALER that says what it likes."""

    def __init__(self, node):
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.connect(f"ipc://{node.arena}/{arena_paths.SOCKET}")
        self.seq = 0
        self.pushes = []

    def send(self, *frames):
        self.socket.send_multipart(frames)

    def receive(self, timeout_s=DEADLINE_S):
        assert self.socket.poll(int(timeout_s * 1000)), "no answer"
        return m.decode_reply(self.socket.recv())

    def ask(self, kind, **words):
        self.seq += 1
        self.send(m.encode(kind(seq=self.seq, **words)))
        while True:
            reply = self.receive()
            if getattr(reply, "reply_to", None) == self.seq:
                return reply
            self.pushes.append(reply)

    def granted(self):
        while not (slots := [p.slot for p in self.pushes if isinstance(p, m.SlotGranted)]):
            self.pushes.append(self.receive())
        return slots

    def close(self):
        self.socket.close()
        self.context.term()


class Rank(Stranger):
    """A rank without a client library: holds its rank file's lock and attaches."""

    def __init__(self, node, job, rank=0, world=1, session="s", **words):
        super().__init__(node)
        self.node, self.job, self.rank = node, job, rank
        directory = os.path.join(node.arena, arena_paths.job_dir(job))
        os.makedirs(directory, mode=0o700, exist_ok=True)
        self.fd = os.open(
            os.path.join(directory, arena_paths.rank_file_name(rank, session)), os.O_RDWR | os.O_CREAT, 0o600
        )
        fcntl.lockf(self.fd, fcntl.LOCK_EX)
        os.pwrite(self.fd, rank_file.encode(rank_file.RankRecord(job, rank, session, "h")), 0)
        self.welcome = self.ask(m.Attach, **attach_words(job, rank, world, session) | words)

    def path(self, slot):
        return os.path.join(self.node.arena, arena_paths.job_dir(self.job), slot)

    def fill(self, slot, save, **words):
        """Seals a segment in a slot as a client would; its size stays that of the slot."""
        size = os.path.getsize(self.path(slot))
        made = write_slot(self.path(slot) + ".new", self.job, save, state=SlotState.SEALED, **words)
        assert os.path.getsize(made.path) == size, size
        with open(made.path, "rb") as source, open(self.path(slot), "r+b") as target:
            target.write(source.read())
        os.unlink(made.path)

    def close(self):
        with contextlib.suppress(AssertionError):
            self.ask(m.Detach)
        os.close(self.fd)
        super().close()


def attach_words(job, rank=0, world=1, session="s"):
    return {
        "version": m.VERSION, "job": job, "session": session, "rank": rank, "world_size": world, "host": "h",
        "pid": os.getpid(),
    }  # fmt: skip


def slot_nbytes(node, job):
    probe = write_slot(os.path.join(node.store, "probe"), job, SaveId(1, 1, 1, RUN))
    return os.path.getsize(probe.path)


@pytest.fixture
def join(node):
    """Ranks that are closed whatever the test did: an open socket keeps the process from ending."""
    with contextlib.ExitStack() as stack:

        def join(*words, **more):
            rank = Rank(node, *words, **more)
            stack.callback(rank.close)
            return rank

        yield join


@pytest.fixture
def stranger(node):
    stranger = Stranger(node)
    yield stranger
    stranger.close()


@pytest.fixture
def rank(node, job, join):
    rank = join(job)
    assert isinstance(rank.welcome, m.Attached), rank.welcome
    rank.ask(m.AskSlots, capacity=slot_nbytes(node, job))
    rank.granted()
    return rank


@contextlib.contextmanager
def refused_more(node, least=1):
    before = node.status().refused_messages
    yield
    wait_for(lambda: node.status().refused_messages >= before + least)


# --- what is no message


@pytest.mark.parametrize("seed", range(5))
def test_random_bytes(node, stranger, seed):
    chance = random.Random(seed)
    with refused_more(node, 20):
        for _ in range(20):
            stranger.send(chance.randbytes(chance.randrange(0, 300)))
        for _ in range(20):
            reply = stranger.receive()
            assert (type(reply), reply.code) == (m.Refused, "protocol")


def test_bytes_that_are_no_utf8_in_a_text(node, stranger):
    frame = m.encode(m.Skip(seq=1, save=SaveId(1, 1, 1, RUN), reason="reason")).replace(
        b"reason", b"\xff\xfe\xfd\xfc\xfb\xfa"
    )
    with refused_more(node):
        stranger.send(frame)
        assert stranger.receive().code == "protocol"


def test_truncated_messages(node, stranger, job):
    frame = m.encode(m.Attach(seq=1, **attach_words(job)))
    cuts = range(0, len(frame), 7)
    with refused_more(node, len(cuts)):
        for cut in cuts:
            stranger.send(frame[:cut])
            assert stranger.receive().code == "protocol"


def test_wrong_numbers_of_frames(node, stranger):
    with refused_more(node, 3):
        stranger.send(b"", b"")
        stranger.send(b"", m.encode(m.AskStatus(seq=1)))
        stranger.send(*[b"x"] * 50)
    assert isinstance(stranger.ask(m.AskStatus), m.StatusReply)


def test_an_oversized_message_ends_its_connection_and_nothing_else(node, stranger):
    """ZeroMQ drops it before the daemon sees a byte, so there is nothing to count."""
    stranger.send(b"x" * (m.MAX_MESSAGE_NBYTES + 1))
    assert not stranger.socket.poll(200)
    assert node.status().pid == node.daemon.pid


def test_the_largest_message_is_still_read(node, stranger):
    with refused_more(node):
        stranger.send(b"\xc1" * m.MAX_MESSAGE_NBYTES)
        assert stranger.receive().code == "protocol"


def test_many_messages_at_once_from_one_who_does_not_read(node, stranger):
    for _ in range(3000):
        with contextlib.suppress(zmq.Again):
            stranger.socket.send(b"\xc1", zmq.NOBLOCK)
    began = time.monotonic()
    assert node.status().pid == node.daemon.pid
    assert time.monotonic() - began < 20


# --- who speaks


def test_another_version_learns_what_to_do(node, stranger, job):
    with refused_more(node):
        reply = stranger.ask(m.Attach, **attach_words(job) | {"version": 99, "release": "9.9"})
    ours = f"this daemon (protocol {m.VERSION}, ckptd {__version__})"
    assert reply.message == f"the client (protocol 99, ckptd 9.9) cannot speak with {ours}"
    assert "same ckptd" in reply.hint


def test_a_request_of_another_version_that_is_not_known_is_refused_and_both_are_named(node, stranger):
    frame = msgspec.msgpack.encode({"type": "AskWeather", "seq": 1, "version": 99, "release": "9.9"})
    with refused_more(node):
        stranger.socket.send(frame)
        assert stranger.socket.poll(5000)
        reply = m.decode_reply(stranger.socket.recv())
    ours = f"this daemon (protocol {m.VERSION}, ckptd {__version__})"
    assert reply.message == f"message 'AskWeather' of the client (protocol 99, ckptd 9.9): {ours} does not know it"
    assert "same ckptd" in reply.hint


def test_a_rank_without_its_lock_is_refused(node, stranger, job):
    with refused_more(node):
        reply = stranger.ask(m.Attach, **attach_words(job))
    assert "does not hold the lock" in reply.message


def test_requests_without_attachment_are_refused(node, stranger):
    requests = [
        (m.AskSlots, {"capacity": 1}),
        (m.HandOver, {"slot": arena_paths.slot_name(0, 1), "save": SaveId(1, 1, 1, RUN)}),
        (m.Skip, {"save": SaveId(1, 1, 1, RUN), "reason": ""}),
        (m.AskDrain, {}),
        (m.AskLoad, {}),
        (m.ReportLoad, {"save": SaveId(1, 1, 1, RUN), "tier": m.Tier.PFS}),
        (m.AskPlace, {"read": "load.1.1"}),
        (m.AskSegments, {"save": SaveId(1, 1, 1, RUN), "wanted": []}),
        (m.DropSegments, {"save": SaveId(1, 1, 1, RUN)}),
        (m.AskSteps, {}),
    ]
    assert stranger.ask(m.Detach).code == "detached"  # a goodbye of one who never came in, and not counted
    with refused_more(node, len(requests)):
        for kind, words in requests:
            assert stranger.ask(kind, **words).code == "detached"


def test_a_rank_outside_its_job_is_refused(job, join):
    assert join(job, rank=3, world=2).welcome.code == "usage"


# --- what is handed over


def test_a_segment_that_is_what_it_says_is_taken(node, rank):
    slot = rank.granted()[0]
    save = SaveId(rank.welcome.incarnation, 1, 10, rank.welcome.run)
    rank.fill(slot, save)
    assert isinstance(rank.ask(m.HandOver, slot=slot, save=save), m.Done)
    wait_for(lambda: any(c.end == "durable" for c in node.job(rank.job.job).checkpoints))


def test_a_slot_that_is_not_sealed(node, rank):
    with refused_more(node):
        reply = rank.ask(
            m.HandOver, slot=rank.granted()[0], save=SaveId(rank.welcome.incarnation, 1, 10, rank.welcome.run)
        )
    assert "does not hold the sealed segment" in reply.message


@pytest.mark.parametrize("other", ["save", "rank", "job"])
def test_a_seal_that_says_something_else(node, rank, other):
    slot = rank.granted()[0]
    save = SaveId(rank.welcome.incarnation, 1, 10, rank.welcome.run)
    words = {"rank": 1, "world_size": 2} if other == "rank" else {}
    owner = rank.job
    if other == "job":
        rank.job = JobKey(owner.store, owner.job[:-1] + "x")
        made = write_slot(os.path.join(node.store, "other"), rank.job, save, state=SlotState.SEALED)
        rank.job = owner
        with open(made.path, "rb") as source, open(rank.path(slot), "r+b") as target:
            target.write(source.read())
    else:
        rank.fill(slot, SaveId(save.incarnation, 2, 20, save.run) if other == "save" else save, **words)
    with refused_more(node):
        assert rank.ask(m.HandOver, slot=slot, save=save).code == "protocol"


@pytest.mark.parametrize(
    "words",
    [
        {"directory": "/a/../b"},
        {"pointer": "relative"},
        {"names": ("../x",)},
        {"names": (".ckptd",)},
        {"directory": ""},
    ],
)
def test_a_place_for_files_that_is_none(node, rank, words):
    """The daemon does not count on its client for that."""
    slot = rank.granted()[0]
    save = SaveId(rank.welcome.incarnation, 1, 10, rank.welcome.run)
    rank.fill(slot, save)
    to = {"directory": "/run/a", "whole": True} | words
    with refused_more(node):
        rank.send(msgspec.msgpack.encode({
            "type": "HandOver", "seq": 77, "slot": slot, "save": (save.incarnation, 1, 10), "publication": to,
        }))  # fmt: skip
        while not isinstance(rank.receive(), m.Refused):
            pass
    directory = os.path.dirname(rank.path(slot))
    assert [name for name in os.listdir(directory) if name.endswith(arena_paths.DUE_SUFFIX)] == []


def test_the_slot_of_another_rank(node, job, join):
    rank = join(job, world=2)
    other = join(job, rank=1, world=2)
    other.ask(m.AskSlots, capacity=slot_nbytes(node, job))
    taken = other.granted()[0]
    save = SaveId(other.welcome.incarnation, 1, 10, other.welcome.run)
    other.fill(taken, save, rank=1, world_size=2)
    with refused_more(node, 2):
        reply = rank.ask(m.HandOver, slot=taken, save=save)
        assert "is not one of rank 0's" in reply.message
        assert rank.ask(m.HandOver, slot=arena_paths.slot_name(0, 999), save=save).code == "protocol"


@pytest.mark.parametrize("name", ["../../lock", "/etc/passwd", "r00000-000001.slot/../x", "r00000-000001.slot\n", "."])
def test_paths_for_names(node, rank, name):
    body = {"type": "HandOver", "seq": 77, "slot": name, "save": (1, 1, 1)}
    with refused_more(node):
        rank.send(msgspec.msgpack.encode(body))
        while not isinstance(reply := rank.receive(), m.Refused):
            pass
    assert reply.code == "protocol"


def test_a_slot_that_was_unlinked_behind_the_daemons_back(node, rank):
    slot = rank.granted()[-1]
    os.unlink(rank.path(slot))
    with refused_more(node):
        assert rank.ask(m.HandOver, slot=slot, save=SaveId(1, 1, 1, RUN)).code == "protocol"


def test_an_older_incarnation_is_stale(node, rank):
    slot = rank.granted()[0]
    save = SaveId(rank.welcome.incarnation - 1, 1, 10, rank.welcome.run)
    rank.fill(slot, save)
    assert rank.ask(m.HandOver, slot=slot, save=save).code == "stale"


def test_a_capacity_beyond_all_memory_is_refused_with_numbers(job, join):
    rank = join(job)
    assert isinstance(rank.ask(m.AskSlots, capacity=1 << 45), m.SlotsComing)
    while not isinstance(push := rank.receive(), m.SlotsRefused):
        pass
    assert push.code == "budget"
    assert "rank 0 needs 3 slots of 32.0 TiB" in push.message


def test_in_the_end_the_daemon_is_the_same(node):
    assert node.daemon.poll() is None
    assert "Traceback" not in node.log_text()
