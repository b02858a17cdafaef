"""What a wait that was in vain says: the reason that the daemon knows."""

import pytest

from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.protocol.messages import Milestone
from ckptd.shared.protocol.status import SCHEMA, DrainStatus, JobStatus, Status, WorkerStatus
from ckptd_client._local.why_late import Cause, why_late
from tests.runs import RUN
from tests.unit.a_status import checkpoint

JOB = JobKey("/store", "job")
SAVE, OTHER = SaveId(4, 7, 7, RUN), SaveId(4, 6, 6, RUN)
STAGED, PROTECTED, DURABLE = Milestone


def status(*, worker=None, **changes):
    values = {
        "job": "job", "store": "/store", "incarnation": 4, "world_size": 16, "ranks": [], "drain": None, "errors": [],
        "checkpoints": [checkpoint(7, "staged", "staged")], "coordinator": "here",
    }  # fmt: skip
    return Status(
        schema=SCHEMA, version="0", node="here", pid=1, arena="/arena", uptime_s=1.0, budget_nbytes=1, used_nbytes=0,
        tightest_limit="", jobs=[JobStatus(**values | changes)], workers=[worker] if worker else [],
        refused_messages=0, errors=[],
    )  # fmt: skip


def drain(save=SAVE, **changes):
    values = {
        "save": save, "nbytes": 40_000_000, "nbytes_done": 10_000_000, "seconds": 5.0, "bytes_per_s": 2e6,
        "seconds_left": 15.0, "attempt": 1,
    }  # fmt: skip
    return DrainStatus(**values | changes)


WATCH = "ckptd status --watch --arena /arena"
CASES = {
    "ranks": (
        STAGED,
        {"checkpoints": [checkpoint(7, "staging", ranks=3)]},
        "3 of 16 ranks have saved it",
        "every rank",
    ),
    "named": (
        STAGED,
        {"checkpoints": [checkpoint(7, "staging", reason="waits for rank 1")]},
        "it waits for rank 1",
        "",
    ),
    "degraded": (PROTECTED, {"degraded": ["node a does not answer"]}, "node a does not answer", WATCH),
    "slow": (DURABLE, {"drain": drain()}, "written 10 of 40 MB in 5 s (2 MB/s, about 15 s are left)", WATCH),
    "queue": (DURABLE, {"drain": drain(OTHER)}, "step 6 is written first, and its drain to /store has written", WATCH),
    "failed": (
        DURABLE,
        {"drain": drain(retry_in_s=8.0, last_error="No space left on device")},
        "its drain to /store failed: No space left on device; it is tried again in 8 s",
        f"once its cause is gone, the drain is tried again by itself: {WATCH}",
    ),
    "hung": (
        DURABLE,
        {"worker": WorkerStatus(store="/store", pid=1, busy=1, idle_s=20.0)},
        "the store /store: has not answered for 20 s",
        "timeout 10 stat -f /store",
    ),
    "elsewhere": (
        DURABLE,
        {"coordinator": "there"},
        "the daemon of node there coordinates the job",
        f"on there: {WATCH}",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_reason(case):
    wanted, changes, text, hint = CASES[case]
    cause = why_late(status(**changes), JOB, SAVE, wanted)
    assert text in cause.text
    assert hint in cause.hint


def test_of_a_job_that_the_daemon_does_not_have():
    assert why_late(status(job="another"), JOB, SAVE, DURABLE) == Cause()
