"""What can happen to a job on this node: the inputs of the catalogue. One line each when printed."""

from dataclasses import dataclass, field

from ckptd.core.piece import Column, Piece
from ckptd.protocol.gates import Gate
from ckptd.protocol.ids import JobKey, SaveId
from ckptd.protocol.manifest import ParityRecord
from ckptd.protocol.messages import Cadence, End, Progress, Tier
from ckptd.protocol.shares import Share
from ckptd.protocol.slot import Seal
from ckptd.protocol.topology import Peer, Scheme, Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened to a job."""

    job: JobKey


# --- from ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFound(Event):
    """A live process holds the lock of a rank file of this job."""

    rank: int
    session: str
    pid: int
    host: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAttached(Event):
    """A rank asks to belong to the job. ``incarnation`` 0 is a connect, else it comes back to a restarted daemon."""

    request: int
    session: str
    rank: int
    world_size: int
    host: str
    pid: int
    incarnation: int = 0
    takeover: bool = False
    cadence: Cadence = field(default_factory=Cadence)
    topology: Topology | None = None  # None: this node alone


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGone(Event):
    """The process behind a rank of a session ended without a word."""

    rank: int
    session: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDetached(Event):
    """The rank closed."""

    request: int = 0
    rank: int
    session: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FromRank(Event):
    """A word of an attached rank. ``session`` says of which one; empty when the daemon speaks for it."""

    rank: int
    session: str = ""
    request: int = 0  # 0: nobody waits for an answer


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotsAsked(FromRank):
    """The rank needs slots of at least capacity bytes and has given back those granted to it."""

    capacity: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentStaged(FromRank):
    """A rank sealed its whole segment in a slot. The caller has checked the seal against this."""

    world_size: int
    slot: str
    save: SaveId
    nbytes: int
    drain: bool = False
    shares: tuple[Share, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveSkipped(FromRank):
    """A rank found no slot in time."""

    save: SaveId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainAsked(FromRank):
    """Somebody wants the newest staged checkpoint durable now."""

    rank: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadAsked(FromRank):
    """A rank wants to restore; step None is the newest."""

    step: int | None = None
    gate: Gate | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReported(FromRank):
    """A rank read, or could not read, what it was pointed to."""

    save: SaveId
    tier: Tier
    problem: str = ""
    fatal: bool = False  # no other checkpoint would do better
    reshape: bool = False  # nothing is wrong with it, but this rank needs other ranks' images too


# --- from the arena


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotAdopted(Event):
    """A slot file was found at start. ``save`` None: it holds nothing."""

    rank: int
    slot: str
    capacity: int
    world_size: int = 1
    save: SaveId | None = None
    nbytes: int = 0
    seal: Seal | None = None  # once the digests are taken
    shares: tuple[Share, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotReady(Event):
    """A slot that was asked for is allocated and faulted in."""

    rank: int
    slot: str
    capacity: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotsFailed(Event):
    """count slots that were asked for cannot be had."""

    rank: int
    count: int
    code: str
    message: str
    hint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DigestsSealed(Event):
    """The digest of every block of the slot stands in its table, and its seal, given here, says so."""

    slot: str
    save: SaveId
    seal: Seal


@dataclass(frozen=True, slots=True, kw_only=True)
class DigestsFailed(Event):
    """The slot's digests cannot be taken: its memory cannot be read."""

    slot: str
    save: SaveId
    problem: str


# --- parity and copies, from the arena


@dataclass(frozen=True, slots=True, kw_only=True)
class TopologyKept(Event):
    """What an earlier life of this daemon knew of the job's nodes; epoch as in Piece. Told first at start."""

    topology: Topology
    epoch: int
    since: int  # the epoch in which the job first came to this arena
    outside: tuple[Peer, ...] = ()  # nodes that the job ran on before


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceAdopted(Event):
    """A whole parity file was found at start."""

    piece: Piece


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded(Event):
    """This node's parity of the save is sealed, or ``problem`` says why not (nothing of it is left then)."""

    save: SaveId
    epoch: int
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentFetched(Event):
    """A whole segment was copied or rebuilt into a slot of this node, checked and sealed; or ``problem``."""

    rank: int
    save: SaveId
    tier: Tier
    slot: str = ""
    capacity: int = 0
    seal: Seal | None = None  # None: see problem
    problem: str = ""
    shares: tuple[Share, ...] = ()


# --- from the peer plane


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerUp(Event):
    """The other daemon answers. What was told to an earlier life of it, or lost since, must be told again.

    One event per job that both belong to. Messages sent after it arrive, in order, once, until PeerDown or the next
    PeerUp.
    """

    node: str
    fresh: bool = True  # it is another process than the one before


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerDown(Event):
    """Nothing was heard of the other daemon for the peer timeout. Messages to it are dropped until PeerUp."""

    node: str


# --- from the store


@dataclass(frozen=True, slots=True)
class OnStore:
    """One committed checkpoint on the store."""

    save: SaveId
    world_size: int
    nbytes: int
    dirname: str


@dataclass(frozen=True, slots=True)
class Partial:
    """One unfinished directory on the store."""

    save: SaveId
    complete: bool  # the votes there cover every rank: it can be committed from them alone


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreScanned(Event):
    """What lies on the store; ``problem`` not empty: it did not answer, and the lists mean nothing."""

    committed: tuple[OnStore, ...] = ()
    partials: tuple[Partial, ...] = ()
    notes: tuple[str, ...] = ()
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class IncarnationTaken(Event):
    """The number this session owns. ``problem`` not empty: the store did not answer, or (``hopeless``) never will.

    Then the number is the clock's.
    """

    number: int = 0
    problem: str = ""
    hint: str = ""
    hopeless: bool = False  # no such directory, no permission: a setting must change


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainMoved(Event):
    """So many bytes of this node's share are written. by_rank: of whose images; said on this node only."""

    save: SaveId
    nbytes_done: int
    by_rank: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Drained(Event):
    """This node's files are written and synced, or ``problem`` says why not."""

    save: SaveId
    problem: str = ""
    committed: bool = False  # nothing was written: the save was found under its final name


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityDrained(Event):
    """This node's parity lies on the store, synced, as a vote names it, or ``problem`` says why not."""

    save: SaveId
    parity: ParityRecord | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class VoteWritten(Event):
    """This node's vote is synced, or ``problem`` says why not."""

    save: SaveId
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitEnded(Event):
    """The checkpoint has its final name and everything is synced, or ``problem`` says why not."""

    save: SaveId
    nbytes: int = 0
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRemoved(Event):
    """Retention's removal ended; ``problem`` not empty: it did not. ``pinned``: it stays because the user says so."""

    save: SaveId
    problem: str = ""
    pinned: bool = False


# --- between the nodes of a job; on one node they loop back


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMessage(Event):
    """Base of what the daemons of a job tell each other."""

    node: str  # the sender


@dataclass(frozen=True, slots=True, kw_only=True)
class Report(NodeMessage):
    """To the coordinator, or to one that may become it: this happened at my node."""

    event: Event


# what is reported beside events of the node


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentReleased(Event):
    """A slot of this node no longer holds the save."""

    rank: int
    save: SaveId


@dataclass(frozen=True, slots=True)
class HeldSegment:
    """One segment in a slot of a node."""

    save: SaveId
    rank: int
    world_size: int
    nbytes: int
    shares: tuple[Share, ...] = ()


@dataclass(frozen=True, slots=True)
class HeldPiece:
    """One parity piece in the arena of a node: whose ranks' segments it protects, by member."""

    save: SaveId
    epoch: int
    scheme: Scheme
    index: int
    ranks: tuple[tuple[int, ...], ...]
    members: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeHas(Event):
    """All that lies and lives at the node, in place of what was known of it. ``incarnation``: the largest it knows of.

    ``former``: nodes that the job ran on before this session, as far as the node knows.
    """

    incarnation: int
    segments: tuple[HeldSegment, ...] = ()
    pieces: tuple[HeldPiece, ...] = ()
    former: tuple[str, ...] = ()
    session: str = ""  # the one that was opened here last
    live: tuple[tuple[int, str], ...] = ()  # rank and session of each process
    resumed: SaveId | None = None  # what a load agreed on, in that incarnation
    epoch: int = 0
    since: int = 0  # the epoch in which the job first came to this arena: older parity was never here


@dataclass(frozen=True, slots=True, kw_only=True)
class Knocked(Event):
    """A session stands at the door here. Before, the job ran on these nodes too, which its ranks no longer use."""

    session: str
    outside: tuple[Peer, ...] = ()
    incarnation: int = 0  # the largest that the node knows of: the next one is above it, whatever the store says


@dataclass(frozen=True, slots=True, kw_only=True)
class Visited(Event):
    """A node that the session does not use has told who lives there. ``incarnation``: the largest it knows of."""

    session: str
    incarnation: int = 0


# orders of the coordinator


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOpened(NodeMessage):
    """The session is the job now, under this incarnation; ``ranks`` wait for the news at the receiver.

    The sender coordinates from now on. ``epoch``: when this topology began.
    """

    session: str
    incarnation: int
    ranks: tuple[int, ...]
    known: tuple[Progress, ...] = ()
    warnings: tuple[str, ...] = ()
    topology: Topology | None = None
    epoch: int = 0
    outside: tuple[Peer, ...] = ()  # nodes that the job ran on before, and that may hold something of it


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRefused(NodeMessage):
    """These ranks may not join."""

    session: str
    ranks: tuple[int, ...]
    code: str
    message: str
    hint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveStaged(NodeMessage):
    """Every rank's segment is sealed."""

    save: SaveId


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeOrdered(NodeMessage):
    """Make parity of the save. What was ordered before and is not protected yet is given up."""

    save: SaveId
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveProtected(NodeMessage):
    """Every set has encoded the save."""

    save: SaveId
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlived(NodeMessage):
    """What nothing depends on any more: give it back.

    ``pieces``: parity (save, epoch) that protects nothing that another checkpoint does not protect better. ``saves``:
    too much of them is lost; ``newest`` is the one that the job went on from.
    """

    pieces: tuple[tuple[SaveId, int], ...] = ()
    saves: tuple[SaveId, ...] = ()
    newest: SaveId | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveEnded(NodeMessage):
    """The save's end is decided."""

    save: SaveId
    end: End
    reason: str = ""
    apart: bool = False  # the ranks' shares were no whole: each is to save all of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainOrdered(NodeMessage):
    """Write the segments of these ranks to the store, then vote."""

    save: SaveId
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainDropped(NodeMessage):
    """The drain of the save is over, well or not: its slots need no more protection for it."""

    save: SaveId


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchOrdered(NodeMessage):
    """Have the segment of this rank in a slot of the receiver, from ``holder`` or (tier rebuilt) from parity.

    ``homes``: where each segment of the set lies (rank, node); ``pieces``: where each piece lies (member, node).
    """

    rank: int
    save: SaveId
    tier: Tier
    holder: str  # of the segment, or of a piece
    epoch: int = 0
    homes: tuple[tuple[int, str], ...] = ()
    pieces: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOrdered(NodeMessage):
    """Where each rank reads from. ``save`` None: nothing to restore. ``agreed``: all have read it."""

    incarnation: int
    save: SaveId | None = None
    tiers: tuple[Tier, ...] = ()  # by rank: all but pfs read a slot of their node
    whole: bool = False  # all ranks' slots lie at each node, and each rank reads what it needs of them
    dirname: str = ""
    gates: tuple[tuple[int, Gate], ...] = ()  # by rank, of the nodes that are sent to the store
    agreed: bool = False
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRefused(NodeMessage):
    """The load failed, on all ranks or on one."""

    code: str
    message: str
    hint: str = ""
    rank: int | None = None  # None: on all


@dataclass(frozen=True, slots=True, kw_only=True)
class JobReleased(NodeMessage):
    """Nothing of the job is needed in memory any more."""


# from node to node, past the coordinator


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitFinished(NodeMessage):
    """The coordinator does not answer; the sender has made the commit in its place."""

    save: SaveId


@dataclass(frozen=True, slots=True, kw_only=True)
class Introduced(NodeMessage):
    """To a node that a new session does not use: these daemons are the job's now; tell its coordinator who lives."""

    session: str
    topology: Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnOffered(NodeMessage):
    """To the members of the sender's set: what it contributes to their parity."""

    save: SaveId
    epoch: int
    column: Column


@dataclass(frozen=True, slots=True, kw_only=True)
class SealAsked(NodeMessage):
    """The seal of a segment that lies at the receiver."""

    save: SaveId
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SealTold(NodeMessage):
    """None: it does not lie here, or has no digests yet."""

    save: SaveId
    rank: int
    seal: Seal | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceAsked(NodeMessage):
    """The description of a piece that lies at the receiver."""

    save: SaveId
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceTold(NodeMessage):
    """None: it does not lie here."""

    save: SaveId
    epoch: int
    piece: Piece | None
