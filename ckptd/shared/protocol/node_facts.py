"""What a daemon reports to the one that coordinates the job, and the fields of all messages between daemons.

A fact travels in a ``Report``, or happens on the coordinator's own node. The core knows it as an event.
"""

import enum
from typing import Annotated

import msgspec

from ckptd.shared.base.ids import (
    MAX_RANKS,
    NO_RUN,
    Incarnation,
    JobKey,
    Nbytes,
    NodeName,
    Rank,
    RunId,
    SaveId,
    Session,
    Step,
    StoreChoice,
    WorldSize,
)
from ckptd.shared.format.replica_attestations import MAX_ATTESTATIONS, Attestation
from ckptd.shared.format.schemes import Scheme
from ckptd.shared.format.schemes.layout import MAX_SET_SIZE
from ckptd.shared.format.slot import Seal
from ckptd.shared.protocol.messages import Cadence, Seq, StallS, Tier
from ckptd.shared.protocol.parity_types import Member
from ckptd.shared.protocol.rank_sets import RankSet, check_total
from ckptd.shared.protocol.topology import MAX_NODES, Peer, SetSize, TopologyDigest

MAX_TEXT_CHARS = 1 << 16
MAX_SILENT = 64  # nodes that a report names
MAX_FORMER = 16  # earlier topologies
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
Attempt = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
OrderNumber = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Ranks = Annotated[tuple[Rank, ...], msgspec.Meta(max_length=MAX_RANKS)]
Nodes = Annotated[tuple[NodeName, ...], msgspec.Meta(max_length=MAX_NODES)]
Attestations = Annotated[tuple[Attestation, ...], msgspec.Meta(max_length=MAX_ATTESTATIONS)]


class Event(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Something that happened to a job."""

    job: JobKey


class NodeMessage(Event, frozen=True, kw_only=True):
    """Base of what the daemons of a job tell each other."""

    node: NodeName  # the sender


class Living(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A live process that holds the lock of a rank file of the job."""

    rank: Rank
    session: Session
    pid: Pid
    host: Host  # as the rank sees it


class Arrival(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A rank that waits to be let in. ``incarnation`` 0 is a connect, else it comes back to a restarted daemon."""

    rank: Rank
    world_size: WorldSize
    incarnation: Incarnation = 0
    run: RunId = NO_RUN  # drawn with that incarnation


class Former(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where the job ran before, as far as a node knows: a topology, and which of its nodes do not answer there."""

    digest: TopologyDigest = b""  # empty: of none
    silent: Annotated[tuple[NodeName, ...], msgspec.Meta(max_length=MAX_SILENT)] = ()  # the first of them


class NodeAttached(Event, frozen=True, kw_only=True, tag="node-attached"):
    """Which ranks of a session are at the node, in place of what it reported of that session before.

    One message for all of them: when one comes, and whenever the link to the coordinator comes up.
    """

    session: Session
    peer: Peer  # the node's daemon
    waiting: Annotated[tuple[Arrival, ...], msgspec.Meta(max_length=MAX_RANKS)] = ()
    members: Ranks = ()  # let in before, under this incarnation
    incarnation: Incarnation = 0
    run: RunId = NO_RUN
    world_size: WorldSize = 1  # as the members have it
    store_id: StoreChoice = ""  # the store that the ranks ask for, or, when they come back, are saved to
    takeover: bool = False
    cadence: Cadence = Cadence()
    alone: bool = False  # all ranks are on this node, the ones that have not come too
    scheme: Scheme = Scheme.NONE
    set_size: SetSize = 8
    asked: bool = False  # as in Rendezvous
    living: Annotated[tuple[Living, ...], msgspec.Meta(max_length=MAX_RANKS)] = ()  # all at the node, of any session
    digest: TopologyDigest = b""  # of the session's topology, if the node has it
    former: Former = Former()  # of the session before
    known: Incarnation = 0  # the largest that the node knows: the next one is above it, whatever the store says
    saved_to: AnyStore = ""  # the store to which the job was saved last, as the node knows


class RanksFound(Event, frozen=True, kw_only=True, tag="ranks-found"):
    """All processes of the job that live at the node, in place of those that it reported before."""

    living: Annotated[tuple[Living, ...], msgspec.Meta(max_length=MAX_RANKS)] = ()


class RanksGone(Event, frozen=True, kw_only=True, tag="ranks-gone"):
    """The processes behind these ranks of a session ended without a word."""

    session: Session
    ranks: Ranks


class RankDetached(Event, frozen=True, kw_only=True, tag="rank-detached"):
    """The rank closed. failed: an exception ended its training."""

    request: Seq = 0
    rank: Rank
    session: Session
    failed: bool = False


class FromRank(Event, frozen=True, kw_only=True):
    """A word of an attached rank. ``session`` says of which one; empty when the daemon speaks for it."""

    rank: Rank
    session: AnySession = ""
    request: Seq = 0  # 0: nobody waits for an answer


def _check_rank(rank: int, world_size: int) -> None:
    if rank >= world_size:
        raise ValueError(f"rank {rank} of {world_size}")


class StagedSegment(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The segment of one rank, sealed in a slot of the sender's node."""

    rank: Rank
    nbytes: Nbytes
    attestations: Attestations = ()


class SegmentsStaged(Event, frozen=True, kw_only=True, tag="segments-staged"):
    """Ranks of the sender's node sealed their whole segments of a save. One message for ranks that save together.

    ``session``: of these ranks; empty: a daemon found the segments when it started. ``stall_s``: the longest that one
    of them was held up, ``stalls_s``: all of them. ``late_s``: the longest time that one's training went on before.
    """

    session: AnySession = ""
    save: SaveId
    world_size: WorldSize
    segments: Annotated[tuple[StagedSegment, ...], msgspec.Meta(max_length=MAX_RANKS)]
    drain: bool = False  # one of the ranks wants it durable
    stall_s: StallS = 0.0
    stalls_s: StallS = 0.0
    late_nbytes: Nbytes = 0  # copied while their training went on
    late_s: StallS = 0.0

    def __post_init__(self) -> None:
        """Raises ValueError when a rank is none of the save's."""
        for segment in self.segments:
            _check_rank(segment.rank, self.world_size)


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


class LoadsAsked(FromRank, frozen=True, kw_only=True, tag="loads-asked"):
    """Ranks of the sender's node want to restore, ``rank`` and these; step None is the newest.

    ``run``: of this run alone; None: of the job's own line. ``again``: they asked before, and wait.
    """

    others: Ranks = ()
    step: Step | None = None
    run: RunId | None = None
    again: bool = False

    @property
    def ranks(self) -> tuple[Rank, ...]:
        """All of them."""
        return (self.rank, *self.others)


class Cause(enum.StrEnum):
    """Why a rank could not load what it was sent to."""

    DAMAGED = "damaged"  # another copy, or an older checkpoint, may do
    MISFIT = "misfit"  # no other checkpoint would do better
    RESHAPE = "reshape"  # nothing is wrong with it, but this rank needs other ranks' images too


class LoadFailure(msgspec.Struct, frozen=True, array_like=True):
    """Why a rank could not read what it was sent to."""

    rank: Rank
    tier: Tier
    cause: Cause
    problem: Text
    lacks: Ranks = ()  # whose segments did not come to it, or are damaged


class LoadsReported(FromRank, frozen=True, kw_only=True, tag="loads-reported"):
    """Ranks of the sender's node, ``rank`` and these, read what they were sent to, but for the failures."""

    others: Ranks = ()
    save: SaveId
    failures: Annotated[tuple[LoadFailure, ...], msgspec.Meta(max_length=MAX_RANKS)] = ()

    @property
    def ranks(self) -> tuple[Rank, ...]:
        """All of them."""
        return (self.rank, *self.others)


class SegmentsReleased(Event, frozen=True, kw_only=True, tag="segments-released"):
    """Slots of the sender's node no longer hold the segments of these ranks."""

    save: SaveId
    ranks: Ranks


class SegmentFetched(Event, frozen=True, kw_only=True, tag="segment-fetched"):
    """A whole segment was copied or rebuilt into a slot of this node, checked and sealed; or ``problem``.

    ``nbytes``, ``attestations``: of the seal, which itself is not reported.
    """

    rank: Rank
    save: SaveId
    tier: Tier
    slot: AnySlot = ""
    capacity: Nbytes = 0
    seal: Seal | None = None  # None: see problem; not reported
    problem: Text = ""
    nbytes: Nbytes = 0
    attestations: Attestations = ()


class GatherFailure(msgspec.Struct, frozen=True, array_like=True):
    """Why the segments of these ranks did not come to the sender."""

    ranks: RankSet
    problem: Text


class SegmentsGathered(Event, frozen=True, kw_only=True, tag="segments-gathered"):
    """The sender has all segments that its ranks need in a load, but for failures; ``copied``: of other nodes."""

    save: SaveId
    attempt: Attempt
    copied: Annotated[int, msgspec.Meta(ge=0, le=MAX_RANKS)] = 0
    failures: Annotated[tuple[GatherFailure, ...], msgspec.Meta(max_length=MAX_RANKS)] = ()

    def __post_init__(self) -> None:
        """Raises ValueError when its runs name more ranks than a job can have: a rank's segment fails once."""
        check_total(run for failure in self.failures for run in failure.ranks)


class Encoded(Event, frozen=True, kw_only=True, tag="encoded"):
    """This node's parity of the save is sealed, or ``problem`` says why not (nothing of it is left then)."""

    save: SaveId
    epoch: Incarnation
    problem: Text = ""


class Drained(Event, frozen=True, kw_only=True, tag="drained"):
    """This node's files are written and synced, or ``problem`` says why not."""

    save: SaveId
    problem: Text = ""
    committed: bool = False  # nothing was written: the save was found under its final name


class VoteWritten(Event, frozen=True, kw_only=True, tag="vote-written"):
    """This node's vote is synced, or ``problem`` says why not."""

    save: SaveId
    problem: Text = ""


class HeldSegment(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One segment in a slot of a node."""

    save: SaveId
    rank: Rank
    world_size: WorldSize
    nbytes: Nbytes
    attestations: Attestations = ()
    forced: bool = False  # a rank wants the save durable

    def __post_init__(self) -> None:
        """Raises ValueError when the rank is none of the save's."""
        _check_rank(self.rank, self.world_size)


class HeldChunk(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One parity chunk in the arena of a node: whose ranks' segments it protects, by member."""

    save: SaveId
    epoch: Incarnation
    scheme: Scheme
    index: Member
    ranks: Annotated[tuple[Ranks, ...], msgspec.Meta(max_length=MAX_SET_SIZE)]
    members: Annotated[tuple[NodeName, ...], msgspec.Meta(max_length=MAX_SET_SIZE)] = ()


class NodeHas(Event, frozen=True, kw_only=True, tag="node-has"):
    """All that lies and lives at the node, in place of what was known of it. ``incarnation``: the largest it knows of.

    ``former``: nodes that the job ran on before this session, as far as the node knows, but for those that the
    coordinator has the names of: of the session's topology, of ``outside`` and ``former`` of the order that opened it.
    """

    incarnation: Incarnation
    run: RunId = NO_RUN  # drawn with that incarnation
    segments: Annotated[tuple[HeldSegment, ...], msgspec.Meta(max_length=MAX_RANKS)] = ()
    chunks: Annotated[tuple[HeldChunk, ...], msgspec.Meta(max_length=MAX_RANKS)] = ()
    former: Nodes = ()
    session: AnySession = ""  # the one that was opened here last
    living: Annotated[tuple[Living, ...], msgspec.Meta(max_length=MAX_RANKS)] = ()
    awaited: Ranks = ()  # as in SlotsAwaited
    wanted: SaveId | None = None  # a user or rank wants it durable, or a newer one
    resumed: SaveId | None = None  # what a load agreed on, in that incarnation
    epoch: Incarnation = 0
    since: Incarnation = 0  # the epoch in which the job first came to this arena: older parity was never here


class FormerNodeReported(Event, frozen=True, kw_only=True, tag="former-node-reported"):
    """A node that the session does not use reports its living ranks. ``incarnation``: the largest it knows of."""

    session: Session
    living: Annotated[tuple[Living, ...], msgspec.Meta(max_length=MAX_RANKS)] = ()
    incarnation: Incarnation = 0
    store_id: AnyStore = ""  # to which the job was saved last, as the node knows


class ScrubFound(Event, frozen=True, kw_only=True, tag="scrub-found"):
    """A scrub of the sender's node has found damage. ``mended``: from where it was made good; empty: it is not.

    ``tier``: arena: a slot; rebuilt: parity in memory; pfs: a file of a committed checkpoint. ``rank`` None: of
    no rank.
    """

    save: SaveId
    tier: Tier
    rank: Rank | None = None
    what: Text
    mended: Text = ""


class MendEnded(Event, frozen=True, kw_only=True, tag="mend-ended"):
    """What became of MendOrdered ``number``: ranks whose images were written again, from memory or from parity.

    Of ``lost`` they were not, and ``problem`` says why; those of the others were sound when they were read again.
    """

    number: OrderNumber
    save: SaveId
    memory: Ranks = ()
    parity: Ranks = ()
    lost: Ranks = ()
    problem: Text = ""


# All that a peer can say of itself: a Report of anything else is refused.
Fact = (
    NodeAttached | RanksFound | RanksGone | RankDetached | SegmentsStaged | SaveSkipped | DrainAsked | PreemptAsked
    | StepsRead | SlotsAwaited | LoadsAsked | LoadsReported | SegmentsReleased | SegmentFetched | SegmentsGathered
    | Encoded | Drained | VoteWritten | NodeHas | FormerNodeReported | ScrubFound | MendEnded
)  # fmt: skip
