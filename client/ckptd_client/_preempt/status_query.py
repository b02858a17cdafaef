"""Finds the step of a preemption for a rank without a step board, for example because the memory is full."""

import logging
import time
from typing import Any, Final

from ckptd.shared.base.ids import JobKey
from ckptd.shared.protocol.messages import AskStatus, StatusReply
from ckptd_client._local.rank import Group
from ckptd_client._preempt.requests import RequestQueue

log = logging.getLogger("ckptd_client")
_AGREE_S: Final = 5.0  # wait of the first step after the signal for the agreed step
_PAUSE_S: Final = 0.02


class StatusQuery:
    """Asks the daemon for its status until it has the step at which all ranks save."""

    def __init__(self, job: JobKey, group: Group, requests: RequestQueue) -> None:
        self._job = job
        self._group = group
        self._requests = requests
        self._fixed: int | None = None
        self.agreed: int | None = None  # the step of all ranks, once the daemons agree

    def is_due(self, step: int) -> bool:
        """Whether to save at this step; the daemon has received the signal. Blocks for 5 s at most, once."""
        if self._group.world_size == 1:
            return True
        deadline = time.monotonic() + _AGREE_S
        while self._fixed is None and time.monotonic() < deadline:
            if not self._requests.busy:
                self._requests.send("preemption", lambda seq: AskStatus(seq=seq), self._on_status)
            time.sleep(_PAUSE_S)
        if self._fixed is None:
            self._fixed = step
            log.warning(
                "ckptd: preemption: rank %d has no step board and did not learn in %g s at which step all ranks save: "
                "it saves at step %d; `ckptd status` names the ranks that save at another one",
                self._group.rank, _AGREE_S, step,
            )  # fmt: skip
        return step >= self._fixed

    def _on_status(self, answer: Any) -> None:
        assert isinstance(answer, StatusReply)  # noqa: S101 - the reply to AskStatus
        for job in answer.status.jobs:
            agreed = job.preempt_step is not None and job.preempt_step >= 0
            if agreed and (job.store, job.job) == (self._job.store, self._job.job):
                self._fixed = self.agreed = job.preempt_step
