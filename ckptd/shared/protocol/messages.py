"""Every message between a rank and its node's daemon, one ZeroMQ frame of msgpack each; docs/protocol.md explains them.

A request carries ``seq``; the reply repeats it as ``reply_to``. Messages with no ``reply_to`` are pushed by the daemon.
"""

import enum
from functools import partial
from typing import Annotated, Self

import msgspec

from ckptd import __version__
from ckptd.shared.base.decoding import decoded
from ckptd.shared.base.errors import CkptdError, ProtocolError
from ckptd.shared.base.ids import (
    MAX_RANKS,
    NO_RUN,
    Incarnation,
    JobKey,
    Nbytes,
    Rank,
    RunId,
    SaveId,
    Session,
    Step,
    StoreChoice,
    WorldSize,
)
from ckptd.shared.format.replica_attestations import Where
from ckptd.shared.format.schemes import Scheme
from ckptd.shared.protocol.publication import Draft, Publication
from ckptd.shared.protocol.read_tree import MAX_READERS, ExchangeAddress
from ckptd.shared.protocol.segments import SegmentHere, SegmentLacks, Wanted
from ckptd.shared.protocol.status import CheckpointStatus, Status
from ckptd.shared.protocol.topology import Peer, Rendezvous
from ckptd.shared.protocol.versions import Release, refuse_foreign, tags

VERSION = 8
MAX_MESSAGE_NBYTES = 1 << 20
MAX_CAPACITY = 1 << 46

SlotName = Annotated[str, msgspec.Meta(pattern=r"^r[0-9]{5,7}-[0-9]{6,12}\.slot\Z")]
Seq = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
Text = Annotated[str, msgspec.Meta(max_length=4096)]
MAX_LATE_CHARS = 512
LateText = Annotated[str, msgspec.Meta(max_length=MAX_LATE_CHARS)]
MAX_S = 1e9  # of a duration: 31 years
StallS = Annotated[float, msgspec.Meta(ge=0, le=MAX_S)]
ReadName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._:-]{1,64}\Z")]


class Milestone(enum.StrEnum):
    """How safe a checkpoint is; each survives what the one before does, and more."""

    STAGED = "staged"
    PROTECTED = "protected"
    DURABLE = "durable"


class End(enum.StrEnum):
    """How a save's life ends."""

    DURABLE = "durable"
    KEPT = "kept"  # staged and not due for a drain
    SUPERSEDED = "superseded"  # a newer one was staged before its drain began
    SKIPPED = "skipped"  # no slot was free in time
    ABANDONED = "abandoned"  # some rank never delivered
    FAILED = "failed"


class Tier(enum.StrEnum):
    """Where a restore's bytes came from."""

    ARENA = "arena"
    PEER = "peer"
    REBUILT = "rebuilt"
    PFS = "pfs"


class Cadence(msgspec.Struct, frozen=True, array_like=True):
    """Which staged checkpoints are drained: one every so many steps, or so many seconds.

    (1, 0) is each, (0, 0) is as many as the store keeps up with.
    """

    steps: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)] = 1
    seconds: Annotated[float, msgspec.Meta(ge=0)] = 0.0


class _Signed(msgspec.Struct, frozen=True, kw_only=True):
    version: int = VERSION  # of this protocol, as its sender has it
    release: Release = __version__


class _Request(_Signed, frozen=True, tag=True, kw_only=True):
    seq: Seq


class Attach(_Request, frozen=True, kw_only=True):
    """A rank presents itself.

    ``incarnation`` and ``run``: 0 and none at connect, its own when it comes back to a restarted daemon. ``store_id``:
    the store that it asks for, or, when it comes back, is saved to; empty: none in particular.
    """

    job: JobKey
    session: Session
    rank: Rank
    world_size: WorldSize
    host: Annotated[str, msgspec.Meta(max_length=255)]
    pid: Annotated[int, msgspec.Meta(ge=1)]
    incarnation: Incarnation = 0
    run: RunId = NO_RUN
    store_id: StoreChoice = ""
    takeover: bool = False
    cadence: Cadence = Cadence()
    rendezvous: Rendezvous | None = None  # where the ranks' daemons meet; None: all ranks are on this node


class AskNode(_Request, frozen=True, kw_only=True):
    """How other daemons reach this one; needs no attachment."""


class AskSlots(_Request, frozen=True, kw_only=True):
    """Have slots of at least capacity bytes ready for this rank. Slots granted before are given back."""

    capacity: Annotated[int, msgspec.Meta(ge=1, le=MAX_CAPACITY)]


class HandOver(_Request, frozen=True, kw_only=True):
    """The descriptor: this slot holds the whole segment of this save, sealed. From now on the daemon owns its bytes.

    ``publication``: where this user wants a trainer's files once they are committed; only this message says it.
    ``late``: what verifies copies that run while training continues, or why there are none; empty: nothing is attached.
    ``stall_s``: that the save has held up its caller so far; ``late_s``: that it did not. ``late_nbytes``: copied so.
    """

    slot: SlotName
    save: SaveId
    drain: bool = False
    publication: Publication | None = None
    late: LateText = ""
    stall_s: StallS = 0.0
    late_nbytes: Nbytes = 0
    late_s: StallS = 0.0


class Skip(_Request, frozen=True, kw_only=True):
    """This rank found no slot in time; the save cannot complete."""

    save: SaveId
    reason: Text


class AskDrain(_Request, frozen=True, kw_only=True):
    """Make the newest staged checkpoint of the job (None: the sender's own) durable now; preempt: after a last save."""

    job: JobKey | None = None
    preempt: bool = False


class AskPreempt(_Request, frozen=True, kw_only=True):
    """The job is about to be ended: have the ranks that ask save at one step, which the coordinator fixes.

    ``passed``: this rank was past the step that was announced, so that no save of all ranks is of that step; ``why``
    then says so, else which signal or command is about to end it.
    """

    why: Text
    passed: Step | None = None


class AskPublish(_Request, frozen=True, kw_only=True):
    """A state's checkpoint is wanted at the place of a draft. ``wait``: if it is durable it is there with the answer.

    Without it the answer is that this is on record; what fails later is a note in the status.
    """

    save: SaveId
    draft: Draft
    wait: bool = True


class AskLoad(_Request, frozen=True, kw_only=True):
    """All ranks of the job ask together; step None is the newest.

    ``run``: of this run alone, though another one may have its number; None: of the job's own line of runs.
    """

    step: Step | None = None
    run: RunId | None = None


class AskPlace(_Request, frozen=True, kw_only=True):
    """This node's place among the nodes that read one checkpoint on the store together, and its parent's address.

    ``read`` names the read, the same on all nodes: ``LoadFrom.read``, or, of all nodes of the job, another text.
    ``exchange``: where this rank serves other nodes; None: it does not take part, and is answered at once.
    """

    read: ReadName
    exchange: ExchangeAddress | None = None


class ReportLoad(_Request, frozen=True, kw_only=True):
    """What became of the bytes that a LoadFrom pointed to: problem is empty when all were read and matched."""

    save: SaveId
    tier: Tier
    problem: Text = ""
    fatal: bool = False  # the state does not fit: no other checkpoint is to be tried
    reshape: bool = False  # the rank needs other ranks' images too
    lacks: Annotated[list[Rank], msgspec.Meta(max_length=MAX_RANKS)] = []  # whose segments did not come, or are damaged


class AskSegments(_Request, frozen=True, kw_only=True):
    """Have segments of a save that is being loaded in this node's memory, as far as this rank wants them.

    ``wanted``: of each its tail, and these ranges of its image. A segment that lies on this node is there as a whole.
    """

    save: SaveId
    wanted: Annotated[list[Wanted], msgspec.Meta(max_length=MAX_RANKS)]


class DropSegments(_Request, frozen=True, kw_only=True):
    """This rank has read what it had of other nodes' segments."""

    save: SaveId


class AskSteps(_Request, frozen=True, kw_only=True):
    """List the checkpoints that could be restored."""


class AskStatus(_Request, frozen=True, kw_only=True):
    """The whole picture; needs no attachment. ``nodes``: ask the daemons of each job's other nodes, too."""

    nodes: bool = False


class AskStop(_Request, frozen=True, kw_only=True):
    """End the daemon as SIGTERM does; needs no attachment. ``wait``: answer only when it ends."""

    wait: bool = False


class AskForget(_Request, frozen=True, kw_only=True):
    """Give up all that a job has in this arena; needs no attachment. ``force``: also what is nowhere else."""

    job: JobKey
    force: bool = False


class Detach(_Request, frozen=True, kw_only=True):
    """This rank closes; its memory is freed once what it staged is durable. failed: an exception ended its training."""

    failed: bool = False


Request = (
    Attach | AskNode | AskSlots | HandOver | Skip | AskDrain | AskPreempt | AskPublish | AskLoad | ReportLoad | AskPlace
    | AskSegments | DropSegments | AskSteps | AskStatus | AskStop | AskForget | Detach
)  # fmt: skip


class _Push(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    pass


class _Reply(_Signed, frozen=True, tag=True, kw_only=True):
    reply_to: Seq


class Done(_Reply, frozen=True, kw_only=True):
    """The request was taken over."""


class Refused(_Reply, frozen=True, kw_only=True):
    """The request was not. ``code`` is that of the error to raise."""

    code: str
    message: str
    hint: str = ""

    @classmethod
    def of(cls, request: _Request, error: Exception, code: str = CkptdError.code) -> Self:
        """What says of the error. code: of one that is none of ckptd's own."""
        if isinstance(error, CkptdError):
            return cls(reply_to=request.seq, code=error.code, message=error.message, hint=error.hint)
        return cls(reply_to=request.seq, code=code, message=str(error))


class Attached(_Reply, frozen=True, kw_only=True):
    """The rank belongs to this incarnation now; ``known`` is what became of earlier saves of it."""

    node: str
    incarnation: Incarnation
    run: RunId
    store_id: str = ""  # of the store that the job is saved to; empty: it has not answered yet
    client_started: bool = False  # nobody but a client starts this daemon again
    scheme: Scheme = Scheme.NONE  # in force for the set of this node; none: no save becomes protected by parity
    ranks: list[int] = []  # of the session, on this node
    nodes: int = 0  # of the session; 0: not known yet
    known: list["Progress"] = []
    warnings: list[str] = []


class NodeInfo(_Reply, frozen=True, kw_only=True):
    """This daemon as its peers reach it, and what it is configured to do unless connect says otherwise."""

    peer: Peer
    scheme: Scheme = Scheme.NONE
    set_size: int = 8
    balance: bool = True  # whether replicas each save a slice of what they all hold
    store: str = ""  # for jobs that name none
    integrity: str = "xxh3"  # or "keyed:" and the id of the key


class SlotsComing(_Reply, frozen=True, kw_only=True):
    """So many slots will be granted without further ado; the others hold checkpoints and follow as they are freed."""

    count: int


class SlotGranted(_Push, frozen=True, kw_only=True):
    """The rank may map and write this slot."""

    slot: SlotName
    capacity: Nbytes


class SlotsRefused(_Push, frozen=True, kw_only=True):
    """The slots asked for cannot be had, or not all of them."""

    code: str
    message: str
    hint: str = ""


class Notice(_Push, frozen=True, kw_only=True):
    """Something that a person should know now, and what to type: for whom a session waits, in which call."""

    message: str
    hint: str = ""
    call: str = "connect"


class Progress(_Push, frozen=True, kw_only=True, tag="Progress"):
    """A save reached a milestone, or its end. ``notice``: what the user should know, to be logged.

    ``stuck``: why no save becomes durable, where the notice is about that.
    """

    save: SaveId
    milestone: Milestone | None = None
    end: End | None = None
    reason: Annotated[str, msgspec.Meta(max_length=1 << 16)] = ""
    mismatched: bool = False  # the ranks' slices did not make a whole: from now on each is to save all of its own
    where: Where | None = None  # what they differ in, as far as that is known
    idle: bool = False  # the save waits for ranks whose nodes answer, and which do not save
    notice: Annotated[str, msgspec.Meta(max_length=1 << 16)] = ""
    stuck: Annotated[str, msgspec.Meta(max_length=1 << 16)] = ""


class LoadFrom(_Reply, frozen=True, kw_only=True):
    """Where to read. ``save`` None: there is nothing to restore, or (with ``agreed``) every rank has read this save."""

    incarnation: Incarnation
    run: RunId
    save: SaveId | None = None
    tier: Tier = Tier.ARENA
    slot: str = ""  # in the arena
    whole: bool = False  # the slots of all ranks that saved it lie beside that one, which may be another rank's
    saved_by: int = 0  # so many ranks, whose segments lie in the memory of nodes: AskSegments; 0: read elsewhere
    path: str = ""  # absolute, on the PFS
    readers: list[int] = []  # the ranks of this node that are sent there, when this one is
    read: str = ""  # names this read, on the node and to ``AskPlace``; empty: this rank is not sent there
    shared: bool = False  # whether other nodes are sent there too
    agreed: bool = False
    notes: list[str] = []


class PlaceKnown(_Reply, frozen=True, kw_only=True):
    """Answer to AskPlace: the number of this node among ``count``. ``parent``: None for the first, or if it is silent.

    ``count`` 0: no other node reads.
    """

    number: Annotated[int, msgspec.Meta(ge=0, lt=MAX_READERS)] = 0
    count: Annotated[int, msgspec.Meta(ge=0, le=MAX_READERS)] = 0
    parent: ExchangeAddress | None = None


class SegmentsHere(_Reply, frozen=True, kw_only=True):
    """Answer to AskSegments. ``refused``: why this node itself cannot have them; then no other is at fault."""

    files: list[SegmentHere] = []
    lacks: list[SegmentLacks] = []
    refused: Text = ""


class Steps(_Reply, frozen=True, kw_only=True):
    """Restorable checkpoints, newest first."""

    checkpoints: list[CheckpointStatus]


class StatusReply(_Reply, frozen=True, kw_only=True):
    """Answer to AskStatus and AskStop."""

    status: Status


class Forgotten(_Reply, frozen=True, kw_only=True):
    """The job's slots are unlinked, and their memory is given back."""

    slots: int
    nbytes: Nbytes


Reply = (
    Done | Refused | Attached | NodeInfo | SlotGranted | SlotsRefused | Progress | Notice | LoadFrom | PlaceKnown
    | SegmentsHere | Steps | SlotsComing | StatusReply | Forgotten
)  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_request_decoder: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_reply_decoder: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
_REQUESTS, _REPLIES = tags(Request), tags(Reply)


def encode(message: Request | Reply) -> bytes:
    """One frame."""
    return _encoder.encode(message)


def decode_request(frame: bytes) -> Request:
    """The request in a frame. Raises ProtocolError for anything else, which names both sides for an unknown tag."""
    if len(frame) > MAX_MESSAGE_NBYTES:
        raise ProtocolError(f"message of {len(frame)} bytes exceeds {MAX_MESSAGE_NBYTES}")
    look = partial(refuse_foreign, known=_REQUESTS, theirs="the client", version=VERSION, ours="this daemon")
    return decoded(_request_decoder.decode, frame, "malformed request", ProtocolError, look)


def decode_reply(frame: bytes) -> Reply:
    """The reply or push in a frame. Raises ProtocolError for anything else, as decode_request."""
    look = partial(refuse_foreign, known=_REPLIES, theirs="the daemon", version=VERSION, ours="this client")
    return decoded(_reply_decoder.decode, frame, "malformed reply", ProtocolError, look)
