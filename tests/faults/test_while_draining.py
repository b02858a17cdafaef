"""While a newer checkpoint is on its way to the store: what is there stays, and each one holds its own bytes."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptd.checkpoint.verify import verify_path
from ckptd.shared.base.ids import JobKey
from ckptd.shared.format.committed import identify
from ckptd.shared.format.integrity import XXH3
from ckptd.shared.stores.kinds import open_files
from ckptd.store.posix.scan import scan
from ckptd.system.files import FileLayer
from tests.cluster import Node, wait_for
from tests.faults.ranks import JOB, MB, Ranks, told

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240)]

SLOW = ("--drain-bandwidth", "32M", "--keep-last", "1")
SLOW_NBYTES = 48 * MB  # of three chunks of 16 MiB the last is written after one and a half seconds
KEEP_ALL = ("--keep-last", "100")
FAST_SAVES = 20


@pytest.fixture(name="node")
def fixture_node(tmp_path: Path) -> Iterator[Node]:
    with told(str(tmp_path)) as node:
        yield node


def committed(node: Node) -> list[int]:
    """Steps on the store, oldest first."""
    return sorted(e.committed.save.step for e in scan(FileLayer(), JobKey(node.store, JOB)).committed)


def latest(node: Node) -> int | None:
    """The step that `latest` points to, with a record that says that it is whole; None before the first."""
    path = os.path.join(node.store, JOB, "latest")
    if not os.path.islink(path):
        return None
    return identify(open_files(os.path.realpath(path), XXH3)).save.step


def test_latest_and_the_last_durable_checkpoint_stay_while_a_newer_one_is_in_flight(node: Node):
    node.start(*SLOW)
    with Ranks(node, nbytes=SLOW_NBYTES) as ranks:
        ranks.call("connect")
        ranks.call("save", 1)
        wait_for(lambda: (job := node.job(JOB)) and job.drain)
        ranks.call("save", 2)
        told, seen = 0, []
        while told < 2:
            told = max((step for step in (1, 2) if ranks.call("handle", step)[0][1] == "durable"), default=0)
            assert (latest(node) or 0) >= told
            assert max(committed(node), default=0) >= told, "what was durable is gone, and nothing newer is there"
            if (job := node.job(JOB)) is not None and job.drain is not None and job.drain.save.step == 2:
                assert job.drain.nbytes > SLOW_NBYTES
                seen.append(job.drain.nbytes_done)
            time.sleep(0.005)
        assert seen == sorted(seen)
        assert len(set(seen)) > 1, f"progress is seen while the bytes go: {seen}"
        wait_for(lambda: committed(node) == [2])
        assert verify_path(node.store).problems == []


def test_a_rank_that_is_killed_as_soon_as_save_returned_has_its_checkpoint_made_durable(node: Node):
    node.start(*SLOW)
    with Ranks(node, nbytes=SLOW_NBYTES) as ranks:
        ranks.call("connect")
        ranks.call("save", 1)
        ranks.kill()
    wait_for(lambda: latest(node) == 1)
    assert verify_path(node.store).problems == []


def test_a_load_right_after_a_save_gets_that_save(node: Node):
    node.start(*SLOW)
    with Ranks(node, 2, nbytes=16 * MB) as ranks:
        ranks.call("connect")
        for step in (1, 2):
            ranks.call("save", step)
            found = ranks.call("load")
            assert [(f["step"], f["tier"], f["intact"]) for f in found] == [(step, "arena", True)] * 2


def test_steps_saved_faster_than_they_drain_each_hold_their_own_bytes(node: Node):
    node.start("--drain-bandwidth", "64M", *KEEP_ALL)
    with Ranks(node, nbytes=4 * MB) as ranks:
        ranks.call("connect")
        for step in range(FAST_SAVES):
            ranks.call("save", step, drain=step % 4 == 0)
        ranks.call("wait", FAST_SAVES - 1)
        ends = {ranks.call("handle", step)[0][1] for step in range(FAST_SAVES)}
        assert ends <= {"durable", "superseded"}
        steps = committed(node)
        assert len(steps) > 1
        assert steps[-1] == FAST_SAVES - 1
        ranks.kill()
    node.stop()
    node.lose_arena()
    node.start(*KEEP_ALL)
    with Ranks(node, nbytes=4 * MB) as ranks:
        ranks.call("connect")
        for step in steps:
            (found,) = ranks.call("load", step)
            assert (found["step"], found["tier"], found["intact"]) == (step, "pfs", True)
    assert verify_path(node.store).problems == []
