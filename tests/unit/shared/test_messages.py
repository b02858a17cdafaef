"""Messages: what goes in comes out; what is too large, unknown or out of range is refused, not believed."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd import __version__
from ckptd.shared.base.errors import ProtocolError
from ckptd.shared.base.ids import MAX_COUNTER, MAX_INCARNATION, MAX_STEP, JobKey, SaveId
from ckptd.shared.format.byte_ranges import packed
from ckptd.shared.format.schemes import Scheme
from ckptd.shared.protocol import messages as m
from ckptd.shared.protocol.publication import Draft
from ckptd.shared.protocol.segments import SegmentHere, SegmentLacks, Wanted
from ckptd.shared.protocol.topology import Peer, Rendezvous
from tests.runs import RUN

KEY = JobKey("/store", "job")
SAVE = SaveId(1, 2, 3, RUN)
SLOT = "r00003-000001.slot"
ATTACH = {"seq": 1, "version": 1, "job": KEY, "session": "s", "rank": 0, "world_size": 1, "host": "h", "pid": 1}

PEER = Peer("n", "arena", "tcp://10.0.0.1:7000", "k" * 40, "rack")
RENDEZVOUS = Rendezvous(PEER, bytes(range(32)), Scheme.XOR, 2)

REQUESTS = [
    m.Attach(**ATTACH),
    m.Attach(**ATTACH | {"incarnation": 5, "takeover": True, "cadence": m.Cadence(10, 2.5)}),
    m.Attach(**ATTACH | {"rendezvous": RENDEZVOUS}),
    m.AskNode(seq=2),
    m.AskSlots(seq=2, capacity=1 << 40),
    m.HandOver(seq=3, slot=SLOT, save=SAVE, drain=True),
    m.Skip(seq=4, save=SAVE, reason="no slot"),
    m.AskDrain(seq=5),
    m.AskDrain(seq=6, job=KEY, preempt=True),
    m.AskPreempt(seq=6, why="SIGTERM to rank 3", passed=7),
    m.AskLoad(seq=7),
    m.AskLoad(seq=8, step=0),
    m.ReportLoad(seq=9, save=SAVE, tier=m.Tier.PFS, problem="digest", fatal=True),
    m.AskPlace(seq=9, read="load.2.1", exchange=m.ExchangeAddress("10.0.0.1", 4000, bytes(32))),
    m.AskSegments(seq=9, save=SAVE, wanted=[Wanted(3), Wanted(4, packed([(4096, 4099), (1 << 40, 1 << 41)]))]),
    m.DropSegments(seq=10, save=SAVE),
    m.AskSteps(seq=10),
    m.AskPublish(seq=10, save=SAVE, draft=Draft("/runs/step-7", "/runs/.step-7")),
    m.AskStatus(seq=11),
    m.AskStop(seq=12, wait=True),
    m.AskForget(seq=13, job=KEY, force=True),
    m.Detach(seq=(1 << 53) - 1),
]
REPLIES = [
    m.Done(reply_to=1),
    m.Refused(reply_to=2, code="stale", message="x", hint="y"),
    m.Attached(
        reply_to=3, node="n", incarnation=4, run=RUN, known=[m.Progress(save=SAVE, end=m.End.KEPT)], warnings=["w"]
    ),
    m.Attached(reply_to=3, node="n", incarnation=4, run=RUN, scheme=Scheme.DOUBLE),
    m.NodeInfo(reply_to=4, peer=PEER, scheme=Scheme.XOR, set_size=4),
    m.SlotsComing(reply_to=4, count=3),
    m.SlotGranted(slot=SLOT, capacity=5),
    m.SlotsRefused(code="budget", message="full"),
    m.Progress(save=SAVE, milestone=m.Milestone.DURABLE, end=m.End.DURABLE),
    m.LoadFrom(reply_to=5, incarnation=6, run=RUN, save=SAVE, tier=m.Tier.ARENA, slot=SLOT, notes=["n"]),
    m.SegmentsHere(reply_to=5, files=[SegmentHere(3, SLOT)], lacks=[SegmentLacks(4, "gone")], refused="full"),
    m.Steps(reply_to=6, checkpoints=[]),
    m.Forgotten(reply_to=7, slots=3, nbytes=1 << 40),
]


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda r: type(r).__name__)
def test_requests_come_back(request_):
    assert m.decode_request(m.encode(request_)) == request_


@pytest.mark.parametrize("reply", REPLIES, ids=lambda r: type(r).__name__)
def test_replies_come_back(reply):
    assert m.decode_reply(m.encode(reply)) == reply


def test_every_request_is_tried():
    assert {type(r) for r in REQUESTS} == set(m.Request.__args__)


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(frame):
    for decode in (m.decode_request, m.decode_reply):
        with pytest.raises(ProtocolError):
            decode(frame)


@given(request_=st.sampled_from(REQUESTS), cut=st.integers(1, 500))
def test_truncated_messages_are_refused(request_, cut):
    frame = m.encode(request_)
    with pytest.raises(ProtocolError):
        m.decode_request(frame[: max(0, len(frame) - cut)])


@given(request_=st.sampled_from(REQUESTS), at=st.integers(0, 500), value=st.integers(0, 255))
def test_a_changed_byte_is_refused_or_yields_a_valid_request(request_, at, value):
    frame = bytearray(m.encode(request_))
    frame[at % len(frame)] = value
    try:
        found = m.decode_request(bytes(frame))
    except ProtocolError:
        return
    assert isinstance(found, tuple(m.Request.__args__))


def test_a_message_has_a_largest_size():
    frame = m.encode(m.AskLoad(seq=1)).ljust(m.MAX_MESSAGE_NBYTES + 1, b"\0")
    with pytest.raises(ProtocolError, match="exceeds"):
        m.decode_request(frame)


@pytest.mark.parametrize("body", [{}, {"type": "Shutdown", "seq": 1}, {"type": "Done", "reply_to": 1}, [], None, 7])
def test_unknown_tags_and_shapes_are_refused(body):
    with pytest.raises(ProtocolError):
        m.decode_request(msgspec.msgpack.encode(body))


@pytest.mark.parametrize("who", ["unknown version", "9.9"])
def test_a_reply_that_is_not_known_is_refused_and_both_versions_are_named(who):
    said = {} if who == "unknown version" else {"version": 99, "release": who}
    with pytest.raises(ProtocolError) as caught:
        m.decode_reply(msgspec.msgpack.encode({"type": "Weather", "reply_to": 1, **said}))
    theirs = "protocol unknown, ckptd of unknown version" if not said else "protocol 99, ckptd 9.9"
    ours = f"this client (protocol {m.VERSION}, ckptd {__version__})"
    assert caught.value.message == f"message 'Weather' of the daemon ({theirs}): {ours} does not know it"
    assert "same ckptd" in caught.value.hint


BAD_NAMES = [
    "../x",
    "r00000-000001.slot/..",
    "r0-1.slot",
    "/etc/passwd",
    "r00000-000001.slot\0",
    "r00000-000001.slot\n",
    "",
    "x" * 300,
]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_slot_names_cannot_leave_the_arena(name):
    with pytest.raises(ProtocolError):
        m.decode_request(m.encode(m.HandOver(seq=1, slot=name, save=SAVE)))


@pytest.mark.parametrize(
    "words",
    [
        {"rank": -1},
        {"rank": 1 << 20},
        {"world_size": 0},
        {"pid": 0},
        {"seq": -1},
        {"seq": 1 << 53},
        {"session": ""},
        {"session": "a b"},
        {"session": "x" * 129},
        {"host": "h" * 256},
        {"job": JobKey("relative", "job")},
        {"job": JobKey("/store\n", "job")},
        {"job": JobKey("/store", "job\n")},
        {"job": JobKey("/store", "../job")},
        {"job": JobKey("/store", ".job")},
        {"job": JobKey("/store", "")},
        {"job": JobKey("/store", "j" * 65)},
        {"incarnation": MAX_INCARNATION + 1},
        {"cadence": m.Cadence(-1, 0)},
        {"cadence": m.Cadence(1, -1.0)},
        {"rendezvous": [PEER, b"x" * 31, "xor", 8]},
        {"rendezvous": [PEER, b"x" * 33, "xor", 8]},
        {"rendezvous": Rendezvous(PEER, bytes(32), Scheme.XOR, 1)},
        {"rendezvous": Rendezvous(Peer("n", "arena", "ipc:///etc/x", "k" * 40), b"")},
        {"rendezvous": Rendezvous(Peer("../n", "arena", "", "k" * 40), b"")},
        {"rendezvous": Rendezvous(Peer("n", "arena", "", "short"), b"")},
    ],
    ids=str,
)
def test_an_attach_with_impossible_words_is_refused(words):
    with pytest.raises(ProtocolError):
        m.decode_request(m.encode(m.Attach(**ATTACH | words)))


@pytest.mark.parametrize(
    "save",
    [
        SaveId(-1, 0, 0, RUN),
        SaveId(MAX_INCARNATION + 1, 0, 0, RUN),
        SaveId(0, MAX_COUNTER + 1, 0, RUN),
        SaveId(0, 0, MAX_STEP + 1, RUN),
    ],
)
def test_a_save_out_of_range_is_refused(save):
    with pytest.raises(ProtocolError):
        m.decode_request(m.encode(m.Skip(seq=1, save=save, reason="")))


def test_texts_and_capacities_have_limits():
    for request_ in (
        m.Skip(seq=1, save=SAVE, reason="x" * 4097),
        m.ReportLoad(seq=1, save=SAVE, tier=m.Tier.PFS, problem="x" * 4097),
        m.AskSlots(seq=1, capacity=0),
        m.AskSlots(seq=1, capacity=m.MAX_CAPACITY + 1),
        m.AskLoad(seq=1, step=-1),
    ):
        with pytest.raises(ProtocolError):
            m.decode_request(m.encode(request_))


def test_a_protocol_with_a_rendezvous_has_a_version_of_its_own():
    """Version 6 would lose the rendezvous of an Attach; 3 knows no Notice, 4 no AskPublish, 5 no `mismatched`.

    7 would take a LoadFrom with `saved_by` for one without a place.
    """
    assert m.VERSION == 8
