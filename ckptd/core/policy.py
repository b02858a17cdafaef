"""The numbers the core decides by. A plain value, so that the core needs no configuration file."""

from dataclasses import dataclass, fields
from typing import Self

from ckptd.core.groups import RELAYED_FROM


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Deadlines in seconds, counts in checkpoints or slots."""

    slots_per_rank: int = 3
    keep_last: int = 3
    keep_every: int = 0  # steps; 0: none is kept for its number
    connect_timeout_s: float = 30.0
    stage_timeout_s: float = 300.0
    read_timeout_s: float = 3600.0  # of one round of a load
    drain_retry_s: float = 1.0  # doubled at each failure, up to
    drain_retry_max_s: float = 60.0
    drain_give_up_s: float = 1800.0
    store_look_s: float = 60.0  # between looks at what lies on the store, which follow a commit
    orphan_ttl_s: float = 86400.0
    empty_ttl_s: float = 60.0  # of a job that died before its first save
    encode_patience_s: float = 60.0  # after which a newer save is encoded instead
    drain_parity: bool = False  # parity goes to the store with the images
    parity_wait_s: float = 30.0  # how long a vote waits for it
    outside_wait_s: float = 3.0  # for nodes that the job has left to say what lies there
    relayed_from: int = RELAYED_FROM  # nodes of a job: leaders of groups pass packets on; the same on all nodes
    scrub_memory: int = 0  # bytes/s; 0: never
    scrub_memory_every_s: float = 3600.0
    scrub_store: int = 0
    scrub_store_every_s: float = 86400.0
    arena: str = ""  # of this node, for commands that a user is given to type
    client_started: bool = False  # nobody but a client will start the daemon again

    @classmethod
    def of(cls, settings: object, *, client_started: bool) -> Self:
        """For every job of a daemon: a number that is a setting too has the setting's value."""
        same = [field.name for field in fields(cls) if hasattr(settings, field.name)]
        return cls(**{name: getattr(settings, name) for name in same}, client_started=client_started)
