"""What travels between two daemons: packets of a link, and what they carry. One ZeroMQ frame of msgpack each."""

from functools import partial
from typing import Annotated

import msgspec

from ckptd import __version__
from ckptd.shared.base.decoding import MALFORMED, decoded
from ckptd.shared.base.errors import ProtocolError
from ckptd.shared.base.ids import JobKey, NodeName, Session
from ckptd.shared.protocol import node_messages
from ckptd.shared.protocol.status import CheckpointStatus
from ckptd.shared.protocol.topology import Endpoint, Peer
from ckptd.shared.protocol.versions import Release, Speaker, not_known, other_version, refuse_unknown, tags

VERSION = 10
MAX_BODY_NBYTES = 8 << 20
MAX_BUNDLE_NBYTES = MAX_BODY_NBYTES + 4096  # one packet of any size fits
MAX_PACKET_NBYTES = MAX_BUNDLE_NBYTES + 4096
MAX_LETTERS = 1024  # of a bundle
MAX_JOBS = 256  # that one peer may name
MAX_CHECKPOINTS = 16384  # of one job, in an answer to a peer

End = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Seq = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]


class Packet(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One step of a link. ``end`` and ``to`` are the sender's and the receiver's end of it; 0 is not known."""

    instance: End  # of the sender's process
    end: End
    to: End
    hello: bool = False  # the sender's end is not connected yet
    seq: Seq = 0  # of the body; without one: of the last that was sent, and the sender waits; 0: it waits for nothing
    ack: Seq = 0  # all up to this one were received
    body: Annotated[bytes, msgspec.Meta(max_length=MAX_BUNDLE_NBYTES)] = b""  # without a seq: a bundle, or nothing
    attempt: Seq = 0  # of the sender to have its bodies received in order
    lost: Seq = 0  # the receiver's attempt in which something after ``ack`` was lost; 0: it is not known of any


class Envelope(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A packet and between whom. The key that signed for the connection must be that of ``sender``.

    ``version``, ``sender`` and ``release`` keep their places in every version: so the other side can be named.
    """

    version: int
    sender: NodeName
    receiver: NodeName
    endpoint: Endpoint  # where the sender is reached now; a restarted daemon may have another port
    packet: Packet
    release: Release  # of ckptd, at the sender
    path: Seq = 0  # on which the sender speaks, as ckptd.peers.path counts them: a direct one, so even


class _Opening(msgspec.Struct, array_like=True):
    """The sender fields of an envelope of any version."""

    version: int
    sender: NodeName
    receiver: msgspec.Raw = msgspec.Raw()
    endpoint: msgspec.Raw = msgspec.Raw()
    packet: msgspec.Raw = msgspec.Raw()
    release: Release = ""


class Join(msgspec.Struct, frozen=True, array_like=True, tag="join", gc=False):
    """The sender takes the receiver's messages about this job from here on. needed: it has use for the link."""

    job: JobKey
    needed: bool = True


class Leave(msgspec.Struct, frozen=True, array_like=True, tag="leave"):
    """It takes them no more."""

    job: JobKey


class Present(msgspec.Struct, frozen=True, array_like=True, tag="present"):
    """The sender has the session's ticket: accept it for this job. ``peer``: the sender, with its own key."""

    job: JobKey
    session: Session
    peer: Peer


class Rest(msgspec.Struct, frozen=True, array_like=True, tag="rest"):
    """The last of a link that neither side has use for: the sender is not silent, and can be called again."""


class Bulk(msgspec.Struct, frozen=True, array_like=True, tag="bulk", gc=False):
    """Where the sender serves bytes, and how the receiver proves its identity there. Good for this link only."""

    port: Annotated[int, msgspec.Meta(ge=0, le=65535)]  # 0: nowhere
    link_id: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")]
    secret: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class Message(msgspec.Struct, frozen=True, array_like=True, tag="message", gc=False):
    """A message between nodes, as ckptd.shared.protocol.node_messages makes it."""

    message: bytes


class Ask(msgspec.Struct, frozen=True, array_like=True, tag="ask"):
    """Asks for the report of the receiver on itself and the job, for a status. It may stay unanswered."""

    id: Seq
    job: JobKey


class Answered(msgspec.Struct, frozen=True, array_like=True, tag="answered"):
    """The answer to the receiver's Ask of that id, as ckptd.daemon.status_query makes it."""

    id: Seq
    answer: Annotated[bytes, msgspec.Meta(max_length=MAX_BODY_NBYTES)]


class StepsAsked(msgspec.Struct, frozen=True, array_like=True, tag="steps-asked"):
    """Which checkpoints of the job could be restored: to its coordinator. Sent again until it is answered."""

    id: Seq
    job: JobKey


class StepsKnown(msgspec.Struct, frozen=True, array_like=True, tag="steps-known"):
    """The answer to the receiver's StepsAsked of that id: the newest first; or ``problem``, why that is not known."""

    id: Seq
    checkpoints: Annotated[tuple[CheckpointStatus, ...], msgspec.Meta(max_length=MAX_CHECKPOINTS)] = ()
    problem: Annotated[str, msgspec.Meta(max_length=4096)] = ""


class Letter(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A packet of a link that one of whose ends is at ``node``, without its body."""

    node: NodeName
    path: Seq  # a relayed one, so odd
    packet: Packet
    body: Annotated[int, msgspec.Meta(ge=0, le=MAX_LETTERS)] = 0  # its place among the bodies, from 1; 0: none
    waits: Annotated[int, msgspec.Meta(ge=0, lt=1 << 33)] = 0  # as ckptd.peers.group has it: it may wait for others


Letters = Annotated[tuple[Letter, ...], msgspec.Meta(min_length=1, max_length=MAX_LETTERS)]
Bodies = Annotated[
    tuple[Annotated[bytes, msgspec.Meta(max_length=MAX_BODY_NBYTES)], ...], msgspec.Meta(max_length=MAX_LETTERS)
]


class Forward(msgspec.Struct, frozen=True, array_like=True, tag="forward", gc=False):
    """Packets of the sender for other nodes of the job, to be passed on: ``node`` of a letter is the addressee."""

    job: JobKey
    letters: Letters
    bodies: Bodies = ()  # one that several nodes get is here once


class Forwarded(msgspec.Struct, frozen=True, array_like=True, tag="forwarded", gc=False):
    """Packets of other nodes of the job for the receiver: ``node`` of a letter is its sender."""

    job: JobKey
    letters: Letters
    bodies: Bodies = ()


Bundle = Forward | Forwarded  # not numbered, not sent again: what the links in it miss, their ends send again
Mail = Ask | Answered | StepsAsked | StepsKnown  # read by the loop, not by the core
Body = Join | Leave | Rest | Present | Bulk | Message | Bundle | Mail

_HINT = "install one version of ckptd on all nodes and restart the daemons"

_encoder = msgspec.msgpack.Encoder()
_envelopes: msgspec.msgpack.Decoder[Envelope] = msgspec.msgpack.Decoder(Envelope)
_openings: msgspec.msgpack.Decoder[_Opening] = msgspec.msgpack.Decoder(_Opening)
_bodies: msgspec.msgpack.Decoder[Body] = msgspec.msgpack.Decoder(Body)
_TAGS = tags(Body)


def encode_envelope(envelope: Envelope) -> bytes:
    """One frame."""
    return _encoder.encode(envelope)


def wrap(packet: Packet, sender: str, receiver: str, endpoint: str, path: int = 0) -> bytes:
    """The frame with this packet of this daemon."""
    return encode_envelope(Envelope(VERSION, sender, receiver, endpoint, packet, __version__, path))


def decode_envelope(frame: bytes) -> Envelope:
    """The envelope in a frame. Raises ProtocolError for anything else; for another version, it names both sides."""
    envelope = decoded(_envelopes.decode, frame, "malformed packet of a peer", ProtocolError, _refuse_version)
    if envelope.version != VERSION:
        raise _other_version(envelope)
    return envelope


def _refuse_version(frame: bytes) -> None:
    """Another version's packet may look otherwise from the third item on."""
    try:
        opening = _openings.decode(frame)
    except MALFORMED:
        return
    if opening.version != VERSION:
        raise _other_version(opening)


def _other_version(opening: Envelope | _Opening) -> ProtocolError:
    return other_version(Speaker(f"node {opening.sender}", opening.version, opening.release), _ours(), _HINT)


def _ours() -> Speaker:
    return Speaker("this daemon", VERSION, __version__)


def unknown_message(kind: str, node: str, release: str) -> ProtocolError:
    """What to say of a message of that node that this daemon does not know, though the packets' version is the same."""
    return not_known(kind, Speaker(f"node {node}", VERSION, release), _ours(), _HINT)


def sentence(error: ProtocolError) -> str:
    """Of a status: what is wrong, and what to do."""
    return f"{error.message}; {error.hint}" if error.hint else error.message


def encode_body(body: Body) -> bytes:
    """What a packet carries. Raises ProtocolError when it is too large."""
    raw = _encoder.encode(body)
    most = MAX_BUNDLE_NBYTES if isinstance(body, Bundle) else MAX_BODY_NBYTES
    if len(raw) > most:
        raise ProtocolError(f"message to a peer of {len(raw)} bytes exceeds {most}")
    return raw


class BodyOnce:
    """Bodies of messages between nodes. The last is kept: one that goes to many nodes is encoded for the first."""

    def __init__(self) -> None:
        self._last: tuple[node_messages.Message, bytes] | None = None

    def of(self, message: node_messages.Message) -> bytes:
        """As encode_body; the same bytes for the same object. Raises ProtocolError when it is too large."""
        if self._last is None or self._last[0] is not message:
            self._last = message, encode_body(Message(node_messages.encode(message)))
        return self._last[1]


def decode_body(raw: bytes) -> Body:
    """Raises ProtocolError for what is none: UnknownMessageError for a tag that is none of ours."""
    look = partial(refuse_unknown, known=_TAGS, array=True)
    return decoded(_bodies.decode, raw, "malformed message of a peer", ProtocolError, look)
