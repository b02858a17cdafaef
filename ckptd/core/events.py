"""What can happen to a job on this node: the inputs of the catalogue. One line each when printed.

Other nodes send some of them too. Messages between nodes are in ckptd.shared.protocol.node_messages, and named here.
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from ckptd.shared.base.ids import NO_RUN, JobKey, RunId, SaveId, Step
from ckptd.shared.format.manifest import ParityRecord
from ckptd.shared.format.replica_attestations import Attestation
from ckptd.shared.format.slot import Seal
from ckptd.shared.protocol.messages import Cadence, Tier
from ckptd.shared.protocol.node_messages import *  # noqa: F403 - the core knows them by these names too
from ckptd.shared.protocol.node_messages import (
    Drained,
    Encoded,
    Event,
    FromRank,
    Report,
    SegmentsReleased,
    SegmentsStaged,
    VoteWritten,
)
from ckptd.shared.protocol.parity_types import ParityChunk
from ckptd.shared.protocol.read_tree import ExchangeAddress
from ckptd.shared.protocol.scrubbing import Harm, Place
from ckptd.shared.protocol.segments import Wanted
from ckptd.shared.protocol.topology import Peer, Rendezvous, Topology

# --- from ranks


class RankFound(Event, frozen=True, kw_only=True):
    """A live process holds the lock of a rank file of this job."""

    rank: int
    session: str
    pid: int
    host: str


class RankGone(Event, frozen=True, kw_only=True):
    """The process behind a rank of a session ended without a word."""

    rank: int
    session: str


class RankAttached(Event, frozen=True, kw_only=True):
    """A rank asks to belong to the job. ``incarnation`` 0 is a connect, else it comes back to a restarted daemon.

    ``store_id``: the store that it asks for, or, when it comes back, is saved to; empty: none in particular.
    """

    request: int
    session: str
    rank: int
    world_size: int
    host: str
    pid: int
    incarnation: int = 0
    run: RunId = NO_RUN  # drawn with that incarnation
    store_id: str = ""
    takeover: bool = False
    cadence: Cadence = Cadence()
    rendezvous: Rendezvous | None = None  # None: all ranks are on this node
    here: Peer | None = None  # this node's daemon


class SegmentStaged(FromRank, frozen=True, kw_only=True):
    """The rank sealed its whole segment in a slot. The caller has checked the seal against this.

    ``late``: what verifies its late copies, for the status of this node. ``stall_s``, ``late_nbytes``, ``late_s``: as
    in HandOver.
    """

    world_size: int
    slot: str
    save: SaveId
    nbytes: int
    drain: bool = False
    attestations: tuple[Attestation, ...] = ()
    late: str = ""
    stall_s: float = 0.0
    late_nbytes: int = 0
    late_s: float = 0.0


class SlotsAsked(FromRank, frozen=True, kw_only=True):
    """The rank needs slots of at least capacity bytes and has given back those granted to it."""

    capacity: int


class LoadAsked(FromRank, frozen=True, kw_only=True):
    """A rank wants to restore; step None is the newest. ``run``: of this run alone; None: of the job's own line."""

    step: int | None = None
    run: RunId | None = None


class LoadReported(FromRank, frozen=True, kw_only=True):
    """A rank read, or could not read, what it was sent to."""

    save: SaveId
    tier: Tier
    problem: str = ""
    fatal: bool = False  # no other checkpoint would do better
    reshape: bool = False  # nothing is wrong with it, but this rank needs other ranks' images too
    lacks: tuple[int, ...] = ()  # whose segments did not come to it, or are damaged


class PlaceAsked(FromRank, frozen=True, kw_only=True):
    """A rank reads a checkpoint on the store for its node, together with other nodes; as in AskPlace."""

    read: str
    exchange: ExchangeAddress | None = None


class SegmentsWanted(FromRank, frozen=True, kw_only=True):
    """A rank wants segments of a save that is being loaded, or parts of them; as in AskSegments."""

    save: SaveId
    wanted: tuple[Wanted, ...]


class SegmentsDropped(FromRank, frozen=True, kw_only=True):
    """A rank has read what it wanted of them."""

    save: SaveId


# --- from the arena


class SlotAdopted(Event, frozen=True, kw_only=True):
    """A slot file was found at start. ``save`` None: it holds nothing."""

    rank: int
    slot: str
    capacity: int
    world_size: int = 1
    save: SaveId | None = None
    nbytes: int = 0
    seal: Seal | None = None  # once the digests are taken
    attestations: tuple[Attestation, ...] = ()


class SlotsFit(Event, frozen=True, kw_only=True):
    """There is room for the slots that were asked for, if the idle ones that they are to replace go now."""

    rank: int


class SlotReady(Event, frozen=True, kw_only=True):
    """A slot that was asked for is allocated and faulted in."""

    rank: int
    slot: str
    capacity: int


class SlotsFailed(Event, frozen=True, kw_only=True):
    """count slots that were asked for cannot be had."""

    rank: int
    count: int
    code: str
    message: str
    hint: str


class DigestsSealed(Event, frozen=True, kw_only=True):
    """The digest of every block of the slot stands in its table, and its seal, given here, says so."""

    slot: str
    save: SaveId
    seal: Seal


class DigestsFailed(Event, frozen=True, kw_only=True):
    """The slot's digests cannot be taken: its memory cannot be read."""

    slot: str
    save: SaveId
    problem: str


# --- parity and copies, from the arena


class TopologyKept(Event, frozen=True, kw_only=True):
    """What an earlier process of this daemon knew of the job's nodes; epoch as in ParityChunk. Comes first at start."""

    session: str  # of which it is the topology
    topology: Topology
    epoch: int
    since: int  # the epoch in which the job first came to this arena
    outside: tuple[Peer, ...] = ()  # nodes that the job ran on before
    former: tuple[str, ...] = ()  # as Membership has it


class NumberKept(Event, frozen=True, kw_only=True):
    """The largest incarnation that an earlier process of this daemon knew of the job. Comes first at start."""

    number: int


class ChunkAdopted(Event, frozen=True, kw_only=True):
    """A whole parity file was found at start."""

    chunk: ParityChunk


class SegmentsPulled(Event, frozen=True, kw_only=True):
    """What a rank wanted of other nodes' segments has ended. ``files``: rank and name, where all of it is there.

    ``lacks``: rank and why not. ``refused``: why this node cannot have them. ``nbytes``: that came, with their tails.
    """

    rank: int
    session: str
    request: int
    save: SaveId
    files: tuple[tuple[int, str], ...] = ()
    lacks: tuple[tuple[int, str], ...] = ()
    refused: str = ""
    nbytes: int = 0


# --- from the peer plane


class PeerUp(Event, frozen=True, kw_only=True):
    """The other daemon answers. Messages to its earlier process, or lost since, must be sent again.

    One event per job that both belong to. Messages sent after it arrive, in order, once, until PeerDown or the next
    PeerUp.
    """

    node: str
    fresh: bool = True  # it is another process than the one before


class PeerDown(Event, frozen=True, kw_only=True):
    """Nothing was received from the other daemon for the peer timeout. Messages to it are dropped until PeerUp.

    rests: it is not silent; neither side has use for the link now. A message to it makes another one.
    """

    node: str
    rests: bool = False


class Reports(Event, frozen=True, kw_only=True):
    """Reports of nodes that arrived together, as ``together`` picks them: facts first, what follows from them once."""

    reports: tuple[Report, ...]


_TOGETHER = (SegmentsStaged, SegmentsReleased, Encoded, Drained, VoteWritten)  # how far a node has come with a save


def together(events: Iterable[Event]) -> list[Event]:
    """The same events in the same order, but reports of one job that follow each other, of how far saves are, as one.

    Each node says the same at about the same time, and the coordinator looks at its whole job after each event.
    """
    found: list[Event] = []
    for job, some in itertools.groupby(events, _job_of_progress):
        row = list(some)
        reports = tuple(event for event in row if isinstance(event, Report))
        found += [Reports(job=job, reports=reports)] if job is not None and len(reports) > 1 else row
    return found


def progress(event: Event) -> tuple[str, SaveId] | None:
    """What it says of a save, if it reports how far a node has come with it, as all nodes do at about that time.

    None for anything else, and for a failure: that is not for others to wait with.
    """
    fact = event.event if isinstance(event, Report) else None
    if not isinstance(fact, _TOGETHER) or (isinstance(fact, Encoded | Drained | VoteWritten) and fact.problem):
        return None
    return type(fact).__name__, fact.save


def _job_of_progress(event: Event) -> JobKey | None:
    return event.job if isinstance(event, Report) and isinstance(event.event, _TOGETHER) else None


# --- from the store


@dataclass(frozen=True, slots=True)
class OnStore:
    """One committed checkpoint on the store."""

    save: SaveId
    world_size: int
    nbytes: int
    dirname: str
    compared: str = ""  # of what its ranks hold alike, as its record says: a Compared


@dataclass(frozen=True, slots=True)
class Partial:
    """One unfinished directory on the store."""

    save: SaveId
    complete: bool  # the votes there cover every rank: it can be committed from them alone


@dataclass(frozen=True, slots=True)
class Recorded:
    """One incarnation record of the store."""

    incarnation: int
    run: RunId
    session: str


class StoreRemembered(Event, frozen=True, kw_only=True):
    """To which store an earlier run of the job was saved, as this node's arena has it."""

    store_id: str


class StoreScanned(Event, frozen=True, kw_only=True):
    """What lies on the store; ``problem`` not empty: it did not answer, and the lists mean nothing.

    ``after``: that of the action: the scan began when the record of this number was on the store.
    ``claimed``: the number that the action claims. ``lost``: somebody else has it.
    ``others``: other jobs with checkpoints there, when this one has none: names for a user. ``former``: ids of other
    stores to which arenas know that the job was saved before. ``cures``: what to type against what ``notes`` name.
    """

    after: int = 0
    claimed: int = 0
    lost: bool = False
    others: tuple[str, ...] = ()
    former: tuple[str, ...] = ()
    store_id: str = ""
    records: tuple[Recorded, ...] = ()
    committed: tuple[OnStore, ...] = ()
    partials: tuple[Partial, ...] = ()
    notes: tuple[str, ...] = ()
    cures: tuple[str, ...] = ()
    problem: str = ""


class IncarnationTaken(Event, frozen=True, kw_only=True):
    """The number that the session owns. ``problem`` not empty: the store did not answer, or (``hopeless``) never will.

    Then the number is the clock's. ``run`` was drawn for it in either case.
    """

    session: str
    number: int = 0
    run: RunId
    store_id: str = ""
    warnings: tuple[str, ...] = ()
    problem: str = ""
    hint: str = ""
    hopeless: bool = False  # no such directory, no permission: a setting must change


class DrainMoved(Event, frozen=True, kw_only=True):
    """So many bytes of each rank's images are written by this node. It stays here: a status asks for it."""

    save: SaveId
    by_rank: tuple[tuple[int, int], ...] = ()


class ParityDrained(Event, frozen=True, kw_only=True):
    """This node's parity lies on the store, synced, as a vote names it, or ``problem`` says why not."""

    save: SaveId
    parity: ParityRecord | None = None
    problem: str = ""


class CommitEnded(Event, frozen=True, kw_only=True):
    """The checkpoint has its final name and everything is synced, or ``problem`` says why not.

    ``taken_over``: it has, but another session had taken this incarnation before: it is not durable.
    """

    save: SaveId
    nbytes: int = 0
    taken_over: int = 0
    problem: str = ""
    left_out: str = ""  # why plain dcp.load does not read it, though it was meant to


class StepReached(Event, frozen=True, kw_only=True):
    """The training has reached a step, ``ago_s`` ago, as ranks of the coordinator's node say by ``client.step``."""

    session: str
    step: Step
    ago_s: float = 0.0


class BlockScrubbed(Event, frozen=True, kw_only=True):
    """A block that lies in the arena was read. ``damage`` not empty: it is not as its digest says, and that is sure.

    ``gone``: the slot holds something else by now, or nothing. ``last``: no block follows.
    """

    name: str
    save: SaveId
    nbytes: int = 0
    last: bool = False
    damage: str = ""
    gone: bool = False


class BlockCopied(Event, frozen=True, kw_only=True):
    """The block in the slot is the store's, and proved; or ``problem``."""

    name: str
    save: SaveId
    problem: str = ""


class PieceScrubbed(Event, frozen=True, kw_only=True):
    """A piece of a checkpoint on the store was read. ``next``: where to continue; None: that was the rest.

    ``gone``: it is not there any more. ``problem``: the store did not answer, and nothing is known.
    """

    save: SaveId
    next: Place | None = None
    nbytes: int = 0
    harms: tuple[Harm, ...] = ()
    gone: bool = False
    problem: str = ""


class CheckpointRemoved(Event, frozen=True, kw_only=True):
    """Retention's removal ended; ``problem`` not empty: it did not. ``pinned``: it stays because the user says so."""

    save: SaveId
    problem: str = ""
    pinned: bool = False
