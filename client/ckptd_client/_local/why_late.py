"""Why a save has not reached a milestone, as far as this node's daemon knows, and what to type. Pure."""

from typing import NamedTuple

from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.protocol.messages import Milestone
from ckptd.shared.protocol.status import CheckpointStatus, DrainStatus, JobStatus, Status

_MB = 1e6


class Cause(NamedTuple):
    """A clause that follows "step 7 is staged after 5 s", and what to type. Empty: the cause is unknown."""

    text: str = ""
    hint: str = ""


def why_late(status: Status, job: JobKey, save: SaveId, wanted: Milestone) -> Cause:
    """The cause for a save of this rank whose wait timed out."""
    found = next((one for one in status.jobs if (one.store, one.job) == (job.store, job.job)), None)
    if found is None:
        return Cause()
    watch = f"ckptd status --watch --arena {status.arena}"
    one = next((c for c in found.checkpoints if (c.incarnation, c.counter) == (save.incarnation, save.counter)), None)
    if one is not None and one.milestone is None:
        return _of_ranks(one, watch)
    if wanted is Milestone.PROTECTED and found.degraded:
        return Cause(found.degraded[0], watch)
    silent = next((w for w in status.workers if w.store == job.store and (w.problem or w.silent)), None)
    if silent is not None:
        problem = silent.problem or f"has not answered for {silent.idle_s:.0f} s"
        return Cause(f"the store {job.store}: {problem}", f"is the mount alive? timeout 10 stat -f {job.store}")
    if found.drain is not None:
        failed = found.drain.retry_in_s is not None
        again = "once its cause is gone, the drain is tried again by itself"
        hint = again if failed else "wait longer, or see how it goes on"
        return Cause(_of_drain(found.drain, job, save), f"{hint}: {watch}")
    return _elsewhere(found, status.node, watch)


def _of_ranks(one: CheckpointStatus, watch: str) -> Cause:
    if one.reason:
        return Cause(f"it {one.reason}", watch)
    if one.ranks < one.world_size:
        return Cause(f"{one.ranks} of {one.world_size} ranks have saved it", f"every rank must call save; {watch}")
    return Cause()


def _of_drain(drain: DrainStatus, job: JobKey, save: SaveId) -> str:
    other = drain.save != save
    whose = f"step {drain.save.step} is written first, and its" if other else "its"
    if drain.retry_in_s is not None:
        failed = f"{whose} drain to {job.store} failed: {drain.last_error}"
        return f"{failed}; it is tried again in {drain.retry_in_s:.0f} s"
    done, of, rate = drain.nbytes_done / _MB, drain.nbytes / _MB, drain.bytes_per_s / _MB
    left = f", about {drain.seconds_left:.0f} s are left" if drain.seconds_left is not None else ""
    text = f"{whose} drain to {job.store} has written {done:.4g} of {of:.4g} MB in {drain.seconds:.3g} s"
    return f"{text} ({rate:.3g} MB/s{left})"


def _elsewhere(job: JobStatus, node: str, watch: str) -> Cause:
    """The cause if the daemon of another node coordinates the job."""
    if job.coordinator and job.coordinator != node:
        return Cause(f"the daemon of node {job.coordinator} coordinates the job", f"on {job.coordinator}: {watch}")
    return Cause("", watch)
