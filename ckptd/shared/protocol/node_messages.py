"""Every message between the daemons of a job, one MessagePack map each; docs/protocol.md explains them.

The names on the wire are the tags and the field names written here. A class may be renamed; a tag or a field may not,
unless ``packets.VERSION`` is raised. ``make golden-wire`` writes the golden bytes anew.
"""

from typing import Annotated

import msgspec

from ckptd.shared.base.decoding import MALFORMED
from ckptd.shared.base.errors import ProtocolError
from ckptd.shared.base.ids import (
    MAX_RANKS,
    NO_RUN,
    Incarnation,
    JobKey,
    Nbytes,
    NodeName,
    Rank,
    Run,
    RunId,
    SaveId,
    Session,
    Step,
    StoreChoice,
    WorldSize,
)
from ckptd.shared.base.wording import cut
from ckptd.shared.format.replica_shares import MAX_SHARES, Share, Where
from ckptd.shared.format.schemes import Scheme
from ckptd.shared.format.schemes.layout import MAX_SET_SIZE
from ckptd.shared.format.slot import Seal
from ckptd.shared.protocol.messages import Cadence, End, LateText, Progress, Seq, SlotName, Tier
from ckptd.shared.protocol.parity_types import Column, Member, Piece
from ckptd.shared.protocol.read_groups import MAX_EXCHANGES, ExchangeAddress
from ckptd.shared.protocol.topology import MAX_NODES, Peer, Topology
from ckptd.shared.protocol.versions import refuse_unknown, tag_in_map, tags

MAX_MESSAGE_NBYTES = (8 << 20) - 64
MAX_TEXT_CHARS = 1 << 16
MAX_VOID = 16  # sessions that are over, and of which a number may still come late

Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT_CHARS)]
Texts = Annotated[tuple[Text, ...], msgspec.Meta(max_length=MAX_RANKS)]
Code = Annotated[str, msgspec.Meta(max_length=64)]  # of ckptd.shared.base.errors
Host = Annotated[str, msgspec.Meta(max_length=255)]
Pid = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
AnySession = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._:-]{0,128}\Z")]  # empty: of none
AnySlot = Annotated[str, msgspec.Meta(pattern=r"^(r[0-9]{5,7}-[0-9]{6,12}\.slot)?\Z")]
AnyDirname = Annotated[str, msgspec.Meta(pattern=r"^(step-[0-9]{9,12}\.i[0-9]{4,8})?\Z")]
AnyStore = Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{32})?\Z")]
Ranks = Annotated[tuple[Rank, ...], msgspec.Meta(max_length=MAX_RANKS)]
Nodes = Annotated[tuple[NodeName, ...], msgspec.Meta(max_length=MAX_NODES)]
Peers = Annotated[tuple[Peer, ...], msgspec.Meta(max_length=MAX_NODES)]
Shares = Annotated[tuple[Share, ...], msgspec.Meta(max_length=MAX_SHARES)]


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened to a job."""

    job: JobKey


class NodeMessage(Event, frozen=True, kw_only=True):
    """Base of what the daemons of a job tell each other."""

    node: NodeName  # the sender


# --- what is reported to the coordinator


class RankFound(Event, frozen=True, kw_only=True, tag="rank-found"):
    """A live process holds the lock of a rank file of this job."""

    rank: Rank
    session: Session
    pid: Pid
    host: Host


class RankAttached(Event, frozen=True, kw_only=True, tag="rank-attached"):
    """A rank asks to belong to the job. ``incarnation`` 0 is a connect, else it comes back to a restarted daemon.

    ``store_id``: the store that it asks for, or, when it comes back, is saved to; empty: none in particular.
    """

    request: Seq
    session: Session
    rank: Rank
    world_size: WorldSize
    host: Host
    pid: Pid
    incarnation: Incarnation = 0
    run: RunId = NO_RUN  # drawn with that incarnation
    store_id: StoreChoice = ""
    takeover: bool = False
    cadence: Cadence = Cadence()
    topology: Topology | None = None  # None: this node alone


class RankGone(Event, frozen=True, kw_only=True, tag="rank-gone"):
    """The process behind a rank of a session ended without a word."""

    rank: Rank
    session: Session


class RankDetached(Event, frozen=True, kw_only=True, tag="rank-detached"):
    """The rank closed."""

    request: Seq = 0
    rank: Rank
    session: Session


class FromRank(Event, frozen=True, kw_only=True):
    """A word of an attached rank. ``session`` says of which one; empty when the daemon speaks for it."""

    rank: Rank
    session: AnySession = ""
    request: Seq = 0  # 0: nobody waits for an answer


class SegmentStaged(FromRank, frozen=True, kw_only=True, tag="segment-staged"):
    """A rank sealed its whole segment in a slot. The caller has checked the seal against this.

    ``late``: what verifies its late copies, for the status of its node; empty among nodes.
    """

    world_size: WorldSize
    slot: SlotName
    save: SaveId
    nbytes: Nbytes
    drain: bool = False
    shares: Shares = ()
    late: LateText = ""


class SaveSkipped(FromRank, frozen=True, kw_only=True, tag="save-skipped"):
    """A rank found no slot in time."""

    save: SaveId
    reason: Text


class DrainAsked(FromRank, frozen=True, kw_only=True, tag="drain-asked"):
    """Somebody wants the newest staged checkpoint durable now."""

    rank: Annotated[int, msgspec.Meta(ge=-1, lt=MAX_RANKS)] = -1


class PreemptAsked(FromRank, frozen=True, kw_only=True, tag="preempt-asked"):
    """Somebody is about to end the job, or a rank was past the step that was announced (``passed``): ``why``."""

    rank: Annotated[int, msgspec.Meta(ge=-1, lt=MAX_RANKS)] = -1
    why: Text
    passed: Step | None = None


class StepsRead(Event, frozen=True, kw_only=True, tag="steps-read"):
    """The highest step at which a rank of this node is, -1 if none has asked; no rank goes past it unheld.

    ``fixed``: a step that was announced to them before.
    """

    session: Session
    highest: Annotated[int, msgspec.Meta(ge=-1, lt=1 << 62)]
    fixed: Step | None = None


class SlotsAwaited(Event, frozen=True, kw_only=True, tag="slots-awaited"):
    """The ranks of this node that asked for slots and have none to write to yet: memory is allocated for them."""

    ranks: Ranks = ()


class LoadAsked(FromRank, frozen=True, kw_only=True, tag="load-asked"):
    """A rank wants to restore; step None is the newest. ``run``: of this run alone; None: of the job's own line."""

    step: Step | None = None
    run: RunId | None = None
    exchange: ExchangeAddress | None = None


class LoadReported(FromRank, frozen=True, kw_only=True, tag="load-reported"):
    """A rank read, or could not read, what it was pointed to."""

    save: SaveId
    tier: Tier
    problem: Text = ""
    fatal: bool = False  # no other checkpoint would do better
    reshape: bool = False  # nothing is wrong with it, but this rank needs other ranks' images too


class SegmentReleased(Event, frozen=True, kw_only=True, tag="segment-released"):
    """A slot of this node no longer holds the save."""

    rank: Rank
    save: SaveId


class SegmentFetched(Event, frozen=True, kw_only=True, tag="segment-fetched"):
    """A whole segment was copied or rebuilt into a slot of this node, checked and sealed; or ``problem``."""

    rank: Rank
    save: SaveId
    tier: Tier
    slot: AnySlot = ""
    capacity: Nbytes = 0
    seal: Seal | None = None  # None: see problem; not reported
    problem: Text = ""
    shares: Shares = ()


class Encoded(Event, frozen=True, kw_only=True, tag="encoded"):
    """This node's parity of the save is sealed, or ``problem`` says why not (nothing of it is left then)."""

    save: SaveId
    epoch: Incarnation
    problem: Text = ""


class DrainMoved(Event, frozen=True, kw_only=True, tag="drain-moved"):
    """So many bytes of this node's share are written. by_rank: of whose images; said on this node only."""

    save: SaveId
    nbytes_done: Nbytes
    by_rank: Annotated[tuple[tuple[Rank, Nbytes], ...], msgspec.Meta(max_length=MAX_RANKS)] = ()


class Drained(Event, frozen=True, kw_only=True, tag="drained"):
    """This node's files are written and synced, or ``problem`` says why not."""

    save: SaveId
    problem: Text = ""
    committed: bool = False  # nothing was written: the save was found under its final name


class VoteWritten(Event, frozen=True, kw_only=True, tag="vote-written"):
    """This node's vote is synced, or ``problem`` says why not."""

    save: SaveId
    problem: Text = ""


class HeldSegment(msgspec.Struct, frozen=True, array_like=True):
    """One segment in a slot of a node."""

    save: SaveId
    rank: Rank
    world_size: WorldSize
    nbytes: Nbytes
    shares: Shares = ()


class HeldPiece(msgspec.Struct, frozen=True, array_like=True):
    """One parity piece in the arena of a node: whose ranks' segments it protects, by member."""

    save: SaveId
    epoch: Incarnation
    scheme: Scheme
    index: Member
    ranks: Annotated[tuple[Ranks, ...], msgspec.Meta(max_length=MAX_SET_SIZE)]
    members: Annotated[tuple[NodeName, ...], msgspec.Meta(max_length=MAX_SET_SIZE)] = ()


class NodeHas(Event, frozen=True, kw_only=True, tag="node-has"):
    """All that lies and lives at the node, in place of what was known of it. ``incarnation``: the largest it knows of.

    ``former``: nodes that the job ran on before this session, as far as the node knows.
    """

    incarnation: Incarnation
    run: RunId = NO_RUN  # drawn with that incarnation
    segments: Annotated[tuple[HeldSegment, ...], msgspec.Meta(max_length=MAX_RANKS)] = ()
    pieces: Annotated[tuple[HeldPiece, ...], msgspec.Meta(max_length=MAX_RANKS)] = ()
    former: Nodes = ()
    session: AnySession = ""  # the one that was opened here last
    # Rank and session of each process.
    live: Annotated[tuple[tuple[Rank, Session], ...], msgspec.Meta(max_length=MAX_RANKS)] = ()
    resumed: SaveId | None = None  # what a load agreed on, in that incarnation
    epoch: Incarnation = 0
    since: Incarnation = 0  # the epoch in which the job first came to this arena: older parity was never here


class Knocked(Event, frozen=True, kw_only=True, tag="knocked"):
    """A session stands at the door here. Before, the job ran on these nodes too, which its ranks no longer use."""

    session: Session
    outside: Peers = ()
    incarnation: Incarnation = 0  # the largest that the node knows: the next one is above it, whatever the store says
    store_id: AnyStore = ""  # to which the job was saved last, as the node knows


class Visited(Event, frozen=True, kw_only=True, tag="visited"):
    """A node that the session does not use has told who lives there. ``incarnation``: the largest it knows of."""

    session: Session
    incarnation: Incarnation = 0
    store_id: AnyStore = ""  # to which the job was saved last, as the node knows


# All that a peer can say of itself: a Report of anything else is refused.
Fact = (
    RankFound | RankAttached | RankGone | RankDetached | SegmentStaged | SaveSkipped | DrainAsked | PreemptAsked
    | StepsRead | SlotsAwaited | LoadAsked | LoadReported | SegmentReleased | SegmentFetched | Encoded | DrainMoved
    | Drained | VoteWritten | NodeHas | Knocked | Visited
)  # fmt: skip


class Report(NodeMessage, frozen=True, kw_only=True, tag="report"):
    """To the coordinator, or to one that may become it: this happened at my node."""

    event: Fact


# --- orders of the coordinator


class SessionOpened(NodeMessage, frozen=True, kw_only=True, tag="session-opened"):
    """The session is the job now, under this incarnation; ``ranks`` wait for the news at the receiver.

    The sender coordinates from now on. ``epoch``: when this topology began.
    """

    session: Session
    incarnation: Incarnation
    run: RunId = NO_RUN  # drawn with that incarnation
    store_id: AnyStore = ""  # to which the session is saved; empty: it has not answered yet
    ranks: Ranks
    known: Annotated[tuple[Progress, ...], msgspec.Meta(max_length=MAX_RANKS)] = ()
    warnings: Texts = ()
    topology: Topology | None = None
    epoch: Incarnation = 0
    outside: Peers = ()  # nodes that the job ran on before, and that may hold something of it


class SessionRefused(NodeMessage, frozen=True, kw_only=True, tag="session-refused"):
    """These ranks may not join."""

    session: Session
    ranks: Ranks
    code: Code
    message: Text
    hint: Text = ""


class SessionWaits(NodeMessage, frozen=True, kw_only=True, tag="session-waits"):
    """The session stands at the door, or loads: for whom it waits, for one of its ranks at the receiver."""

    session: Session
    rank: Rank
    message: Text
    hint: Text = ""


class SaveStaged(NodeMessage, frozen=True, kw_only=True, tag="save-staged"):
    """Every rank's segment is sealed."""

    save: SaveId


class SaveWaits(NodeMessage, frozen=True, kw_only=True, tag="save-waits"):
    """Some ranks have delivered the save and others have not for too long: which, why, and what to type.

    ``idle``: their nodes answer, and they do not save: who waits for a slot that this save has waits in vain.
    """

    save: SaveId
    reason: Text
    idle: bool = False


class EncodeOrdered(NodeMessage, frozen=True, kw_only=True, tag="encode-ordered"):
    """Make parity of the save. What was ordered before and is not protected yet is given up."""

    save: SaveId
    epoch: Incarnation


class SaveProtected(NodeMessage, frozen=True, kw_only=True, tag="save-protected"):
    """Every set has encoded the save."""

    save: SaveId
    epoch: Incarnation


class Outlived(NodeMessage, frozen=True, kw_only=True, tag="outlived"):
    """What nothing depends on any more: give it back.

    ``pieces``: parity (save, epoch) that protects nothing that another checkpoint does not protect better. ``saves``:
    too much of them is lost; ``newest`` is the one that the job went on from.
    """

    pieces: Annotated[tuple[tuple[SaveId, Incarnation], ...], msgspec.Meta(max_length=MAX_RANKS)] = ()
    saves: Annotated[tuple[SaveId, ...], msgspec.Meta(max_length=MAX_RANKS)] = ()
    newest: SaveId | None = None


class SaveEnded(NodeMessage, frozen=True, kw_only=True, tag="save-ended"):
    """The save's end is decided."""

    save: SaveId
    end: End
    reason: Text = ""
    apart: bool = False  # the ranks' shares were no whole: each is to save all of its own
    where: Where | None = None  # what they differ in, as far as that is known


class DrainOrdered(NodeMessage, frozen=True, kw_only=True, tag="drain-ordered"):
    """Write the segments of these ranks to the store, then vote.

    ``void``: for the commit, should the receiver have to make it: sessions that are over and take nothing over.
    """

    store_id: AnyStore  # no other store at the path is written to
    save: SaveId
    ranks: Ranks
    void: Annotated[tuple[Session, ...], msgspec.Meta(max_length=MAX_VOID)] = ()


class DrainDropped(NodeMessage, frozen=True, kw_only=True, tag="drain-dropped"):
    """The drain of the save is over, well or not: its slots need no more protection for it."""

    save: SaveId


class PreemptOrdered(NodeMessage, frozen=True, kw_only=True, tag="preempt-ordered"):
    """The ranks of this session save at this step; None: hold them, and say at which steps they are."""

    session: Session
    step: Step | None = None


class FetchOrdered(NodeMessage, frozen=True, kw_only=True, tag="fetch-ordered"):
    """Have the segment of this rank in a slot of the receiver, from ``holder`` or (tier rebuilt) from parity.

    ``homes``: where each segment of the set lies (rank, node); ``pieces``: where each piece lies (member, node).
    """

    rank: Rank
    save: SaveId
    tier: Tier
    holder: NodeName  # of the segment, or of a piece
    epoch: Incarnation = 0
    homes: Annotated[tuple[tuple[Rank, NodeName], ...], msgspec.Meta(max_length=MAX_RANKS)] = ()
    pieces: Annotated[tuple[tuple[Member, NodeName], ...], msgspec.Meta(max_length=MAX_SET_SIZE)] = ()


class LoadOrdered(NodeMessage, frozen=True, kw_only=True, tag="load-ordered"):
    """Where each rank reads from. ``save`` None: nothing to restore. ``agreed``: all have read it."""

    incarnation: Incarnation
    run: RunId = NO_RUN  # drawn with that incarnation
    save: SaveId | None = None
    # By rank: all but pfs read a slot of their node.
    tiers: Annotated[tuple[Tier, ...], msgspec.Meta(max_length=MAX_RANKS)] = ()
    whole: bool = False  # all ranks' slots lie at each node, and each rank reads what it needs of them
    dirname: AnyDirname = ""
    # By rank, of the nodes that are sent to the store.
    exchanges: Annotated[tuple[tuple[Rank, ExchangeAddress], ...], msgspec.Meta(max_length=MAX_EXCHANGES)] = ()
    agreed: bool = False
    notes: Texts = ()


class LoadRefused(NodeMessage, frozen=True, kw_only=True, tag="load-refused"):
    """The load failed, on all ranks or on one."""

    code: Code
    message: Text
    hint: Text = ""
    rank: Rank | None = None  # None: on all


class ForeignRuns(NodeMessage, frozen=True, kw_only=True, tag="foreign-runs"):
    """All runs of which something lies in arenas and that are not the job's: it is set apart.

    What was named before and is not any more is the job's again. Answered by NodeHas.
    """

    runs: Annotated[tuple[Run, ...], msgspec.Meta(max_length=MAX_RANKS)] = ()
    disputed: Annotated[tuple[Run, ...], msgspec.Meta(max_length=MAX_RANKS)] = ()  # of these; never given up with time


class JobReleased(NodeMessage, frozen=True, kw_only=True, tag="job-released"):
    """Nothing of the job is needed in memory any more."""


# --- from node to node, past the coordinator


class CommitFinished(NodeMessage, frozen=True, kw_only=True, tag="commit-finished"):
    """The coordinator does not answer; the sender has made the commit in its place."""

    save: SaveId


class Introduced(NodeMessage, frozen=True, kw_only=True, tag="introduced"):
    """To a node that a new session does not use: these daemons are the job's now; tell its coordinator who lives."""

    session: Session
    topology: Topology


class ColumnOffered(NodeMessage, frozen=True, kw_only=True, tag="column-offered"):
    """To the members of the sender's set: what it contributes to their parity."""

    save: SaveId
    epoch: Incarnation
    column: Column


class SealAsked(NodeMessage, frozen=True, kw_only=True, tag="seal-asked"):
    """The seal of a segment that lies at the receiver."""

    save: SaveId
    rank: Rank


class SealTold(NodeMessage, frozen=True, kw_only=True, tag="seal-told"):
    """None: it does not lie here, or has no digests yet."""

    save: SaveId
    rank: Rank
    seal: Seal | None


class PieceAsked(NodeMessage, frozen=True, kw_only=True, tag="piece-asked"):
    """The description of a piece that lies at the receiver."""

    save: SaveId
    epoch: Incarnation


class PieceTold(NodeMessage, frozen=True, kw_only=True, tag="piece-told"):
    """None: it does not lie here."""

    save: SaveId
    epoch: Incarnation
    piece: Piece | None


Message = (
    Report | SessionOpened | SessionRefused | SessionWaits | SaveStaged | SaveWaits | EncodeOrdered | SaveProtected
    | Outlived | SaveEnded | DrainOrdered | DrainDropped | PreemptOrdered | FetchOrdered | LoadOrdered | LoadRefused
    | ForeignRuns | JobReleased | CommitFinished | Introduced | ColumnOffered | SealAsked | SealTold | PieceAsked
    | PieceTold
)  # fmt: skip

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
    try:
        return _decoder.decode(raw)
    except MALFORMED as error:
        refuse_unknown(raw, _TAGS)
        _refuse_unknown_fact(raw)
        raise ProtocolError(f"malformed message between nodes: {cut(error)}") from error


def _refuse_unknown_fact(raw: bytes) -> None:
    try:
        tag, event = tag_in_map(raw)
    except MALFORMED:
        return
    if tag == Report.__struct_config__.tag and event:
        refuse_unknown(bytes(event), _FACT_TAGS)
