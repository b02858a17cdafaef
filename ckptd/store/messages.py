"""What a daemon and its store worker say to each other: msgpack records in frames that start with their length.

The first frame of either side is its Hello: ckptd may have been replaced on disk while the daemon ran, and the worker
is made of what lies there now. The worker gets its store once, when it starts, so no message names it. Every request
has an id that the daemon chose and is answered by exactly one Done or Failed with that id, in any order; Progress may
come before. The names on the wire are the tags and field names: ``make golden-wire`` writes the golden bytes again.
"""

import math
import struct
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Annotated, Generic, TypeVar

import msgspec

from ckptd import __version__
from ckptd.shared.base.decoding import MALFORMED, decoded
from ckptd.shared.base.errors import ProtocolError, UnknownMessageError
from ckptd.shared.base.ids import (
    MAX_PARTS,
    FileName,
    Incarnation,
    JobName,
    Nbytes,
    SaveId,
    SetName,
    StoreChoice,
    StoreId,
    rank_of_file,
)
from ckptd.shared.format.manifest import ParityRecord, Vote
from ckptd.shared.protocol.publication import MAX_INTENTS, Intent
from ckptd.shared.protocol.versions import Release, Speaker, not_known, other_version, refuse_unknown, tags
from ckptd.store.facts import CommitOutcome, Committer, OpenedStore, Scan, Taker
from ckptd.store.journal_messages import AccountRead, PutJournal, ReadAccount
from ckptd.store.scrub_messages import MendCheckpoint, ReadBlock, ScrubCheckpoint, ScrubRequest, ScrubResult

VERSION = 7
DAEMON, WORKER = "the daemon", "its store worker"
MAX_FRAME_NBYTES = 2 << 30
_LENGTH = struct.Struct("<I")
# Where this user wants a trainer's files: known to the daemon from a rank, and never from the store.
IntentList = Annotated[list[Intent], msgspec.Meta(max_length=MAX_INTENTS)]
_HINT = "ckptd was replaced while the daemon ran: restart the daemon"


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The first frame of either side. Keeps its shape in every version."""

    version: int
    release: Release  # of ckptd


class UseKey(msgspec.Struct, frozen=True, tag="use-key"):
    """Integrity is keyed: sent once, after Hello. Answered by nothing."""

    key: bytes

    def __repr__(self) -> str:
        return "UseKey(..)"  # the key must not reach a log


class TakeIncarnation(msgspec.Struct, frozen=True, kw_only=True, tag="take-incarnation"):
    """Opens the store and takes a number. Answered by Taken.

    ``until``: of time.monotonic; later the daemon no longer waits, and the number is given back.
    ``remembered`` and ``wanted`` as of Store.open.
    """

    id: int
    job: JobName
    by: Taker
    at_least: Incarnation = 1
    until: float = math.inf
    remembered: list[StoreId] = []
    wanted: StoreChoice = ""


class Claim(msgspec.Struct, frozen=True):
    """A number that was made up while the store was silent, and whose it is."""

    incarnation: Incarnation
    by: Taker


class ScanJob(msgspec.Struct, frozen=True, kw_only=True, tag="scan-job"):
    """Opens the store as TakeIncarnation does, and looks. Answered by Scanned.

    ``make``: a store that is missing may be made; else it has no id, and nothing of the job.
    ``claim``: put on record first, so that a takeover sees it.
    """

    id: int
    job: JobName
    make: bool = False
    remembered: list[StoreId] = []
    wanted: StoreChoice = ""
    claim: Claim | None = None


class DrainFile(msgspec.Struct, frozen=True):
    """One slot and a file to make of it: of its image, or of a part."""

    slot_path: str
    name: FileName
    start: Nbytes  # of the part in the image; whole pages
    nbytes: Nbytes  # of the part


class Drain(msgspec.Struct, frozen=True, kw_only=True, tag="drain"):
    """All of a node's files of a save, written and synced. Answered by Drained. Can be repeated after a failure.

    ``store_id``: another store at the path is not written to. ``folder``: of the node's set.
    """

    id: int
    store_id: StoreId
    job: JobName
    save: SaveId
    folder: SetName
    files: Annotated[list[DrainFile], msgspec.Meta(max_length=4096 * MAX_PARTS)]
    bytes_per_s: Nbytes = 0  # 0: no cap


class DrainParity(msgspec.Struct, frozen=True, kw_only=True, tag="drain-parity"):
    """A node's parity of a save, written and synced. Answered by no result. Can be repeated after a failure."""

    id: int
    store_id: StoreId
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
    """Answered by CommitOutcome. intents: of this save and of newer ones."""

    id: int
    job: JobName
    save: SaveId
    writer: str
    by: Committer
    intents: IntentList = []


class Publish(msgspec.Struct, frozen=True, kw_only=True, tag="publish"):
    """What an earlier daemon did not get to. Answered by Published. own_part: of this save, what each node puts."""

    id: int
    job: JobName
    intents: IntentList
    own_part: SaveId | None = None


class RemoveCheckpoint(msgspec.Struct, frozen=True, kw_only=True, tag="remove-checkpoint"):
    """A committed one that is not the newest. Answered by Removed. intents: as in Commit."""

    id: int
    job: JobName
    save: SaveId
    intents: IntentList = []


class RemovePartial(msgspec.Struct, frozen=True, kw_only=True, tag="remove-partial"):
    """Answered by no result."""

    id: int
    job: JobName
    save: SaveId


class SweepTrash(msgspec.Struct, frozen=True, kw_only=True, tag="sweep-trash"):
    """What earlier removals left. Answered by no result."""

    id: int
    job: JobName


class Probe(msgspec.Struct, frozen=True, kw_only=True, tag="probe"):
    """Whether the store answers. Answered by Space."""

    id: int


class Taken(msgspec.Struct, frozen=True, tag="taken"):
    """The incarnation that is now the job's, and the store that it was taken in."""

    incarnation: Incarnation
    store: OpenedStore


class Scanned(msgspec.Struct, frozen=True, tag="scanned"):
    """What lies on the store, and which one it is. lost: somebody else has the number that was claimed.

    others: jobs that have checkpoints there, for a job that has none, as a user reads them.
    """

    store: OpenedStore
    scan: Scan
    lost: bool = False
    others: list[str] = []


class Drained(msgspec.Struct, frozen=True, tag="drained"):
    """The files are synced. committed: nothing was written, because the save was found committed."""

    nbytes: int
    seconds: float
    committed: bool = False


class Removed(msgspec.Struct, frozen=True, tag="removed"):
    """The checkpoint is gone, or stays because it is pinned."""

    pinned: bool


class Published(msgspec.Struct, frozen=True, tag="published"):
    """done: saves whose files are where they belong. notes: why others' are not."""

    done: list[SaveId]
    notes: list[str]


class Space(msgspec.Struct, frozen=True, tag="space"):
    """Of the store's file system."""

    free_nbytes: int
    total_nbytes: int


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The request was carried out."""

    id: int
    result: (
        Taken | Scanned | Drained | CommitOutcome | Removed | Published | Space | AccountRead | ScrubResult | None
    ) = None


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

    @property
    def by_rank(self) -> tuple[tuple[int, int], ...]:
        """Bytes written of each rank's images, of which some are several files."""
        done: Counter[int] = Counter()
        for name, nbytes in self.files.items():
            done[rank_of_file(name)] += nbytes
        return tuple(sorted(done.items()))


Request = (
    TakeIncarnation
    | ScanJob
    | Drain
    | DrainParity
    | WriteVote
    | Commit
    | Publish
    | RemoveCheckpoint
    | RemovePartial
    | SweepTrash
    | PutJournal
    | ReadAccount
    | Probe
    | ScrubRequest
)  # fmt: skip
Order = Request | UseKey
Reply = Done | Failed | Progress
MAIN = ""
# Requests that nobody waits for. Of each lane one is carried out at a time, in a thread of its own.
_LANES: dict[type[Request], str] = {
    PutJournal: "journal",
    ReadAccount: "account",
    ReadBlock: "block",
    ScrubCheckpoint: "scrub",
    MendCheckpoint: "scrub",
}
LANES = frozenset({MAIN, *_LANES.values()})


def lane_of(request: Request) -> str:
    """MAIN: what a save, a load or a session waits for. What hangs in another lane takes no thread from it."""
    return _LANES.get(type(request), MAIN)


_encoder = msgspec.msgpack.Encoder()
_hello_decoder = msgspec.msgpack.Decoder(Hello)
_request_decoder = msgspec.msgpack.Decoder(Order)
_reply_decoder = msgspec.msgpack.Decoder(Reply)
_REQUEST_TAGS, _REPLY_TAGS = tags(Order), tags(Reply)


def hello_frame() -> bytes:
    """What either side sends before all else."""
    return encode_frame(Hello(VERSION, __version__))


def encode_frame(message: Hello | Order | Reply) -> bytes:
    """Length and body. Raises ProtocolError when the message is larger than a frame may be."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_NBYTES:
        raise ProtocolError(f"{type(message).__name__} of {len(body)} bytes exceeds a frame's {MAX_FRAME_NBYTES}")
    return _LENGTH.pack(len(body)) + body


def decode_request(body: bytes) -> Order:
    """The request in a frame. Raises ProtocolError: UnknownMessageError for a tag that is none of ours."""
    look = partial(refuse_unknown, known=_REQUEST_TAGS)
    order: Order = decoded(_request_decoder.decode, body, "malformed request", ProtocolError, look)
    return order


def decode_reply(body: bytes) -> Reply:
    """The reply in a frame. Raises ProtocolError: UnknownMessageError for a tag that is none of ours."""
    look = partial(refuse_unknown, known=_REPLY_TAGS)
    reply: Reply = decoded(_reply_decoder.decode, body, "malformed reply", ProtocolError, look)
    return reply


M = TypeVar("M", bound=Order | Reply)


class FrameReader(Generic[M]):
    """Messages out of a stream that comes in pieces; ``theirs`` and ``ours`` name the two sides in errors."""

    def __init__(self, decode: Callable[[bytes], M], *, theirs: str, ours: str) -> None:
        self._decode = decode
        self._theirs = theirs
        self._ours = Speaker(ours, VERSION, __version__)
        self._hello: Hello | None = None
        self._data = bytearray()

    def feed(self, data: bytes) -> list[M]:
        """Messages that data completes.

        Raises ProtocolError for a length that cannot be, for what is no message, and, naming both sides, for a message
        or a version that this side does not know.
        """
        self._data += data
        messages: list[M] = []
        while len(self._data) >= _LENGTH.size:
            (nbytes,) = _LENGTH.unpack_from(self._data)
            if nbytes > MAX_FRAME_NBYTES:
                raise ProtocolError(f"frame of {nbytes} bytes exceeds {MAX_FRAME_NBYTES}")
            stop = _LENGTH.size + nbytes
            if len(self._data) < stop:
                break
            body = bytes(self._data[_LENGTH.size : stop])
            del self._data[:stop]
            if self._hello is None:
                self._hello = self._greeted(body)
            else:
                messages.append(self._message(body, self._hello))
        return messages

    def _greeted(self, body: bytes) -> Hello:
        try:
            hello = _hello_decoder.decode(body)
        except MALFORMED as error:
            text = f"{self._theirs} does not begin with its version: {self._ours} cannot speak with it"
            raise ProtocolError(text, hint=_HINT) from error
        if hello.version != VERSION:
            raise other_version(Speaker(self._theirs, hello.version, hello.release), self._ours, _HINT)
        return hello

    def _message(self, body: bytes, hello: Hello) -> M:
        try:
            return self._decode(body)
        except UnknownMessageError as error:
            theirs = Speaker(self._theirs, hello.version, hello.release)
            raise not_known(error.kind, theirs, self._ours, _HINT) from error
