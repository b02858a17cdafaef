"""The picture a daemon gives of itself: what ``ckptd status --json`` prints, versioned by ``schema``."""

import msgspec

from ckptd.protocol.ids import SaveId

SCHEMA = 1


class DrainStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A drain that runs, or waits to be tried again."""

    save: SaveId
    nbytes: int
    nbytes_done: int
    seconds: float
    bytes_per_s: float
    seconds_left: float | None
    attempt: int
    last_error: str = ""
    retry_in_s: float | None = None


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


class NodeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One node of a job, as the job's coordinator sees it."""

    node: str
    domain: str  # what fails together; empty: the node itself
    ranks: list[int]
    reachable: bool
    set_index: int  # of its redundancy set
    encoded_step: int | None  # the newest it has whole parity of
    problem: str = ""


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


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The process that speaks to one store."""

    store: str
    pid: int
    busy: int
    idle_s: float
    problem: str = ""


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
