"""A rank that has no step board, as where the memory is full: a signal to it is not lost all the same."""

import logging
import time
from typing import Any, Final

from ckptd.shared.base.ids import JobKey
from ckptd.shared.protocol.messages import AskStatus, StatusReply
from ckptd_client._local.rank import Group
from ckptd_client._preempt.requests import Telling

log = logging.getLogger("ckptd_client")
_AGREE_S: Final = 5.0  # how long the first step after the signal may wait for the step of all
_PAUSE_S: Final = 0.02


class Boardless:
    """Asks the daemon, by messages, at which step all ranks save, once this rank has heard a signal."""

    def __init__(self, job: JobKey, group: Group, telling: Telling) -> None:
        self._job = job
        self._group = group
        self._telling = telling
        self._fixed: int | None = None
        self.agreed: int | None = None  # the step of all, once the daemons have said it

    def asks(self, step: int) -> bool:
        """Whether to save at this step; the daemon was sent the signal before. Blocks for 5 s at most, once."""
        if self._group.world_size == 1:
            return True
        deadline = time.monotonic() + _AGREE_S
        while self._fixed is None and time.monotonic() < deadline:
            if not self._telling.busy:
                self._telling.send("preemption", lambda seq: AskStatus(seq=seq), self._learn)
            time.sleep(_PAUSE_S)
        if self._fixed is None:
            self._fixed = step
            log.warning(
                "ckptd: preemption: rank %d has no step board and did not learn in %g s at which step all ranks save: "
                "it saves at step %d; `ckptd status` names the ranks that save at another one",
                self._group.rank, _AGREE_S, step,
            )  # fmt: skip
        return step >= self._fixed

    def _learn(self, answer: Any) -> None:
        assert isinstance(answer, StatusReply)  # noqa: S101 - the reply to AskStatus
        for job in answer.status.jobs:
            agreed = job.preempt_step is not None and job.preempt_step >= 0
            if agreed and (job.store, job.job) == (self._job.store, self._job.job):
                self._fixed = self.agreed = job.preempt_step
