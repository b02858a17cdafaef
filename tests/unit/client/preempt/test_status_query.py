"""A rank without a step board learns from a status at which step all ranks save."""

import signal
import time

import pytest

from ckptd.shared.base.ids import JobKey
from ckptd.shared.format.arena_paths import steps_name
from ckptd.shared.protocol.messages import AskPreempt, StatusReply
from ckptd_client._local.rank import Group
from ckptd_client._preempt.preemption import Preemption, StatusQuery
from ckptd_client._preempt.requests import RequestQueue
from ckptd_client._preempt.step_board import KeptBoard
from tests.unit import a_status


@pytest.mark.parametrize("fixed", [0, 7])
def test_the_step_that_the_daemons_agreed_on_is_taken_without_a_wait(fixed):
    named = a_status.job(preempt_step=fixed)
    answer = StatusReply(reply_to=1, status=a_status.status(jobs=[named]))
    requests = RequestQueue(lambda make, patience_s: answer, "/dev/shm/none")
    status_query = StatusQuery(JobKey(named.store, named.job), Group(0, 2, "a"), requests)
    began = time.monotonic()
    assert status_query.is_due(fixed) is True
    assert time.monotonic() - began < 10
    assert status_query.is_due(fixed + 1) is True


def test_a_rank_that_was_past_the_step_when_it_learned_it_is_named_at_its_save(tmp_path, caplog):
    """It has no board, so the daemons did not know at which step it was."""
    named = a_status.job(preempt_step=7)
    asked = []

    def answer(make, patience_s):
        asked.append(make(1))
        return StatusReply(reply_to=1, status=a_status.status(jobs=[named]))

    (tmp_path / steps_name(0, "a")).mkdir()  # so no board can be made
    board = KeptBoard(str(tmp_path / steps_name(0, "a")), 0)
    preemption = Preemption(board, JobKey(named.store, named.job), Group(0, 2, "a"), RequestQueue(answer, "none"))
    try:
        assert preemption.is_due(8) is False
        signal.raise_signal(signal.SIGUSR1)
        assert preemption.is_due(9) is True
        (text,) = [r.getMessage() for r in caplog.records if "was at step" in r.getMessage()]
        assert "rank 0 was at step 8 when it heard that all ranks save at step 7: it saves at step 9" in text
        deadline = time.monotonic() + 5
        while not any(isinstance(one, AskPreempt) and one.passed == 7 for one in asked):
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        preemption.close()
