"""Other holders of a rank of a job: clients of this process, and ranks of one training that connect as two runs.

Each of the latter is rank 0 of 1, since they have no process group, and one parent started both at the same time:
torch.multiprocessing, srun or mpirun. The advice to end or replace the other one is wrong then. Processes of a shell
or a script may be two separate runs.
"""

import multiprocessing
import os

from ckptd.shared.base.errors import ConnectError
from ckptd.shared.base.ids import JobKey
from ckptd.shared.files import locks
from ckptd.shared.format.arena_paths import RANK_SUFFIX
from ckptd_client._local.processes import Process, parent_process, process_of

_LAUNCHERS = {"slurmstepd", "mpirun", "mpiexec", "orterun", "prterun", "orted", "prted", "hydra_pmi_proxy"}
_TOGETHER_S = 2.0  # a launcher starts ranks together; another run starts later


def sibling(own: str) -> Process | None:
    """A process of the same parent that holds, or asks for, a rank of the job; None if there is none.

    own: this process's rank file, which must not be opened again. The other ranks' files are in its directory.
    """
    parent, this = parent_process(), process_of(os.getpid())
    if parent is None or this is None or not _starts_ranks(parent):
        return None
    directory, mine = os.path.split(own)
    names = sorted(os.listdir(directory)) if os.path.isdir(directory) else []
    others = [name for name in names if name.endswith(RANK_SUFFIX) and name != mine]
    found = [process_of(locks.holder(os.path.join(directory, name))) for name in others]
    same = [one for one in found if one is not None and one.parent == parent.pid != one.pid]
    return next((one for one in same if abs(one.began_s - this.began_s) <= _TOGETHER_S), None)


def cause_of(error: ConnectError, job: str, own: str) -> ConnectError:
    """The error, or its cause if the other run of the job is a rank of this training. own: see sibling."""
    other = sibling(own)
    return error if other is None else not_one_group(job, other)


def _starts_ranks(parent: Process) -> bool:
    return multiprocessing.parent_process() is not None or parent.name in _LAUNCHERS


def not_one_group(job: str, other: Process) -> ConnectError:
    """The error in place of "the job is still running"."""
    text = (
        f"job {job!r} is held by pid {other.pid}, a process of the same parent (pid {other.parent}): two ranks of one "
        'training? Both came as "rank 0 of 1", as they have no process group'
    )
    hint = (
        "torch.distributed.init_process_group(...) before connect, or start with torchrun; two separate jobs: another "
        f"job name for each; pid {other.pid} is a leftover: kill {other.pid}"
    )
    return ConnectError(text, hint=hint)


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
