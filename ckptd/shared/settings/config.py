"""Every setting of the daemon, one annotated field each: TOML key, variable, flag, check and help follow from it."""

import os
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from ckptd.shared.base.ids import StorePath, StoreUrl
from ckptd.shared.format.schemes import DEFAULT, Scheme
from ckptd.shared.format.schemes.layout import MAX_SET_SIZE
from ckptd.shared.protocol.topology import MIN_SET_SIZE, Domain

_SIZE = {"kind": "size", "such_as": "64G"}
_DURATION = {"kind": "duration"}
_NAME = {
    "kind": "text",
    "allowed": "a text of letters, digits and . _ -, the first one no sign, at most 255",
    "such_as": "node-1",
}
_LABEL = {"kind": "text", "allowed": "a text of at most 255 characters", "such_as": "rack-1"}
_ADDRESS = {"kind": "text", "allowed": "a host name, an address, or an interface such as ib0", "such_as": "ib0"}


def default_arena() -> str:
    """This user's arena on the machine's shared memory."""
    return f"/dev/shm/ckptd-{os.getuid()}"  # noqa: S108  # the process that opens it checks owner and mode


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """The daemon's settings. Sizes are bytes, durations seconds."""

    arena: Annotated[StorePath, Meta(description="directory on tmpfs that holds the slots")] = msgspec.field(
        default_factory=default_arena
    )
    store: Annotated[StoreUrl | None, Meta(description="default directory on the parallel file system")] = None
    budget_nbytes: Annotated[int, Meta(ge=0, extra=_SIZE, description="most the arena may hold; 0: found out")] = 0
    slots_per_rank: Annotated[int, Meta(ge=2, le=64, description="reusable slots of each rank")] = 3
    stage_timeout_s: Annotated[
        float, Meta(gt=0, extra=_DURATION, description="how long a step may take to be staged on all ranks")
    ] = 300.0
    read_timeout_s: Annotated[
        float, Meta(gt=0, extra=_DURATION, description="how long a rank may read in a load while others wait for it")
    ] = 3600.0
    store_timeout_s: Annotated[
        float, Meta(gt=0, extra=_DURATION, description="how long connect and load wait for the store")
    ] = 10.0
    store_hang_s: Annotated[
        float, Meta(gt=0, extra=_DURATION, description="silence after which a store's worker is replaced")
    ] = 300.0
    stop_drain_s: Annotated[float, Meta(ge=0, extra=_DURATION, description="how long SIGTERM waits for a drain")] = 20.0
    orphan_ttl_s: Annotated[
        float, Meta(ge=0, extra=_DURATION, description="how long a crashed job's memory is kept for it")
    ] = 86400.0
    drain_bandwidth: Annotated[int, Meta(ge=0, extra=_SIZE, description="cap of a drain, bytes/s; 0: none")] = 0
    worker_nice: Annotated[int, Meta(ge=0, le=19, description="niceness of the processes that drain")] = 5
    worker_ionice: Annotated[
        int, Meta(ge=0, le=7, description="their place in the queue of a local disk, 0 first to 7 last")
    ] = 7
    hash_threads: Annotated[int, Meta(ge=1, le=64, description="threads that take digests")] = 1
    keep_last: Annotated[int, Meta(ge=1, description="committed checkpoints kept per job")] = 3
    keep_every: Annotated[
        int, Meta(ge=0, description="and those whose step is a multiple of this many are kept for good; 0: none")
    ] = 0
    connect_timeout_s: Annotated[
        float, Meta(gt=0, extra=_DURATION, description="how long connect waits for the job's old ranks to end")
    ] = 30.0
    redundancy: Annotated[
        Scheme, Meta(description="against the loss of nodes of a set: " + ", ".join(f"{s} {s.losses}" for s in Scheme))
    ] = DEFAULT
    set_size: Annotated[int, Meta(ge=MIN_SET_SIZE, le=MAX_SET_SIZE, description="nodes that protect each other")] = 8
    balance: Annotated[
        Literal["rows", "off"],
        Meta(description="whether replicas each save a slice of what they all hold (rows), or all of it (off)"),
    ] = "rows"
    drain_parity: Annotated[
        bool, Meta(description="write parity to the store too, so that ckptd rebuild PATH can mend a checkpoint there")
    ] = False
    scrub_memory: Annotated[
        int, Meta(ge=0, extra=_SIZE, description="bytes/s at which idle slots are read again and verified; 0: never")
    ] = 4 << 20
    scrub_memory_every_s: Annotated[
        float, Meta(gt=0, extra=_DURATION, description="how long after that they are read again")
    ] = 3600.0
    scrub_store: Annotated[
        int, Meta(ge=0, extra=_SIZE, description="bytes/s at which committed checkpoints are read again; 0: never")
    ] = 0
    scrub_store_every_s: Annotated[
        float, Meta(gt=0, extra=_DURATION, description="how long after that they are read again")
    ] = 86400.0
    node: Annotated[
        str,
        Meta(
            pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]{0,254})?\Z",
            extra=_NAME,
            description="name of this node; none: the host's",
        ),
    ] = ""
    domain: Annotated[
        Domain, Meta(extra=_LABEL, description="what fails together, such as a rack; none: the node by itself")
    ] = ""
    peer_address: Annotated[
        str,
        Meta(
            pattern=r"^[A-Za-z0-9.:%_-]{0,255}\Z",
            extra=_ADDRESS,
            description="where other nodes' daemons reach this one; none: the host's name",
        ),
    ] = ""
    peer_port: Annotated[int, Meta(ge=0, le=65535, description="port for other nodes' daemons; 0: any")] = 0
    bulk_port: Annotated[
        int, Meta(ge=0, le=65535, description="second port, where other nodes fetch bytes for redundancy; 0: any")
    ] = 0
    peer_timeout_s: Annotated[
        float, Meta(gt=0, extra=_DURATION, description="silence after which another node's daemon counts as lost")
    ] = 10.0
    key_file: Annotated[
        StorePath | None, Meta(description="key pair of ckptd keygen; none: one of the arena's own")
    ] = None
    integrity: Annotated[
        Literal["auto", "xxh3", "keyed"],
        Meta(
            description="digests that find accidents (xxh3), or that nobody makes without a key; auto: if there is one"
        ),
    ] = "auto"
    integrity_key_file: Annotated[
        StorePath | None, Meta(description="key of ckptd keygen --integrity, for integrity = keyed")
    ] = None
    exit_when_empty: Annotated[bool, Meta(description="leave when no job is left, as a client-started daemon does")] = (
        False
    )
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="least severe message to log")
    ] = "info"
