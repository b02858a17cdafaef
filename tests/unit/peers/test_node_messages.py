"""Messages between nodes: every field is checked, and nothing but what is listed gets through.

Their bytes stand in tests/golden/wire/node_messages.txt (tests/golden/test_wire.py).
"""

import functools

import msgspec
import pytest

from ckptd.core import events as ev
from ckptd.shared.base.errors import ProtocolError, UnknownMessageError
from ckptd.shared.base.ids import MAX_INCARNATION, MAX_RANKS, JobKey, SaveId
from ckptd.shared.protocol import node_messages as nm
from ckptd.shared.protocol.topology import MAX_NODES
from ckptd.shared.protocol.versions import tags
from tests.golden import wire
from tests.runs import RUN

JOB = JobKey("/store", "job")
SAVE = SaveId(1, 2, 3, RUN)
HEAD = {"job": JOB, "node": "n1"}
ALL = wire.examples(wire.WIRES["node_messages"])


def raw(tag, **fields):
    return msgspec.msgpack.encode({"type": tag, **HEAD, **fields})


def report(tag, **fields):
    return raw("report", event={"type": tag, "job": JOB, **fields})


@pytest.mark.parametrize("name", ALL)
def test_every_field_is_checked(name):
    """Whatever field holds something of another type, the message is refused."""
    message = ALL[name]
    fields = msgspec.msgpack.decode(nm.encode(message))
    inner = fields["event"] if isinstance(message, nm.Report) else fields
    for field in inner:
        kept, inner[field] = inner[field], {None: None}
        with pytest.raises(ProtocolError):
            nm.decode(msgspec.msgpack.encode(fields))
        inner[field] = kept
    assert nm.decode(msgspec.msgpack.encode(fields)) == message


def leaves(value, path=()):
    """Path to each string and whole number in a value of msgpack."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, (*path, key))
    elif isinstance(value, list):
        for place, item in enumerate(value):
            yield from leaves(item, (*path, place))
    elif type(value) in (int, str):
        yield path


@pytest.mark.parametrize("name", ALL)
def test_every_number_and_every_text_is_bound(name):
    """No field of any message, however deep, takes what no daemon of ours says: a negative number, a long text."""
    fields = msgspec.msgpack.decode(nm.encode(ALL[name]))
    for path in leaves(fields):
        place = functools.reduce(lambda inside, key: inside[key], path[:-1], fields)
        kept = place[path[-1]]
        for wrong in (-2, 1 << 63) if isinstance(kept, int) else ("x" * (nm.MAX_TEXT_CHARS + 1),):
            place[path[-1]] = wrong
            with pytest.raises(ProtocolError):
                nm.decode(msgspec.msgpack.encode(fields))
        place[path[-1]] = kept


@pytest.mark.parametrize(
    "frame",
    [
        raw("job-released", node="../x"),
        raw("job-released", node=""),
        raw("job-released", job=["relative", "job"]),
        raw("report"),
        raw("report", event=["ranks-gone", {"job": JOB, "ranks": [1], "session": "s"}]),
        report("ranks-gone", ranks=[1 << 30], session="s"),
        report("ranks-gone", ranks=[1], session="s/../t"),
        report("drain-asked", rank=-2),
        report("encoded", save=SAVE, epoch=MAX_INCARNATION + 1),
        report("segments-staged", save=SAVE, world_size=0, segments=[[0, 1]]),
        report("segments-staged", session="s/../t", save=SAVE, world_size=1, segments=[[0, 1]]),
        report("segments-staged", save=SAVE, world_size=MAX_RANKS + 1, segments=[[0, 1]]),
        report("segments-staged", save=SAVE, world_size=1, segments=[[MAX_RANKS, 1]]),
        report("node-has", incarnation=1, former=["n1"] * (MAX_NODES + 1)),
        report("node-has", incarnation=1, former=["../n1"]),
        report("node-has", incarnation=1, living=[[MAX_RANKS, "s", 1, "h"]]),
        report("node-has", incarnation=1, living=[[1, "s/t", 1, "h"]]),
        report("node-attached", session="s", peer=["../n", "arena", "", "k" * 40]),
        report("node-attached", session="s", peer=["n", "arena", "", "k" * 40], waiting=[[MAX_RANKS, 1]]),
        report("node-attached", session="s", peer=["n", "arena", "", "k" * 40], former=[b"", ["n"] * 65]),
        raw("topology-asked", digest=b"x" * 17),
        raw("topology-reported", packed=[b"x" * 15, b"", b""]),
        raw("session-opened", session="s", incarnation=1, ranks=[], place=[b"", [], [], 0]),
        raw("save-ended", save=SAVE, end="nonsense"),
        raw("save-ended", save=SAVE, end="failed", reason="x" * (nm.MAX_TEXT_CHARS + 1)),
        raw("load-ordered", incarnation=1, dirname="../../etc"),
        raw("load-ordered", incarnation=1, dirname=".."),
        raw("fetch-ordered", rank=1, save=SAVE, tier="peer", holder="../n"),
        raw("fetch-ordered", rank=1, save=SAVE, tier="peer", holder="n", homes=[[1, "../n"]]),
        raw("save-staged", save=[1, 2, -3]),
        raw("drain-ordered", save=SAVE, ranks=[MAX_RANKS]),
    ],
)
def test_what_is_malformed_is_refused(frame):
    with pytest.raises(ProtocolError, match="malformed"):
        nm.decode(frame)


@pytest.mark.parametrize("bad", [b"", b"\xc1", b"\x92", b"\x91" * 2000, b"\xdd\xff\xff\xff\xff", b"\x80", b"\xa4text"])
def test_what_is_no_message_is_refused(bad):
    with pytest.raises(ProtocolError, match="malformed"):
        nm.decode(bad)


@pytest.mark.parametrize(
    ("frame", "kind"),
    [
        (raw("foo"), "foo"),
        (raw("SaveStaged", save=SAVE), "SaveStaged"),  # the name of a class is no tag
        (raw("vote-written", save=SAVE), "vote-written"),  # a fact is no message: it comes in a report
        (report("foo"), "foo"),
    ],
)
def test_a_tag_that_is_none_of_ours_is_named(frame, kind):
    with pytest.raises(UnknownMessageError) as caught:
        nm.decode(frame)
    assert caught.value.kind == kind


LOCAL = [
    ev.StoreScanned(job=JOB, problem="p"),
    ev.IncarnationTaken(job=JOB, session="s", run=bytes(16), number=7),
    ev.CommitEnded(job=JOB, save=SAVE),
    ev.CheckpointRemoved(job=JOB, save=SAVE),
    ev.PeerDown(job=JOB, node="n2"),
    ev.SlotReady(job=JOB, rank=1, slot="r00001-000001.slot", capacity=1),
    ev.JobReleased(job=JOB, node="n1"),
    ev.Report(job=JOB, node="n1", event=ev.FormerNodeReported(job=JOB, session="s")),
]


@pytest.mark.parametrize("event", LOCAL, ids=lambda event: type(event).__name__)
def test_a_report_carries_nothing_that_is_no_fact(event):
    """What only this node's own parts say, such as that a commit ended, no peer can say in a report."""
    inner = msgspec.to_builtins(event, builtin_types=(bytes,))
    for tag in (inner.get("type"), type(event).__name__, None):
        fields = {key: value for key, value in inner.items() if key != "type"} | ({"type": tag} if tag else {})
        with pytest.raises(ProtocolError):
            nm.decode(raw("report", event=fields))


def test_messages_and_facts_share_no_tag():
    assert not tags(nm.Message) & tags(nm.Fact)


def test_size_is_bound_both_ways(monkeypatch):
    message = nm.Report(job=JOB, node="n1", event=nm.VoteWritten(job=JOB, save=SAVE, problem="x" * 100))
    frame = nm.encode(message)
    monkeypatch.setattr(nm, "MAX_MESSAGE_NBYTES", len(frame) - 1)
    with pytest.raises(ProtocolError, match="exceeds"):
        nm.encode(message)
    with pytest.raises(ProtocolError, match="exceeds"):
        nm.decode(frame)


def test_a_field_that_a_newer_one_has_is_ignored():
    assert nm.decode(raw("job-released", later=1)) == nm.JobReleased(job=JOB, node="n1")
