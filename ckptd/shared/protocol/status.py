"""The picture a daemon gives of itself: what ``ckptd status --json`` prints, versioned by ``schema``."""

from typing import Annotated

import msgspec

from ckptd.shared.base.ids import SaveId

SCHEMA = 1  # another number when a field goes or comes to mean something else; fields are added under the same one
MAX_RANKS = 1024  # that one daemon lists, for each job
MAX_PROBLEMS = 64
MAX_RUNS = 64  # of missing ranks
SILENT_S = 15.0  # longer than one sync takes on a good day: status must not wait for store_hang_s to report it

_Text = Annotated[str, msgspec.Meta(max_length=8192)]


class Unsafe(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is less safe than a user believes, in words."""

    code: str  # stays the same; ckptd/cli/view/unsafe.py has them all
    text: str
    hint: str  # what to type or to change
    job: str = ""  # empty: the whole daemon
    store: str = ""  # of the job: two jobs of one name in two stores are two

    def is_of(self, job: "JobStatus") -> bool:
        """Whether it is said of this one."""
        return (self.job, self.store) == (job.job, job.store)


class Histogram(msgspec.Struct, frozen=True, kw_only=True):
    """How many values lay where. counts: one for each bound, of values up to it and above the last; then the rest."""

    what: str  # staged, protected, durable: seconds from the end of a save's first stall; drain_bytes_per_s; restore
    bounds: list[float]
    counts: list[int]
    total: float  # of all values
    tier: str = ""  # of a restore: from which most ranks read


class Goodput(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds by what they were used for; ettr: effective training time ratio, training_s / total_s.

    total_s is without idle_s, in which nobody wanted to train.
    """

    total_s: float
    training_s: float
    stall_s: float
    restore_s: float
    repeated_s: float
    start_s: float
    unexplained_s: float
    idle_s: float
    ettr: float | None  # None: no time has passed
    failures: int  # runs that ended without their own doing
    step_s: float | None  # usual duration of a step


def spent(goodput: Goodput) -> dict[str, float]:
    """Seconds by kind: together, the wall time."""
    kinds = ("training", "repeated", "stall", "restore", "start", "unexplained", "idle")
    return {kind: getattr(goodput, f"{kind}_s") for kind in kinds}


class TotalsStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Of all runs of a job that are on record, whichever daemons and nodes they had."""

    runs: int
    failed_runs: int  # that ended without their own doing, and another run began since
    staged_nbytes: int  # by saves of all ranks
    drained_nbytes: int
    losses: dict[str, int]  # of nodes, arenas, ranks
    lost_steps: int  # known to have been done, and not in what was loaded
    missing: int  # records that were dropped while the store was away


class PaceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How often saves are due to be drained, and how long the store takes for one."""

    save_every_s: float | None  # between the last ones that were due
    save_every_steps: int | None
    drain_s: float | None  # of the last that ended well, or of the one that runs if that has taken longer
    drain_bytes_per_s: float | None  # of the last that ended well
    outrun: int  # saves of this incarnation that were due and never had their turn
    due_s: float = 0.0  # since a save was due, or the last became durable while others waited; 0: none is due


class RestoreStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A load that runs."""

    phase: str  # collecting, fetching, draining, reading
    seconds: float  # since the first rank called it
    step: int | None  # that is read; None: not chosen yet
    ranks: int  # that have called it; while it reads, that have read
    missing: list[tuple[int, int]]  # the others, as runs from first to last


class DrainStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A drain that runs, or waits to be tried again."""

    save: SaveId
    nbytes: int
    nbytes_done: int
    seconds: float
    bytes_per_s: float
    seconds_left: float | None  # until bytes are written, by the rate of the last drain
    attempt: int
    last_error: str = ""
    retry_in_s: float | None = None


class DamageStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Damage that a scrub has found, and that nothing could make good."""

    node: str
    tier: str  # arena: a slot; rebuilt: parity in memory; pfs: a file of a committed checkpoint
    step: int
    rank: int | None  # None: of no rank
    what: str


class ScrubStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What this daemon has read again of a job; damaged: of all nodes where it coordinates."""

    memory_nbytes: int
    memory_age_s: float | None  # since something was read to its end last
    store_nbytes: int
    store_age_s: float | None
    found: int  # damaged blocks and files
    mended: int  # of them
    damaged: list[DamageStatus]


class CheckpointStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint, wherever it is."""

    step: int
    incarnation: int
    counter: int
    phase: str  # staging, staged, draining, committing, durable, or an end
    milestone: str | None
    end: str | None
    reason: str
    tiers: list[str]
    ranks: int
    world_size: int
    nbytes: int
    age_s: float | None
    protected: bool = False  # every redundancy set has encoded it; durable outranks that and does not imply it
    replicas: str = ""  # of replicas "all" bytes or a "window" were compared, or they are "differing"; empty: none
    run: str = ""  # the id of the run that saved it, in hex: of two runs of one incarnation all else may be the same
    missing: list[tuple[int, int]] = []  # ranks that have not delivered it yet, as runs from first to last


class RankStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One rank that is attached, or whose slots are still here."""

    rank: int
    host: str
    pid: int
    alive: bool
    slots: int
    slots_in_use: int
    slot_nbytes: int
    newest_step: int | None
    drain_nbytes: int = 0  # of the drain that runs, what its node writes of this rank; 0: nothing
    drain_nbytes_done: int = 0
    attached: bool = True  # False: its process lives, and has not called this daemon since that started
    late: str = ""  # what verifies copies that run while it trains, or why there are none; empty: nothing is attached


class NodeReport(msgspec.Struct, frozen=True, kw_only=True):
    """What the daemon of a node says of itself when the daemon of another one asks."""

    version: _Text
    pid: int
    uptime_s: float
    budget_nbytes: int
    used_nbytes: int
    tightest_limit: _Text
    ranks: Annotated[list[RankStatus], msgspec.Meta(max_length=MAX_RANKS)]  # of this job
    problems: Annotated[list[_Text], msgspec.Meta(max_length=MAX_PROBLEMS)]  # of the store, the job, the daemon
    clock: float = 0.0  # seconds since 1970 there as it answered; 0: it does not say
    ahead_s: float | None = None  # of its clock, by the daemon that asked: 0 within the time that the answer took


class NodeStatus(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One node of a job, as the job's coordinator sees it."""

    node: str
    domain: str  # what fails together; empty: the node itself
    ranks: list[int]
    reachable: bool
    set_index: int  # of its redundancy set
    encoded_step: int | None  # the newest it has whole parity of
    problem: str = ""
    drain_nbytes: int = 0  # its share of the drain that runs
    drain_nbytes_done: int = 0
    drain_voted: bool = False  # its share is synced, and it has said so
    report: NodeReport | None = None  # None: it was not asked, or did not answer in time


class JobStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One job on this node."""

    job: str
    store: str
    incarnation: int
    world_size: int
    ranks: list[RankStatus]
    checkpoints: list[CheckpointStatus]  # newest first
    drain: DrainStatus | None
    errors: list[str]
    scheme: str = "none"  # asked for: none, xor, double
    set_size: int = 0
    coordinator: str = ""  # the node whose daemon knows of all nodes
    nodes: list[NodeStatus] = []
    degraded: list[str] = []  # what is less safe than it was asked to be
    silent: list[str] = []  # nodes that were asked and did not answer in time; then the rest may be old, too
    preempt_step: int | None = None  # at which ranks that ask save: somebody is about to end the job; -1: being agreed
    store_seen: bool = True  # False: this daemon coordinates the job, and does not know yet what is durable
    store_problem: str = ""  # of the look after which store_seen is still false; empty: there was none, or it is true
    ends: dict[str, int] = {}  # saves by how they ended last: all on record, else all that this coordinator knows
    restore: RestoreStatus | None = None  # as its coordinator sees it
    pace: PaceStatus | None = None  # as its coordinator sees it
    histograms: list[Histogram] = []  # of all saves, drains and loads on record; empty: the journal is not read yet
    goodput: Goodput | None = None  # where the time of all runs on record went until now; None as of histograms
    totals: TotalsStatus | None = None  # likewise
    scrub: ScrubStatus | None = None  # None: neither memory nor store is scrubbed, and nothing was found


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The process that speaks to one store."""

    store: str
    pid: int
    busy: int
    idle_s: float
    problem: str = ""

    @property
    def silent(self) -> bool:
        """Whether it has been at work for so long without a word that somebody should look."""
        return self.busy > 0 and self.idle_s >= SILENT_S


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """Everything."""

    schema: int
    version: str
    node: str
    pid: int
    arena: str
    uptime_s: float
    budget_nbytes: int
    used_nbytes: int
    tightest_limit: str
    jobs: list[JobStatus]
    workers: list[WorkerStatus]
    refused_messages: int
    errors: list[str]
    long_turns: int = 0  # of the daemon's loop, above 50 ms: ranks and other nodes wait for each
    longest_turn_s: float = 0.0
    began_at: float = 0.0  # seconds since 1970 by this node's clock as it began to serve; 0: an older daemon
    unsafe: list[Unsafe] = []  # the worst first; the command line adds it
