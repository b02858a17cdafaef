"""What travels between two daemons: packets of a link, and what they carry. One ZeroMQ frame of msgpack each."""

from typing import Annotated

import msgspec

from ckptd.protocol.decoding import MALFORMED
from ckptd.protocol.errors import ProtocolError
from ckptd.protocol.ids import JobKey, NodeName
from ckptd.protocol.topology import Endpoint

VERSION = 1
MAX_BODY_NBYTES = 8 << 20
MAX_PACKET_NBYTES = MAX_BODY_NBYTES + 4096
MAX_JOBS = 256  # that one peer may name

End = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Seq = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]


class Packet(msgspec.Struct, frozen=True, array_like=True):
    """One step of a link. ``end`` and ``to`` are the sender's and the receiver's end of it; 0 is not known."""

    life: End  # of the sender's process
    end: End
    to: End
    hello: bool = False  # the sender's end is not tied to another one yet
    seq: Seq = 0  # of the body; 0: there is none
    ack: Seq = 0  # all up to this one were received
    body: Annotated[bytes, msgspec.Meta(max_length=MAX_BODY_NBYTES)] = b""


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """A packet and between whom. The key that signed for the connection must be that of ``sender``."""

    version: int
    sender: NodeName
    receiver: NodeName
    endpoint: Endpoint  # where the sender is reached now; a restarted daemon may have another port
    packet: Packet


class Join(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The sender takes the receiver's messages about this job from here on."""

    job: JobKey


class Leave(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """It takes them no more."""

    job: JobKey


class Bulk(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Where the sender serves bytes, and how the receiver proves there who it is. Good for this link only."""

    port: Annotated[int, msgspec.Meta(ge=0, le=65535)]  # 0: nowhere
    link_id: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")]
    secret: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class Word(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A message between nodes, as the codec makes it."""

    message: bytes


class Ask(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """What the receiver says of itself and the job, for a status. Who knows no such word counts it as refused."""

    id: Seq
    job: JobKey


class Told(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The answer to the receiver's Ask of that id, as ckptd.survey makes it."""

    id: Seq
    answer: Annotated[bytes, msgspec.Meta(max_length=MAX_BODY_NBYTES)]


Body = Join | Leave | Bulk | Word | Ask | Told

_encoder = msgspec.msgpack.Encoder()
_envelopes: msgspec.msgpack.Decoder[Envelope] = msgspec.msgpack.Decoder(Envelope)
_bodies: msgspec.msgpack.Decoder[Body] = msgspec.msgpack.Decoder(Body)


def encode_envelope(envelope: Envelope) -> bytes:
    """One frame."""
    return _encoder.encode(envelope)


def decode_envelope(frame: bytes) -> Envelope:
    """The envelope in a frame. Raises ProtocolError for anything else, and for another version."""
    try:
        envelope = _envelopes.decode(frame)
    except MALFORMED as error:
        raise ProtocolError(f"malformed packet of a peer: {error}") from error
    if envelope.version != VERSION:
        text = f"daemon of {envelope.sender} speaks version {envelope.version} between daemons, this one {VERSION}"
        raise ProtocolError(text, hint="install the same ckptd on both nodes and restart the daemons")
    return envelope


def encode_body(body: Body) -> bytes:
    """What a packet carries. Raises ProtocolError when it is too large."""
    raw = _encoder.encode(body)
    if len(raw) > MAX_BODY_NBYTES:
        raise ProtocolError(f"message to a peer of {len(raw)} bytes exceeds {MAX_BODY_NBYTES}")
    return raw


def decode_body(raw: bytes) -> Body:
    """Raises ProtocolError for what is none."""
    try:
        return _bodies.decode(raw)
    except MALFORMED as error:
        raise ProtocolError(f"malformed message of a peer: {error}") from error
