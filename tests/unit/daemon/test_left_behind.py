"""What an arena shows when no daemon runs: ranks that live, and what is staged."""

import os
import pathlib

import pytest

from ckptd.cli.last_state import left as told_of
from ckptd.daemon.left_behind import left_behind
from ckptd.daemon.liveness import living
from ckptd.shared.base.ids import JobKey
from tests.cluster import Node
from tests.faults.ranks import JOB, Ranks

pytestmark = pytest.mark.process


def files(arena):
    return sorted((path, os.stat(path).st_mtime_ns) for path in map(str, pathlib.Path(arena).rglob("*")))


def test_ranks_and_the_newest_step_are_seen_and_nothing_is_changed(tmp_path):
    with Node(str(tmp_path)) as node:
        node.start()
        with Ranks(node, 2) as ranks:
            ranks.call("connect", drain_every="3600s")  # drains the first one alone
            for step, milestone in ((50, "durable"), (100, "staged")):
                ranks.call("save", step)
                ranks.call("wait", step, milestone)
            node.kill()
            before = files(node.arena)
            (left,) = left_behind(node.arena)
            assert (left.job, left.ranks, left.step, left.holders, left.world_size) == (
                JobKey(str(tmp_path), JOB), (0, 1), 100, (0, 1), 2
            )  # fmt: skip
            assert len(living(node.arena)) == 2
            assert told_of(node.arena, 30) == (
                [
                    "job job: ranks 0-1 run here, and no save succeeds until a daemon runs",
                    "job job: step 100 is in memory here (2 of 2 ranks)",
                    "job job: step 50 is durable",
                ],
                [f"last state of job job: ckptd status {tmp_path}/job"],
            )
            assert files(node.arena) == before
            ranks.kill()
            (left,) = left_behind(node.arena)
            assert (left.ranks, left.step) == ((), 100)


def test_an_arena_that_is_empty_or_none_has_nothing(tmp_path):
    assert left_behind(str(tmp_path)) == []
    assert told_of(str(tmp_path / "none"), 1) == ([], [])


def test_what_is_no_slot_is_left_out(tmp_path):
    jobs = tmp_path / "jobs" / "job-00000000"
    jobs.mkdir(parents=True)
    (jobs / "r00000-000001.slot").write_bytes(b"x" * 100_000)
    (jobs / "r00000-000002.slot").symlink_to("/dev/zero")
    (jobs / "other").write_bytes(b"")
    os.mkfifo(jobs / "r00000-000003.slot")
    assert left_behind(str(tmp_path)) == []
