"""What a daemon and its store worker say to each other: msgpack records in frames that start with their length.

The worker is told its store once, when it starts, so no message names it. Every request has an id that the daemon chose
and is answered by exactly one Done or Failed with that id, in any order; Progress may come before.
"""

import struct
from typing import Annotated

import msgspec

from ckptd.protocol.decoding import MALFORMED
from ckptd.protocol.errors import ProtocolError
from ckptd.protocol.ids import MAX_PARTS, FileName, Incarnation, JobName, Nbytes, SaveId
from ckptd.protocol.manifest import ParityRecord, Vote
from ckptd.store import CommitOutcome
from ckptd.store_scan import Scan

MAX_FRAME_NBYTES = 2 << 30
_LENGTH = struct.Struct("<I")


class TakeIncarnation(msgspec.Struct, frozen=True, kw_only=True, tag="take-incarnation"):
    """Answered by Taken."""

    id: int
    job: JobName
    at_least: Incarnation = 1


class ScanJob(msgspec.Struct, frozen=True, kw_only=True, tag="scan-job"):
    """Answered by Scan."""

    id: int
    job: JobName


class DrainFile(msgspec.Struct, frozen=True):
    """One slot and a file to make of it: of its image, or of a part."""

    slot_path: str
    name: FileName
    start: Nbytes  # of the part in the image; whole pages
    nbytes: Nbytes  # of the part


class Drain(msgspec.Struct, frozen=True, kw_only=True, tag="drain"):
    """All of a node's files of a save, written and synced. Answered by Drained. Can be repeated after a failure."""

    id: int
    job: JobName
    save: SaveId
    files: Annotated[list[DrainFile], msgspec.Meta(max_length=4096 * MAX_PARTS)]
    bytes_per_s: Nbytes = 0  # 0: no cap


class DrainParity(msgspec.Struct, frozen=True, kw_only=True, tag="drain-parity"):
    """A node's parity of a save, written and synced. Answered by no result. Can be repeated after a failure."""

    id: int
    job: JobName
    save: SaveId
    path: str  # in the arena
    parity: ParityRecord
    bytes_per_s: Nbytes = 0  # 0: no cap


class WriteVote(msgspec.Struct, frozen=True, kw_only=True, tag="write-vote"):
    """To be sent once the Drain of all the vote's files is Done. Answered by no result."""

    id: int
    vote: Vote


class Commit(msgspec.Struct, frozen=True, kw_only=True, tag="commit"):
    """Answered by CommitOutcome."""

    id: int
    job: JobName
    save: SaveId
    writer: str


class RemoveCheckpoint(msgspec.Struct, frozen=True, kw_only=True, tag="remove-checkpoint"):
    """A committed one that is not the newest. Answered by Removed."""

    id: int
    job: JobName
    save: SaveId


class RemovePartial(msgspec.Struct, frozen=True, kw_only=True, tag="remove-partial"):
    """Answered by no result."""

    id: int
    job: JobName
    save: SaveId


class SweepTrash(msgspec.Struct, frozen=True, kw_only=True, tag="sweep-trash"):
    """What earlier removals left, and what an earlier daemon did not publish. Answered by Swept."""

    id: int
    job: JobName


class Probe(msgspec.Struct, frozen=True, kw_only=True, tag="probe"):
    """Whether the store answers. Answered by Space."""

    id: int


class Taken(msgspec.Struct, frozen=True, tag="taken"):
    """The incarnation that is now the job's."""

    incarnation: Incarnation


class Drained(msgspec.Struct, frozen=True, tag="drained"):
    """The files are synced. committed: nothing was written, because the save was found committed."""

    nbytes: int
    seconds: float
    committed: bool = False


class Removed(msgspec.Struct, frozen=True, tag="removed"):
    """The checkpoint is gone, or stays because it is pinned."""

    pinned: bool


class Swept(msgspec.Struct, frozen=True, tag="swept"):
    """notes: what could not be published."""

    notes: list[str]


class Space(msgspec.Struct, frozen=True, tag="space"):
    """Of the store's file system."""

    free_nbytes: int
    total_nbytes: int


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The request was carried out."""

    id: int
    result: Taken | Scan | Drained | CommitOutcome | Removed | Swept | Space | None = None


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The request was not carried out and left nothing that a repetition would trip over.

    code: of the error tree, "os" for an error of the file system, "bug" for anything else. errno: its name, such as
    ENOSPC, or empty.
    """

    id: int
    code: str
    errno: str
    message: str
    hint: str


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """Bytes of a Drain written so far, over all its files and of each; about 10 a second."""

    id: int
    nbytes_done: int
    files: dict[FileName, Nbytes] = {}


Request = (
    TakeIncarnation
    | ScanJob
    | Drain
    | DrainParity
    | WriteVote
    | Commit
    | RemoveCheckpoint
    | RemovePartial
    | SweepTrash
    | Probe
)  # fmt: skip
Reply = Done | Failed | Progress

_encoder = msgspec.msgpack.Encoder()
_request_decoder = msgspec.msgpack.Decoder(Request)
_reply_decoder = msgspec.msgpack.Decoder(Reply)


def encode_frame(message: Request | Reply) -> bytes:
    """Length and body. Raises ProtocolError when the message is larger than a frame may be."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_NBYTES:
        raise ProtocolError(f"{type(message).__name__} of {len(body)} bytes exceeds a frame's {MAX_FRAME_NBYTES}")
    return _LENGTH.pack(len(body)) + body


def decode_request(body: bytes) -> Request:
    """The request in a frame. Raises ProtocolError."""
    try:
        return _request_decoder.decode(body)  # type: ignore[no-any-return]  # a Decoder of a union has no type
    except MALFORMED as error:
        raise ProtocolError(f"malformed request: {error}") from error


def decode_reply(body: bytes) -> Reply:
    """The reply in a frame. Raises ProtocolError."""
    try:
        return _reply_decoder.decode(body)  # type: ignore[no-any-return]
    except MALFORMED as error:
        raise ProtocolError(f"malformed reply: {error}") from error


class FrameReader:
    """Frames out of a stream that comes in pieces."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Bodies of the frames that data completes. Raises ProtocolError for a length that cannot be."""
        self._data += data
        bodies = []
        while len(self._data) >= _LENGTH.size:
            (nbytes,) = _LENGTH.unpack_from(self._data)
            if nbytes > MAX_FRAME_NBYTES:
                raise ProtocolError(f"frame of {nbytes} bytes exceeds {MAX_FRAME_NBYTES}")
            stop = _LENGTH.size + nbytes
            if len(self._data) < stop:
                break
            bodies.append(bytes(self._data[_LENGTH.size : stop]))
            del self._data[:stop]
        return bodies
