"""Which jobs this process holds open: a second client of one would wait for the first to end."""

import os

from ckptd.shared.base.errors import ConnectError
from ckptd.shared.base.ids import JobKey


class Holding:
    """One client's claim to be a rank of a job, from claim to give_up."""

    def __init__(self, arena: str, job: JobKey, rank: int) -> None:
        self.of = (arena, job, rank)
        self.pid = 0

    def claim(self, *, takeover: bool) -> None:
        """Raises ConnectError when another client of this process has not been closed; takeover goes past it."""
        _, job, rank = self.of
        if not takeover and any(other.of == self.of and other.pid == os.getpid() for other in _claims):
            text = f"this process holds rank {rank} of job {job.job!r}: an earlier client of it is open"
            raise ConnectError(text, hint="client.close() first, or connect(..., takeover=True) to replace it")
        self.pid = os.getpid()  # a forked child holds nothing
        _claims.add(self)

    def give_up(self) -> None:
        """Idempotent."""
        _claims.discard(self)


_claims: set[Holding] = set()  # also of clients that were dropped: their locks are held until the process ends
