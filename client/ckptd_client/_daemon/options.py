"""The options that connect was given, and which of them all ranks of a job must give alike."""

from dataclasses import dataclass

from ckptd.shared.base.ids import JobKey
from ckptd.shared.format.integrity import Integrity
from ckptd.shared.format.schemes import Scheme
from ckptd.shared.protocol.messages import Cadence
from ckptd_client._daemon.settings import UNPROVED, Proof
from ckptd_client._state.naming import NOTHING_NAMED, Named
from ckptd_client._state.pickle import NO_PICKLE, PickleKeys
from ckptd_client._state.sampling import DRAINED, Verify


@dataclass(frozen=True, slots=True)
class Settings:
    """What connect was told."""

    arena: str
    cadence: Cadence
    takeover: bool
    connect_timeout_s: float
    unstarted: str = ""  # why connect starts no daemon, with the way to have it start one; empty: it does
    store_id: str = ""  # empty: none in particular
    pickle_keys: PickleKeys = NO_PICKLE
    redundancy: Scheme | None = None  # None: as rank 0's daemon is configured
    set_size: int | None = None
    balance: bool | None = None  # None: as this node's daemon is configured
    verify: Verify = DRAINED
    proof: Proof = UNPROVED
    named: Named = NOTHING_NAMED  # what each rank has for itself, and what all hold alike

    @property
    def autostart(self) -> bool:
        """Whether connect starts a daemon where none runs."""
        return not self.unstarted

    @property
    def integrity(self) -> Integrity:
        """How everything that is saved and loaded is proved; the daemon has the same."""
        return self.proof.integrity

    def alike(self, job: JobKey) -> tuple[tuple[str, str], ...]:
        """What each rank of a job must be told alike, else they wait for each other, or save what does not fit."""
        every = f"{self.cadence.seconds:g}s" if self.cadence.seconds else self.cadence.steps
        drained = self.verify.every or "off"
        given = {
            "job": job.job,
            "store": job.store,
            "drain_every": every,
            "verify_replicas": "drained" if self.verify.drained else drained,
            "replicated": list(self.named.replicated),
            "per_rank": list(self.named.per_rank),
        }
        return tuple((name, repr(value)) for name, value in given.items())
