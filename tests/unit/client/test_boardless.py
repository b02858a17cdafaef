"""A rank without a step board learns from a status at which step all ranks save."""

import time

import pytest

from ckptd.protocol.ids import JobKey
from ckptd.protocol.messages import StatusReply
from ckptd_client._boardless import Boardless
from ckptd_client._group import Group
from ckptd_client._telling import Telling
from tests.unit import a_status


@pytest.mark.parametrize("fixed", [0, 7])
def test_the_step_that_the_daemons_agreed_on_is_taken_without_a_wait(fixed):
    named = a_status.job(preempt_step=fixed)
    answer = StatusReply(reply_to=1, status=a_status.status(jobs=[named]))
    telling = Telling(lambda make, patience_s: answer, "/dev/shm/none")
    boardless = Boardless(JobKey(named.store, named.job), Group(0, 2, "a"), telling)
    began = time.monotonic()
    assert boardless.asks(fixed) is True
    assert time.monotonic() - began < 3
    assert boardless.asks(fixed + 1) is True
