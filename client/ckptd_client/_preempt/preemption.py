"""``client.preempted(step)``: whether this is the step at which all ranks save, since the job is about to be ended."""

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from ckptd.shared.base.ids import JobKey
from ckptd.shared.format import arena_paths, step_board
from ckptd.shared.protocol.messages import AskPreempt, AskStatus, Request, StatusReply
from ckptd_client._daemon.link import Link
from ckptd_client._daemon.settings import as_step
from ckptd_client._daemon.turns import Owner
from ckptd_client._local.rank import Group
from ckptd_client._preempt.requests import RequestQueue
from ckptd_client._preempt.signals import Listener
from ckptd_client._preempt.step_board import KeptBoard, StepBoard

log = logging.getLogger("ckptd_client")
_AGREE_S = 5.0  # limit of a step's wait for the daemons to agree; they wait 2 s for a silent node
_PAUSE_S = 0.0005
_AGAIN_S = 3.0  # between two reports of a signal: the daemon may have restarted
_STATUS_PAUSE_S = 0.02


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
            time.sleep(_STATUS_PAUSE_S)
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


def _not_received(signals: list[str]) -> str:
    names = " and ".join(signals)
    if threading.current_thread() is not threading.main_thread():
        return (
            f"preempted() was first called in a thread: {names} are not heard. "
            "Call it first in the main thread; `ckptd drain` is heard all the same"
        )
    return (
        f"preempted() does not hear {names}: a handler outside of Python has it, such as that of "
        "faulthandler.register. Register that with another signal; `ckptd drain` is heard all the same"
    )


class Preemption:
    """The preemption of one client. ``board``: its owner closes it."""

    def __init__(self, board: KeptBoard, job: JobKey, group: Group, requests: RequestQueue) -> None:
        self._kept = board
        self._group = group
        self._requests = requests
        self._status_query = StatusQuery(job, group, requests)
        self._listener = Listener()
        self._last = -1  # the step before this one
        self._patience_s = _AGREE_S
        self._sent_at: float | None = None
        self._passed = False  # this rank has reported that it was past the step
        if self._listener.not_received and group.rank == 0:
            log.warning("ckptd: %s", _not_received(self._listener.not_received))

    def is_due(self, step: int) -> bool:
        """See Client.preempted."""
        now = time.monotonic()
        if type(step) is not int or step < 0:
            step = as_step(step)
        board = self._kept.get(now)
        if board is None:
            return self._without_board(step, now)
        word = board.at(step)
        if word != step_board.NONE:
            return self._with_board(board, step, word)
        self._report_signal(now)
        self._last = step
        return False

    def _without_board(self, step: int, now: float) -> bool:
        answer = self._status_query.is_due(step) if self._report_signal(now) else False
        if answer:
            self._name_if_passed(step, self._status_query.agreed)
        else:
            self._last = step
        return answer

    def _with_board(self, board: StepBoard, step: int, word: int) -> bool:
        """Waits for the agreed step and compares this step with it: a preemption has begun."""
        deadline = time.monotonic() + self._patience_s
        while (answer := step_board.verdict(step, word)) is None and time.monotonic() < deadline:
            time.sleep(_PAUSE_S)
            word = board.word()
        if answer is None:
            self._patience_s = 0.0  # once: later steps do not wait
            self._report_signal(time.monotonic())
        if answer:
            self._name_if_passed(step, step_board.announced(word))
        else:
            self._last = step
        return bool(answer)

    def _name_if_passed(self, step: int, fixed: int | None) -> None:
        """Warns if this rank was past the agreed step: no checkpoint of that step has all ranks."""
        if fixed is None or self._last < fixed or self._passed:
            return
        self._passed = True
        text = (
            f"rank {self._group.rank} was at step {self._last} when it heard that all ranks save at step {fixed}: "
            f"it saves at step {step}, so no checkpoint has all ranks of step {fixed}; the newest older one stays"
        )
        log.warning("ckptd: preemption: %s", text)
        self._requests.send("preemption", lambda seq: AskPreempt(seq=seq, why=f"preemption: {text}", passed=fixed))

    def _report_signal(self, now: float) -> bool:
        """Reports a signal to the daemon; whether this rank has received one."""
        if self._listener.received:
            self._send_once(f"{self._listener.received} to rank {self._group.rank}", now)
        return bool(self._listener.received)

    def _send_once(self, why: str, now: float) -> None:
        """Sends the signal to the daemon without waiting, and again later in case the daemon has restarted."""
        if self._requests.busy or (self._sent_at is not None and now < self._sent_at + _AGAIN_S):
            return
        if self._sent_at is None:
            log.warning("ckptd: %s: all ranks are asked to save at one step", why)
        self._sent_at = now
        self._requests.send(why, lambda seq: AskPreempt(seq=seq, why=why))

    def close(self) -> None:
        """Restores the user's handlers."""
        self._listener.close()
        self._requests.close()


class Preemptible:
    """The part of Client for the step that it is at: preemption, and the times of steps."""

    _preemption: Preemption | None = None
    _board: KeptBoard | None = None
    _link: Link
    _owner: Owner

    def _ask(self, make: Callable[[int], Request], patience_s: float | None = None) -> Any:
        raise NotImplementedError

    def _check_open(self) -> None:
        raise NotImplementedError

    def _kept_board(self) -> KeptBoard:
        if self._board is None:
            self._check_open()
            slots, group = self._link.slots, self._link.group
            path = os.path.join(slots.directory, arena_paths.steps_name(group.rank, group.session))
            self._board = KeptBoard(path, group.rank)
        return self._board

    def step(self, step: int) -> None:
        """Reports that this step is done. Optional: for the times of steps in `ckptd status`, `history` and `report`.

        Call it at the end of each step, with the number under which that step would be saved. Without it these times
        come from saves alone, and what was done after the last save of a run that failed is not known.

        Costs a microsecond or two: it writes to a page that the daemon shares and reads every 30 s. Where memory for
        the page is missing, a warning says so, once. The steps of ranks on rank 0's node count; it need not be called
        on all ranks.

        Raises:
            UsageError: `step` is no step, or the client is closed, or this is a forked child.
        """
        self._owner.check()  # a forked child does not have the mapped board
        kept = self._board if self._board is not None else self._kept_board()
        if type(step) is not int or step < 0:
            step = as_step(step)
        board = kept.get(time.monotonic())
        if board is not None:
            board.reached(step)

    def preempted(self, step: int) -> bool:
        """Returns whether to save now because the job is about to be ended: at the same step on all ranks.

        Call it once in each step, on every rank, with the number under which that step is saved, before any other save
        of it:

            if client.preempted(step): client.save(state, step, drain=True).wait("durable") break

        The first call installs handlers of SIGTERM and SIGUSR1 (in the main thread only), which note the signal and
        call the earlier handlers; `close` removes them. From then on neither signal ends the process: the loop does. On
        a signal to any rank, on `ckptd drain`, and on SIGTERM to a daemon that a client started, the daemons agree on a
        step that no rank has passed. The result is True from the first step that is not below it.

        A call costs microseconds: it reads a page that the daemon shares. Once the job is to be ended, a call blocks
        until the daemons have agreed: some milliseconds, 5 s at most. If a rank's wait timed out and it had passed the
        step when the answer came, stderr and `ckptd status` name it.

        Raises:
            UsageError: `step` is no step, or the client is closed, or this is a forked child.
        """
        self._owner.check()  # a forked child does not have the mapped board
        preemption = self._preemption
        if preemption is None:
            self._check_open()
            link, board = self._link, self._kept_board()
            requests = RequestQueue(self._ask, link.settings.arena)
            preemption = self._preemption = Preemption(board, link.job, link.group, requests)
        return preemption.is_due(step)

    def _forget_preemption(self) -> None:
        preemption, self._preemption = self._preemption, None  # later calls raise that the client is closed
        if preemption is not None:
            preemption.close()
        board, self._board = self._board, None
        if board is not None:
            board.close()
