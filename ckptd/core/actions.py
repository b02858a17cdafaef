"""What the daemon must do: the outputs of the catalogue. Each one that can fail comes back as an event."""

from typing import NamedTuple

import msgspec

from ckptd.shared.base.ids import Incarnation, JobKey, RunId, SaveId, Session, SetName, StoreChoice, StoreId
from ckptd.shared.format.manifest import ParityRecord
from ckptd.shared.format.slot import Seal
from ckptd.shared.protocol.journal import Entry, RunBegan
from ckptd.shared.protocol.messages import Reply, Tier
from ckptd.shared.protocol.node_messages import Message
from ckptd.shared.protocol.parity_types import ParityChunk
from ckptd.shared.protocol.scrubbing import Place
from ckptd.shared.protocol.topology import Peer, Rendezvous, Topology


class Action(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Something to do for a job."""

    job: JobKey


class ToRank(Action, frozen=True, kw_only=True):
    """Send a reply or push to the rank of this session, if it is still there."""

    rank: int
    session: str
    message: Reply


class ToNode(Action, frozen=True, kw_only=True):
    """Deliver to the coordinator (a Report) or to the nodes of the job (an order). To the own node it loops back."""

    node: str | None = None  # of an order: None is every node of the job
    message: Message


class AllocateSlots(Action, frozen=True, kw_only=True):
    """Answered by that many SlotReady, or fewer and one SlotsFailed with the rest.

    instead: idle slots, too small, whose memory counts as free. Where it is what makes the new ones fit, SlotsFit comes
    first, and nothing is allocated before what the answer to that unlinks is gone.
    """

    rank: int
    count: int
    capacity: int
    instead: tuple[str, ...] = ()


class FreeSlot(Action, frozen=True, kw_only=True):
    """Put the seal of a free slot in force: from here on its old bytes are worth nothing."""

    slot: str


class UnlinkSlot(Action, frozen=True, kw_only=True):
    """Give the memory back."""

    slot: str


class TakeDigests(Action, frozen=True, kw_only=True):
    """Digest the slot's blocks in the background; answered by DigestsSealed if it still holds the save then."""

    slot: str
    save: SaveId


class Encode(Action, frozen=True, kw_only=True):
    """Pull the other columns, make this node's parity of the save, seal it; answered by Encoded.

    Every byte pulled is checked against the digests of its segment's seal before the parity is sealed. A chunk of the
    same save and epoch that is sealed already is answered at once. Repeating it while it runs changes nothing.
    """

    chunk: ParityChunk


class StopEncode(Action, frozen=True, kw_only=True):
    """Nobody wants that parity any more: break the encode off. Not answered."""

    save: SaveId
    epoch: int


class DropChunk(Action, frozen=True, kw_only=True):
    """Give this node's parity of the save back. Not answered."""

    save: SaveId
    epoch: int


class FetchSegment(Action, frozen=True, kw_only=True):
    """Have the segment in a slot of this node; answered by SegmentFetched.

    ``holder``: copy it from that node (tier peer). Else rebuild it (tier rebuilt) from ``chunk`` (any of its set, for
    columns and scheme), with ``homes`` telling where each other rank's segment lies and ``chunks`` which node has the
    parity of which member.
    """

    rank: int
    save: SaveId
    tier: Tier
    holder: str = ""
    seal: Seal | None = None
    chunk: ParityChunk | None = None
    homes: tuple[tuple[int, str], ...] = ()  # rank, node
    chunks: tuple[tuple[int, str], ...] = ()  # member, node


class Pull(NamedTuple):
    """What is pulled of the segment that has this seal, from that node, if it is not here yet: its tail, and ranges."""

    holder: str
    seal: Seal
    ranges: bytes  # as in AskSegments


class PullSegments(Action, frozen=True, kw_only=True):
    """Have parts of other nodes' segments in partial segments of this one; answered by SegmentsPulled."""

    rank: int
    session: str
    request: int
    save: SaveId
    pulls: tuple[Pull, ...]


class DropPulled(Action, frozen=True, kw_only=True):
    """Give back all partial segments of the save, and break off what is pulled into them. Not answered."""

    save: SaveId


class KeepTopology(Action, frozen=True, kw_only=True):
    """Write it to the job's directory in the arena, for the next process of this daemon; talk to these daemons."""

    session: str  # of which it is the topology
    topology: Topology
    epoch: int
    since: int  # the epoch in which the job first came to this arena
    outside: tuple[Peer, ...] = ()  # nodes that the job ran on before
    former: tuple[str, ...] = ()  # as Membership has it


class KeepNumber(Action, frozen=True, kw_only=True):
    """Write it to the arena, outside of the job's directory, before anything that follows: a life of the job has it.

    It need not be kept longer than the clock takes to pass it.
    """

    number: int


class MeetPeers(Action, frozen=True, kw_only=True):
    """Accept these daemons, and talk to them, for this job: ranks of ours, or a peer that we trust, named them."""

    peers: tuple[Peer, ...]


class Meet(Action, frozen=True, kw_only=True):
    """Ranks of a session wait here: accept, and talk to, the daemons of its other nodes.

    At the daemon that the rendezvous names: accept whichever has the ticket, until EndMeeting. At the others: talk to
    that one, and show it the ticket as long as it does not know this daemon.
    """

    session: Session
    rendezvous: Rendezvous


class EndMeeting(Action, frozen=True, kw_only=True):
    """The session's ticket is good for nothing any more. Not answered."""

    session: Session


class KeepLinks(Action, frozen=True, kw_only=True):
    """Keep a link to these nodes of the job, in place of those named before; None: to all. Others are had by a message.

    Not answered: PeerUp and PeerDown say what becomes of each. ``relays``: pairs of a node and the leader of a group
    by which packets between that node and this one may go, if they get through. At a node that coordinates, where
    links to all are kept, they go so as soon as the other node wants it.
    """

    nodes: tuple[str, ...] | None
    relays: tuple[tuple[str, str], ...] = ()


class TakeIncarnation(Action, frozen=True, kw_only=True):
    """Draw a run id and take a number for this session on the store; answered by IncarnationTaken.

    ``remembered``: ids of stores that arenas have for the job; ``wanted``: the one that the user asks for, if any.
    """

    at_least: int
    session: Session
    remembered: tuple[StoreId, ...] = ()
    wanted: StoreChoice = ""


class Claim(NamedTuple):
    """A number that the store did not give, for which a record is to lie there."""

    incarnation: int
    run: RunId
    session: str


class ScanStore(Action, frozen=True, kw_only=True):
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


class RememberStore(Action, frozen=True, kw_only=True):
    """Keep in the arena, for later runs of the job, to which store it is saved."""

    store_id: StoreId


class Drain(Action, frozen=True, kw_only=True):
    """Write these slots' images to this very store and sync them; answered by DrainMoved and Drained."""

    store_id: StoreId
    save: SaveId
    folder: SetName  # of this node's redundancy set, in the checkpoint
    slots: tuple[str, ...]


class DrainParity(Action, frozen=True, kw_only=True):
    """Write this node's parity of the save to the store and sync it; answered by ParityDrained."""

    store_id: StoreId
    save: SaveId
    epoch: int


class WriteVote(Action, frozen=True, kw_only=True):
    """Write and sync this node's vote for what was drained; answered by VoteWritten."""

    store_id: StoreId
    save: SaveId
    folder: SetName  # as in Drain
    slots: tuple[str, ...]
    parity: ParityRecord | None = None


class Commit(Action, frozen=True, kw_only=True):
    """Make manifest, COMMITTED and the final name from the votes; answered by CommitEnded.

    ``incarnation``, ``session``: of the committer; the answer names a session that took the job over since then.
    ``void``: sessions that are over: they take nothing over, though the store may have given one a number since.
    """

    store_id: StoreId
    incarnation: Incarnation
    session: str
    save: SaveId
    void: tuple[str, ...] = ()


class RemoveCheckpoint(Action, frozen=True, kw_only=True):
    """Retention; answered by CheckpointRemoved."""

    save: SaveId


class RemovePartial(Action, frozen=True, kw_only=True):
    """Remove an unfinished directory that nobody will finish. Not answered."""

    save: SaveId


class ForgetJob(Action, frozen=True, kw_only=True):
    """Nothing of the job is left on this node: remove its directory."""


class HoldRanks(Action, frozen=True, kw_only=True):
    """Write HOLD on the boards of these ranks, then read at which steps they are; answered by StepsRead.

    A board that has a step announced keeps it.
    """

    session: Session
    ranks: tuple[int, ...]


class AnnounceStep(Action, frozen=True, kw_only=True):
    """Write this step on the boards of these ranks: they save at the first that is not below it. Not answered."""

    session: Session
    ranks: tuple[int, ...]
    step: int


class ScrubBlock(Action, frozen=True, kw_only=True):
    """Read a block of what lies in the arena and compare it with its digest; answered by BlockScrubbed.

    Of the slot ``name``, or, where that is empty, of the parity of the save and epoch. ``block`` -1: a slot's tail.
    """

    name: str
    save: SaveId
    epoch: int
    block: int


class CopyBlock(Action, frozen=True, kw_only=True):
    """Have a block of the slot's image from the committed checkpoint on the store; answered by BlockCopied."""

    name: str
    save: SaveId
    rank: int
    block: int


class ScrubPiece(Action, frozen=True, kw_only=True):
    """Read about nbytes of a committed checkpoint and check them; answered by PieceScrubbed."""

    save: SaveId
    place: Place
    nbytes: int


class Mend(Action, frozen=True, kw_only=True):
    """Write damaged images of a committed checkpoint again, from these slots where they are sound, else from parity.

    Answered by MendEnded with its number. ``slots``: rank and slot.
    """

    number: int
    save: SaveId
    ranks: tuple[int, ...]
    slots: tuple[tuple[int, str], ...]


class Note(Action, frozen=True, kw_only=True):
    """A line for the log and for status: something went wrong and was dealt with."""

    text: str


class KeepEntry(Action, frozen=True, kw_only=True):
    """Put it into the journal of this run. Times of day are the caller's. Not answered.

    ``began``: the run, as each segment of it begins. ``age_s``: of the run. ``ago_s``: how long ago it happened.
    """

    began: RunBegan
    entry: Entry
    age_s: float
    ago_s: float = 0.0
