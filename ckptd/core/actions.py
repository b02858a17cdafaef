"""What the daemon must do: the outputs of the catalogue. Each one that can fail comes back as an event."""

from dataclasses import dataclass

from ckptd.shared.base.ids import Incarnation, JobKey, RunId, SaveId, Session, StoreChoice, StoreId
from ckptd.shared.format.manifest import ParityRecord
from ckptd.shared.format.slot import Seal
from ckptd.shared.protocol.messages import Reply, Tier
from ckptd.shared.protocol.node_messages import Message
from ckptd.shared.protocol.parity_types import Piece
from ckptd.shared.protocol.topology import Peer, Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """Something to do for a job."""

    job: JobKey


@dataclass(frozen=True, slots=True, kw_only=True)
class ToRank(Action):
    """Send a reply or push to the rank of this session, if it is still there."""

    rank: int
    session: str
    message: Reply


@dataclass(frozen=True, slots=True, kw_only=True)
class ToNode(Action):
    """Deliver to the coordinator (a Report) or to the nodes of the job (an order). To the own node it loops back."""

    node: str | None = None  # of an order: None is every node of the job
    message: Message


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocateSlots(Action):
    """Answered by that many SlotReady, or fewer and one SlotsFailed with the rest.

    instead: idle slots, too small, whose memory counts as free. Where it is what makes the new ones fit, SlotsFit comes
    first, and nothing is allocated before what the answer to that unlinks is gone.
    """

    rank: int
    count: int
    capacity: int
    instead: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeSlot(Action):
    """Put the seal of a free slot in force: from here on its old bytes are worth nothing."""

    slot: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UnlinkSlot(Action):
    """Give the memory back."""

    slot: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeDigests(Action):
    """Digest the slot's blocks in the background; answered by DigestsSealed if it still holds the save then."""

    slot: str
    save: SaveId


@dataclass(frozen=True, slots=True, kw_only=True)
class Encode(Action):
    """Pull the other columns, make this node's parity of the save, seal it; answered by Encoded.

    Every byte pulled is checked against the digests of its segment's seal before the parity is sealed. A piece of the
    same save and epoch that is sealed already is answered at once. Repeating it while it runs changes nothing.
    """

    piece: Piece


@dataclass(frozen=True, slots=True, kw_only=True)
class StopEncode(Action):
    """Nobody wants that parity any more: break the encode off. Not answered."""

    save: SaveId
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DropPiece(Action):
    """Give this node's parity of the save back. Not answered."""

    save: SaveId
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchSegment(Action):
    """Have the segment in a slot of this node; answered by SegmentFetched.

    ``holder``: copy it from that node (tier peer). Else rebuild it (tier rebuilt) from ``piece`` (any of its set, for
    columns and scheme), with ``homes`` telling where each other rank's segment lies and ``pieces`` which node has the
    parity of which member.
    """

    rank: int
    save: SaveId
    tier: Tier
    holder: str = ""
    seal: Seal | None = None
    piece: Piece | None = None
    homes: tuple[tuple[int, str], ...] = ()  # rank, node
    pieces: tuple[tuple[int, str], ...] = ()  # member, node


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepTopology(Action):
    """Write it to the job's directory in the arena, for the next life of this daemon; talk to these daemons."""

    topology: Topology
    epoch: int
    since: int  # the epoch in which the job first came to this arena
    outside: tuple[Peer, ...] = ()  # nodes that the job ran on before
    former: tuple[str, ...] = ()  # as Membership has it


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepNumber(Action):
    """Write it to the arena, outside of the job's directory, before anything that follows: a life of the job has it.

    It need not be kept longer than the clock takes to pass it.
    """

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MeetPeers(Action):
    """Accept these daemons, and talk to them, for this job: ranks of ours, or a peer that we trust, named them."""

    peers: tuple[Peer, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeIncarnation(Action):
    """Draw a run id and take a number for this session on the store; answered by IncarnationTaken.

    ``remembered``: ids of stores that arenas have for the job; ``wanted``: the one that the user asks for, if any.
    """

    at_least: int
    session: Session
    remembered: tuple[StoreId, ...] = ()
    wanted: StoreChoice = ""


@dataclass(frozen=True, slots=True)
class Claim:
    """A number that the store did not give, for which a record is to lie there."""

    incarnation: int
    run: RunId
    session: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanStore(Action):
    """Answered by StoreScanned, with the same ``after``. The rest as of TakeIncarnation.

    ``claim``: put on record before the scan begins.
    ``make``: a store that is missing may be made; else what is not there has nothing of the job.
    ``after``: the number whose record is on the store already, so that no commit is missed by both sides.
    """

    after: int = 0
    claim: Claim | None = None
    make: bool = False
    remembered: tuple[StoreId, ...] = ()
    wanted: StoreChoice = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RememberStore(Action):
    """Keep in the arena, for later runs of the job, to which store it is saved."""

    store_id: StoreId


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain(Action):
    """Write these slots' images to this very store and sync them; answered by DrainMoved and Drained."""

    store_id: StoreId
    save: SaveId
    slots: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainParity(Action):
    """Write this node's parity of the save to the store and sync it; answered by ParityDrained."""

    store_id: StoreId
    save: SaveId
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteVote(Action):
    """Write and sync this node's vote for what was drained; answered by VoteWritten."""

    store_id: StoreId
    save: SaveId
    slots: tuple[str, ...]
    parity: ParityRecord | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit(Action):
    """Make manifest, COMMITTED and the final name from the votes; answered by CommitEnded.

    ``incarnation``, ``session``: of who commits; whoever took the job over since then is told in the answer.
    ``void``: sessions that are over: they take nothing over, though the store may have given one a number since.
    """

    store_id: StoreId
    incarnation: Incarnation
    session: str
    save: SaveId
    void: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveCheckpoint(Action):
    """Retention; answered by CheckpointRemoved."""

    save: SaveId


@dataclass(frozen=True, slots=True, kw_only=True)
class RemovePartial(Action):
    """Remove an unfinished directory that nobody will finish. Not answered."""

    save: SaveId


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetJob(Action):
    """Nothing of the job is left on this node: remove its directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldRanks(Action):
    """Write HOLD on the boards of these ranks, then read at which steps they are; answered by StepsRead.

    A board that has a step announced keeps it.
    """

    session: Session
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnounceStep(Action):
    """Write this step on the boards of these ranks: they save at the first that is not below it. Not answered."""

    session: Session
    ranks: tuple[int, ...]
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Note(Action):
    """A line for the log and for status: something went wrong and was dealt with."""

    text: str
