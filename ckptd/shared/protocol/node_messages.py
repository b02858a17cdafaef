"""Every message between the daemons of a job, one MessagePack map each; docs/protocol.md explains them.

The names on the wire are the tags and the field names written here. A class may be renamed; a tag or a field may not,
unless ``packets.VERSION`` is raised. ``make golden-wire`` writes the golden bytes again.
"""

from typing import Annotated

import msgspec

from ckptd.shared.base.decoding import MALFORMED, decoded
from ckptd.shared.base.errors import ProtocolError
from ckptd.shared.base.ids import Incarnation, NodeName, Rank, SaveId, Session
from ckptd.shared.format.slot import Seal
from ckptd.shared.protocol.columns import Packed
from ckptd.shared.protocol.node_facts import *  # noqa: F403 - one face of all messages
from ckptd.shared.protocol.node_facts import Fact, NodeMessage
from ckptd.shared.protocol.node_orders import *  # noqa: F403
from ckptd.shared.protocol.node_orders import Order
from ckptd.shared.protocol.parity_types import DataColumn, ParityChunk
from ckptd.shared.protocol.read_tree import ExchangeAddress
from ckptd.shared.protocol.topology import Peer, TopologyDigest
from ckptd.shared.protocol.versions import refuse_unknown, tag_in_map, tags

MAX_MESSAGE_NBYTES = (8 << 20) - 64
_KEPT_NBYTES = 4096  # of a report that the next may repeat
AnyRead = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._:/-]{1,256}\Z")]  # session and name of a read


class Report(NodeMessage, frozen=True, kw_only=True, tag="report"):
    """To the coordinator, or to one that may become it: this happened at my node."""

    event: Fact


# --- from node to node, past the coordinator


class CommitFinished(NodeMessage, frozen=True, kw_only=True, tag="commit-finished"):
    """The coordinator does not answer; the sender has made the commit in its place."""

    save: SaveId


class SessionAnnounced(NodeMessage, frozen=True, kw_only=True, tag="session-announced"):
    """To a node that a new session does not use: this daemon coordinates it; report the living ranks there to it."""

    session: Session
    coordinator: Peer


class TopologyAsked(NodeMessage, frozen=True, kw_only=True, tag="topology-asked"):
    """The topology of this digest. Answered when the receiver has it: once, or not at all."""

    digest: TopologyDigest


class TopologyReported(NodeMessage, frozen=True, kw_only=True, tag="topology-reported"):
    """The receiver compares it with the digest that its coordinator named: it may come from any node."""

    packed: Packed


class ColumnOffered(NodeMessage, frozen=True, kw_only=True, tag="column-offered"):
    """To the members of the sender's set: what it contributes to their parity."""

    save: SaveId
    epoch: Incarnation
    column: DataColumn


class SealAsked(NodeMessage, frozen=True, kw_only=True, tag="seal-asked"):
    """The seal of a segment that lies at the receiver."""

    save: SaveId
    rank: Rank


class SealTold(NodeMessage, frozen=True, kw_only=True, tag="seal-told"):
    """None: it does not lie here, or has no digests yet."""

    save: SaveId
    rank: Rank
    seal: Seal | None


class ChunkRequested(NodeMessage, frozen=True, kw_only=True, tag="chunk-requested"):
    """The description of a chunk that lies at the receiver."""

    save: SaveId
    epoch: Incarnation


class ChunkReported(NodeMessage, frozen=True, kw_only=True, tag="chunk-reported"):
    """None: it does not lie here."""

    save: SaveId
    epoch: Incarnation
    chunk: ParityChunk | None


class ExchangeAsked(NodeMessage, frozen=True, kw_only=True, tag="exchange-asked"):
    """Where the receiver's ranks serve the nodes that take part in this read."""

    read: AnyRead


class ExchangeTold(NodeMessage, frozen=True, kw_only=True, tag="exchange-told"):
    """None: its ranks do not read, or serve nobody."""

    read: AnyRead
    address: ExchangeAddress | None


Message = (
    Report
    | Order
    | CommitFinished
    | SessionAnnounced
    | TopologyAsked
    | TopologyReported
    | ColumnOffered
    | SealAsked
    | SealTold
    | ChunkRequested
    | ChunkReported
    | ExchangeAsked
    | ExchangeTold
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
_TAGS, _FACT_TAGS = tags(Message), tags(Fact)


def encode(message: Message) -> bytes:
    """The message as bytes. Raises ProtocolError when it is too large."""
    raw = _encoder.encode(message)
    if len(raw) > MAX_MESSAGE_NBYTES:
        raise ProtocolError(f"{type(message).__name__} of {len(raw)} bytes exceeds {MAX_MESSAGE_NBYTES}")
    return raw


def decode(raw: bytes) -> Message:
    """The message in the bytes, each field checked.

    Raises ProtocolError for anything else: its subclass UnknownMessageError for a tag that is none of ours.
    """
    if len(raw) > MAX_MESSAGE_NBYTES:
        raise ProtocolError(f"message between nodes of {len(raw)} bytes exceeds {MAX_MESSAGE_NBYTES}")
    return decoded(_decoder.decode, raw, "malformed message between nodes", ProtocolError, _refuse_unknown)


class _Sealed(msgspec.Struct, kw_only=True, tag="report"):
    """A report whose fact is not looked at."""

    job: msgspec.Raw
    node: NodeName
    event: msgspec.Raw


_sealed: msgspec.msgpack.Decoder[_Sealed] = msgspec.msgpack.Decoder(_Sealed)


class Reader:
    """Decodes messages as ``decode`` does; a report of what the last one reported costs a fifth of that.

    Nodes report the same of a save one after the other, and nearly all of a report is names to be checked.
    """

    def __init__(self) -> None:
        self._last: tuple[bytes, bytes] = b"", b""
        self._report: Report | None = None

    def decode(self, raw: bytes) -> Message:
        """As the function."""
        try:
            sealed = _sealed.decode(raw)
        except MALFORMED:
            return decode(raw)
        parts = bytes(sealed.job), bytes(sealed.event)
        if self._report is not None and parts == self._last:
            return Report(job=self._report.job, node=sealed.node, event=self._report.event)
        message = decode(raw)
        if isinstance(message, Report) and len(raw) <= _KEPT_NBYTES:
            self._last, self._report = parts, message
        return message


def _refuse_unknown(raw: bytes) -> None:
    refuse_unknown(raw, _TAGS)
    try:
        tag, event = tag_in_map(raw)
    except MALFORMED:
        return
    if tag == Report.__struct_config__.tag and event:
        refuse_unknown(bytes(event), _FACT_TAGS)
