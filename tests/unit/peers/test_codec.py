"""Every message between nodes and every event that a report may carry, found by introspection."""

import dataclasses
import enum
import types
import typing

import msgspec
import pytest

from ckptd.core import events as ev
from ckptd.peers import codec
from ckptd.protocol.errors import ProtocolError
from ckptd.protocol.gates import Gate
from ckptd.protocol.ids import JobKey, SaveId
from ckptd.protocol.manifest import ParityRecord
from ckptd.protocol.messages import Cadence, End, Milestone, Progress
from ckptd.protocol.shares import Share
from ckptd.protocol.slot import Seal, SlotState
from ckptd.protocol.topology import Peer, Scheme, Topology

JOB = JobKey("/store", "job")
SAVE = SaveId(1, 2, 3)
PEER = Peer("n1", "arena-1", "tcp://10.0.0.1:4000", "k" * 40, "rack-1")
EXAMPLES = {
    int: 3,
    str: "text",
    bool: True,
    float: 1.5,
    bytes: b"\x00\xff",
    JobKey: JOB,
    SaveId: SAVE,
    Peer: PEER,
    Cadence: Cadence(2, 0.5),
    Progress: Progress(save=SAVE, milestone=Milestone.PROTECTED, end=End.KEPT, reason="r"),
    Share: Share(b"replicas", 3, b"cutalike", b"fcontent"),
    Gate: Gate("10.0.0.1", 4001, bytes(range(32))),
    ParityRecord: ParityRecord("0123456789abcdef-00.parity", 4096, 9, b"d" * 16),
    Topology: Topology((PEER,), (0, 0), Scheme.DOUBLE, 4),
    Seal: Seal(
        state=SlotState.DIGESTED, job=JOB, save=SAVE, rank=3, image_nbytes=9, table_digest=b"d" * 16, parts=(9,)
    ),
    ev.Event: ev.VoteWritten(job=JOB, save=SAVE, problem="p"),
}
BY_NAME = {
    "slot": "r00003-000001.slot", "node": "n1", "holder": "n2", "session": "s-1", "dirname": "step-000000003.i0001",
}  # fmt: skip


def example(hint, name=""):
    """A value of the type that is not its default."""
    if hint is str and name in BY_NAME:
        return BY_NAME[name]
    if hint in EXAMPLES:
        return EXAMPLES[hint]
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return example(args[0], name)
    if origin in (typing.Union, types.UnionType):
        return example(next(arg for arg in args if arg is not type(None)), name)
    if origin in (tuple, list, dict):
        inner = [example(arg) for arg in args if arg is not Ellipsis]
        return {inner[0]: inner[1]} if origin is dict else origin(inner)
    if issubclass(hint, enum.Enum):
        return list(hint)[-1]
    if dataclasses.is_dataclass(hint):
        return make(hint)
    raise AssertionError(f"no example for {hint}: add one")


def make(cls, *, optional=True):
    hints = typing.get_type_hints(cls, include_extras=True)
    fields = [
        field
        for field in dataclasses.fields(cls)
        if optional or (field.default is field.default_factory is dataclasses.MISSING)
    ]
    return cls(**{field.name: example(hints[field.name], field.name) for field in fields})


def messages(cls):
    """The class itself as a message, or within a report."""
    for value in (make(cls), make(cls, optional=False)):
        yield value if isinstance(value, ev.NodeMessage) else ev.Report(job=JOB, node="n1", event=value)


ALL = codec.messages() | codec.reportable()


def test_the_tables_are_not_empty():
    assert {"Report", "SessionOpened", "JobReleased"} <= set(codec.messages())
    assert {"RankAttached", "SegmentStaged", "Encoded"} <= set(codec.reportable())
    assert not set(codec.messages()) & set(codec.reportable())
    assert "NodeMessage" not in codec.messages()


@pytest.mark.parametrize("name", sorted(ALL))
def test_every_message_and_event_survives(name):
    for message in messages(ALL[name]):
        back = codec.decode(codec.encode(message))
        assert back == message
        assert type(back) is type(message)
        assert repr(back) == repr(message)  # also what compares equal, such as True and 1, is of its type


@pytest.mark.parametrize("name", sorted(ALL))
def test_every_field_is_checked(name):
    """Whatever field holds something of another type, the message is refused."""
    message = next(messages(ALL[name]))
    kind, fields = msgspec.msgpack.decode(codec.encode(message))
    inner = fields if isinstance(make(ALL[name]), ev.NodeMessage) else fields["event"][1]
    for field in inner:
        kept, inner[field] = inner[field], {None: None}
        with pytest.raises(ProtocolError):
            codec.decode(msgspec.msgpack.encode([kind, fields]))
        inner[field] = kept
    assert codec.decode(msgspec.msgpack.encode([kind, fields])) == message


@pytest.mark.parametrize(
    "frame",
    [
        ["Nothing", {"job": JOB, "node": "n1"}],
        ["VoteWritten", {"job": JOB, "save": SAVE}],  # an event is no message
        ["NodeMessage", {"job": JOB, "node": "n1"}],
        ["Report", {"job": JOB, "node": "n1", "event": ["JobReleased", {"job": JOB, "node": "n1"}]}],
        ["Report", {"job": JOB, "node": "n1", "event": ["Nothing", {"job": JOB}]}],
        ["Report", {"job": JOB, "node": "n1", "event": {"job": JOB}}],
        ["Report", {"job": JOB, "node": "n1"}],
        ["JobReleased", {"job": JOB, "node": "../x"}],
        ["JobReleased", {"job": JOB, "node": ""}],
        ["JobReleased", {"job": ["relative", "job"], "node": "n1"}],
        ["Report", {"job": JOB, "node": "n1", "event": ["RankGone", {"job": JOB, "rank": 1 << 30, "session": "s"}]}],
        ["Report", {"job": JOB, "node": "n1", "event": ["RankGone", {"job": JOB, "rank": 1, "session": "s/../t"}]}],
        ["SaveEnded", {"job": JOB, "node": "n1", "save": SAVE, "end": "nonsense"}],
        ["SaveEnded", {"job": JOB, "node": "n1", "save": SAVE, "end": "failed", "reason": "x" * (1 << 17)}],
        ["LoadOrdered", {"job": JOB, "node": "n1", "incarnation": 1, "dirname": "../../etc"}],
        ["SaveStaged", {"job": JOB, "node": "n1", "save": [1, 2, -3]}],
        ["x" * 100, {}],
        [],
        "text",
    ],
)
def test_what_is_no_message_is_refused(frame):
    with pytest.raises(ProtocolError):
        codec.decode(msgspec.msgpack.encode(frame))


@pytest.mark.parametrize("raw", [b"", b"\xc1", b"\x92", b"\x91" * 2000, b"\xdd\xff\xff\xff\xff"])
def test_what_is_no_msgpack_is_refused(raw):
    with pytest.raises(ProtocolError):
        codec.decode(raw)


def test_size_is_bound_both_ways(monkeypatch):
    message = ev.Report(job=JOB, node="n1", event=ev.VoteWritten(job=JOB, save=SAVE, problem="x" * 100))
    raw = codec.encode(message)
    monkeypatch.setattr(codec, "MAX_MESSAGE_NBYTES", len(raw) - 1)
    with pytest.raises(ProtocolError, match="exceeds"):
        codec.encode(message)
    with pytest.raises(ProtocolError, match="exceeds"):
        codec.decode(raw)


def test_a_field_that_a_newer_one_has_is_ignored():
    raw = msgspec.msgpack.encode(["JobReleased", {"job": JOB, "node": "n1", "later": 1}])
    assert codec.decode(raw) == ev.JobReleased(job=JOB, node="n1")
