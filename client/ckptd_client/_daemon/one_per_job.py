"""The jobs of this process's open clients: a second client of a job would wait for the first one to end."""

import os

from ckptd.shared.base.errors import ConnectError
from ckptd.shared.base.ids import JobKey


class Claim:
    """One client's claim to a rank of a job, from claim to give_up."""

    def __init__(self, arena: str, job: JobKey, rank: int) -> None:
        self.of = (arena, job, rank)
        self.pid = 0

    def claim(self, *, takeover: bool) -> None:
        """Raises ConnectError if another client of this process is open and takeover is False."""
        _, job, rank = self.of
        if not takeover and any(other.of == self.of and other.pid == os.getpid() for other in _claims):
            text = f"this process holds rank {rank} of job {job.job!r}: an earlier client of it is open"
            raise ConnectError(text, hint="client.close() first, or connect(..., takeover=True) to replace it")
        self.pid = os.getpid()  # a forked child has no claim
        _claims.add(self)

    def give_up(self) -> None:
        """Ends the claim. Idempotent."""
        _claims.discard(self)


_claims: set[Claim] = set()  # also of dropped clients: the process keeps their locks until it ends
