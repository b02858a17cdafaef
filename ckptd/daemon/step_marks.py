"""The step that a training has reached, as its ranks write it: sampled off their step boards, for the job's journal.

Only of ranks of this node, and only where this daemon coordinates the job: nothing travels for it.
"""

import os
import time
from collections.abc import Callable

from ckptd.core import events as ev
from ckptd.core.jobs import Catalogue, Job
from ckptd.shared.base.ids import JobKey
from ckptd.shared.format import arena_paths, step_board

PERIOD_S = 30.0


class StepMarks:
    """``deliver`` takes what is new. All in the main thread: a look reads 16 bytes of memory for each rank."""

    def __init__(self, arena: str, catalogue: Catalogue, deliver: Callable[[ev.Event], None]) -> None:
        self._arena, self._catalogue, self._deliver = arena, catalogue, deliver
        self._seen: dict[JobKey, tuple[str, int]] = {}  # session and step that were delivered last
        self._at = float("-inf")

    def next_deadline(self) -> float | None:
        """When tick has something to do (time.monotonic); None while no rank of such a job is here."""
        return self._at + PERIOD_S if any(map(_coordinates, self._catalogue.jobs.values())) else None

    def tick(self) -> None:
        """Looks if it is time to."""
        if time.monotonic() >= self._at + PERIOD_S:
            self.look()

    def look(self) -> None:
        """Delivers each job's newest step, if that is another one than before. Boards are looked at before they go."""
        self._at = time.monotonic()
        self._seen = {key: seen for key, seen in self._seen.items() if key in self._catalogue.jobs}
        for key, job in list(self._catalogue.jobs.items()):
            if not _coordinates(job):
                continue
            session = job.node.membership.session
            found = [
                self._read(key, rank, session)
                for rank, one in job.node.ranks.admitted.items()
                if one.session == session
            ]
            step, at = max(found, default=(-1, 0.0))
            if step >= 0 and self._seen.get(key) != (session, step):
                self._seen[key] = session, step
                self._deliver(ev.StepReached(job=key, session=session, step=step, ago_s=max(0.0, self._at - at)))

    def _read(self, job: JobKey, rank: int, session: str) -> tuple[int, float]:
        """Its step, and when it came to it."""
        path = os.path.join(self._arena, arena_paths.job_dir(job), arena_paths.steps_name(rank, session))
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:  # it has not called step, or its board cannot be read: it is another program's file then
            return -1, 0.0
        try:
            return step_board.decode_mark(os.pread(fd, step_board.MARK_NBYTES, step_board.MARK_OFFSET))
        except OSError:
            return -1, 0.0
        finally:
            os.close(fd)


def _coordinates(job: Job) -> bool:
    return job.node.coordinator == job.node.node and bool(job.node.ranks.admitted)
