"""What the daemon that coordinates a job orders of the daemons of the job's nodes."""

from typing import Annotated

import msgspec

from ckptd.shared.base.ids import (
    MAX_RANKS,
    NO_RUN,
    Incarnation,
    NodeName,
    Rank,
    Run,
    RunId,
    SaveId,
    Session,
    Step,
)
from ckptd.shared.format.replica_attestations import Where
from ckptd.shared.format.schemes.layout import MAX_SET_SIZE
from ckptd.shared.protocol.messages import End, Progress, Tier
from ckptd.shared.protocol.node_facts import (
    MAX_FORMER,
    MAX_VOID,
    AnyDirname,
    AnyStore,
    Attempt,
    Code,
    NodeMessage,
    Nodes,
    OrderNumber,
    Ranks,
    Text,
    Texts,
)
from ckptd.shared.protocol.parity_types import Member
from ckptd.shared.protocol.rank_sets import RankSet, check_total
from ckptd.shared.protocol.tier_runs import Tiers
from ckptd.shared.protocol.topology import MAX_NODES, Peer, Place, TopologyDigest


class SessionOpened(NodeMessage, frozen=True, kw_only=True, tag="session-opened"):
    """The session is the job now, under this incarnation; ``ranks`` wait for this at the receiver.

    The sender coordinates from now on. ``epoch``: when this topology began. A node that lacks the topology asks for it.
    """

    session: Session
    incarnation: Incarnation
    run: RunId = NO_RUN  # drawn with that incarnation
    store_id: AnyStore = ""  # to which the session is saved; empty: it has not answered yet
    ranks: Ranks
    known: Annotated[tuple[Progress, ...], msgspec.Meta(max_length=MAX_RANKS)] = ()
    warnings: Texts = ()
    place: Place | None = None  # None: the receiver has the topology, or it is not known yet
    epoch: Incarnation = 0
    outside: TopologyDigest = b""  # of nodes that the job ran on before, and that may hold something of it
    former: Annotated[tuple[TopologyDigest, ...], msgspec.Meta(max_length=MAX_FORMER)] = ()  # that the sender knows


class SessionRefused(NodeMessage, frozen=True, kw_only=True, tag="session-refused"):
    """These ranks may not join."""

    session: Session
    ranks: Ranks  # empty: none of the session
    code: Code
    message: Text
    hint: Text = ""


class SessionWaits(NodeMessage, frozen=True, kw_only=True, tag="session-waits"):
    """The session waits to join, or loads: for whom it waits, for one of its ranks at the receiver."""

    session: Session
    rank: Rank
    message: Text
    hint: Text = ""


class AnnounceOrdered(NodeMessage, frozen=True, kw_only=True, tag="announce-ordered"):
    """To nodes of the job's last topology: tell these nodes of it, which trust them, that a session waits to join."""

    session: Session
    coordinator: Peer  # of the session that waits
    nodes: Nodes


class SaveStaged(NodeMessage, frozen=True, kw_only=True, tag="save-staged"):
    """Every rank's segment is sealed."""

    save: SaveId


class SaveWaits(NodeMessage, frozen=True, kw_only=True, tag="save-waits"):
    """Some ranks have delivered the save and others have not for too long: which, why, and what to type.

    ``idle``: their nodes answer, and they do not save: a rank that waits for a slot of this save will not get it.
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


class SavesObsolete(NodeMessage, frozen=True, kw_only=True, tag="saves-obsolete"):
    """What nothing depends on any more: give it back.

    ``chunks``: parity (save, epoch) that protects nothing that another checkpoint does not protect better. ``saves``:
    too much of them is lost; ``newest`` is the one that the job went on from.
    """

    chunks: Annotated[tuple[tuple[SaveId, Incarnation], ...], msgspec.Meta(max_length=MAX_RANKS)] = ()
    saves: Annotated[tuple[SaveId, ...], msgspec.Meta(max_length=MAX_RANKS)] = ()
    newest: SaveId | None = None


class SaveEnded(NodeMessage, frozen=True, kw_only=True, tag="save-ended"):
    """The save's end is decided."""

    save: SaveId
    end: End
    reason: Text = ""
    mismatched: bool = False  # the ranks' slices did not make a whole: each is to save all of its own
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

    ``homes``: where each segment of the set lies (rank, node); ``chunks``: where each chunk lies (member, node).
    """

    rank: Rank
    save: SaveId
    tier: Tier
    holder: NodeName  # of the segment, or of a chunk
    epoch: Incarnation = 0
    homes: Annotated[tuple[tuple[Rank, NodeName], ...], msgspec.Meta(max_length=MAX_RANKS)] = ()
    chunks: Annotated[tuple[tuple[Member, NodeName], ...], msgspec.Meta(max_length=MAX_SET_SIZE)] = ()


class GatherOrdered(NodeMessage, frozen=True, kw_only=True, tag="gather-ordered"):
    """Have the segments that the receiver's ranks need: their own, and those of all that are in a set with them.

    The seals of its ranks' segments, which lie there, name the members of their sets. Each segment lies at the node
    where its rank runs, and is copied from there; the same for all nodes.
    """

    save: SaveId
    attempt: Attempt


class Holder(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Segments of these ranks lie in this node's memory."""

    node: NodeName
    ranks: RankSet


class LoadOrdered(NodeMessage, frozen=True, kw_only=True, tag="load-ordered"):
    """Where each rank reads from. ``save`` None: nothing to restore. ``agreed``: all have read it."""

    incarnation: Incarnation
    run: RunId = NO_RUN  # drawn with that incarnation
    save: SaveId | None = None
    tiers: Tiers = Tiers()  # all but pfs read a slot of their node
    whole: bool = False  # the slots of all that shared with a rank lie at its node, and it reads what it needs of them
    saved_by: Annotated[int, msgspec.Meta(ge=0, le=MAX_RANKS)] = 0  # so many ranks, if each rank may need any of these:
    holders: Annotated[tuple[Holder, ...], msgspec.Meta(max_length=MAX_NODES)] = ()  # where their segments lie
    dirname: AnyDirname = ""
    attempt: Attempt = 0  # the ranks were sent to read so often in this load
    agreed: bool = False
    notes: Texts = ()

    def __post_init__(self) -> None:
        """Raises ValueError when its holders have more ranks than a job can have."""
        check_total(run for holder in self.holders for run in holder.ranks)


class LoadRefused(NodeMessage, frozen=True, kw_only=True, tag="load-refused"):
    """The load failed, on all ranks or on one."""

    code: Code
    message: Text
    hint: Text = ""
    rank: Rank | None = None  # None: on all


class ForeignRuns(NodeMessage, frozen=True, kw_only=True, tag="foreign-runs"):
    """All runs of which something lies in arenas and that are not the job's: it is isolated.

    What was named before and is not any more is the job's again. Answered by NodeHas.
    """

    runs: Annotated[tuple[Run, ...], msgspec.Meta(max_length=MAX_RANKS)] = ()
    disputed: Annotated[tuple[Run, ...], msgspec.Meta(max_length=MAX_RANKS)] = ()  # of these; never given up with time


class MendOrdered(NodeMessage, frozen=True, kw_only=True, tag="mend-ordered"):
    """Images of these ranks are damaged on the store: write them again, from memory or from parity there.

    Answered by MendEnded with its number. Ordered again, by the same number, when there is no answer.
    """

    number: OrderNumber
    save: SaveId
    ranks: Ranks


class JobReleased(NodeMessage, frozen=True, kw_only=True, tag="job-released"):
    """Nothing of the job is needed in memory any more."""


Order = (
    SessionOpened | SessionRefused | SessionWaits | AnnounceOrdered | SaveStaged | SaveWaits | EncodeOrdered
    | SaveProtected | SavesObsolete | SaveEnded | DrainOrdered | DrainDropped | PreemptOrdered | FetchOrdered
    | LoadOrdered | GatherOrdered | LoadRefused | ForeignRuns | MendOrdered | JobReleased
)  # fmt: skip
