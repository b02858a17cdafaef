"""The options of connect, and those that must be equal on all ranks of a job."""

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
    """The options of connect."""

    arena: str
    cadence: Cadence
    takeover: bool
    connect_timeout_s: float
    unstarted: str = ""  # why connect starts no daemon; empty: it does
    store_id: str = ""  # empty: any store
    pickle_keys: PickleKeys = NO_PICKLE
    redundancy: Scheme | None = None  # None: the setting of rank 0's daemon
    set_size: int | None = None
    balance: bool | None = None  # None: the setting of this node's daemon
    verify: Verify = DRAINED
    proof: Proof = UNPROVED
    named: Named = NOTHING_NAMED  # names with a value per rank, and names equal on all ranks

    @property
    def autostart(self) -> bool:
        """Whether connect starts a daemon if none runs."""
        return not self.unstarted

    @property
    def integrity(self) -> Integrity:
        """The proof of all saved and loaded data; the daemon has the same."""
        return self.proof.integrity

    def alike(self, job: JobKey) -> tuple[tuple[str, str], ...]:
        """Names and values of options that must be equal on all ranks, else ranks would wait or save different data."""
        every = f"{self.cadence.seconds:g}s" if self.cadence.seconds else self.cadence.steps or "auto"
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
