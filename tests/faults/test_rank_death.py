"""Ranks that die in the middle of a copy, live on when they should not, disagree, or never save."""

import contextlib
import os
import re
import signal
import time
from pathlib import Path

import pytest

from ckptd.checkpoint.verify import verify_path
from ckptd.shared.format.slot import SEALS_NBYTES
from tests.cluster import Node, wait_for
from tests.faults.ranks import MB, RankError, Ranks, sealed, told

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240)]

LARGE_NBYTES = 64 * MB
SLACK_S = 1.0
REPLACED = r"was replaced by \d+|another process is rank \d of the job now"


@pytest.fixture(name="node")
def fixture_node(tmp_path: Path):
    with told(str(tmp_path)) as node:
        yield node


def ready(ranks: Ranks, **settings) -> Ranks:
    """Connected, and with slots."""
    ranks.call("connect", **settings)
    ranks.call("prepare")
    return ranks


def durable(ranks: Ranks, step: int) -> None:
    """Saves the step, to the end."""
    ranks.call("save", step)
    ends = ranks.call("settle", step)
    assert all(end == "durable" for _, end, _ in ends), ends


def half_copied(node: Node, rank: int) -> str | None:
    """The slot of the rank whose first eighth has been written and that is not sealed."""
    for path in node.slots():
        if not os.path.basename(path).startswith(f"r{rank:05d}-"):
            continue
        with open(path, "rb") as file:
            size = os.path.getsize(path) - SEALS_NBYTES
            head, tail = os.pread(file.fileno(), 4096, size // 8), os.pread(file.fileno(), 4096, size - (1 << 20))
        if any(head) and not any(tail):
            return path
    return None


@pytest.fixture(name="workers")
def fixture_workers():
    """Pids of forked workers that outlive their rank; ended here."""
    pids: list[int] = []
    yield pids
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


# --- killed in the middle of its copy


@pytest.mark.timeout(120)
def test_a_segment_cut_off_by_a_kill_is_never_offered_and_its_slot_is_free_again(node: Node, workers: list[int]):
    node.start("--slots-per-rank", "2")
    with Ranks(node, nbytes=LARGE_NBYTES) as ranks:
        ready(ranks)
        before = node.slots()
        workers += ranks.call("fork_workers")[0]
        ranks.start("save_slowly", 1)
        wait_for(lambda: half_copied(node, 0), every_s=0.001)
        ranks[0].kill()
    assert sealed(node) == []
    assert all(os.path.exists(f"/proc/{pid}") for pid in workers), "the forked workers live on"
    wait_for(lambda: not any(rank.alive for rank in node.job("job").ranks))
    with Ranks(node, nbytes=LARGE_NBYTES) as ranks:
        ranks.call("connect")
        assert ranks.call("load") == [None]
        durable(ranks, 2)
        assert node.slots() == before, "the same files serve again"
        assert [rank.slots for rank in node.job("job").ranks] == [2]
        assert all(os.path.exists(f"/proc/{pid}") for pid in workers)
        ranks.call("close")
    wait_for(lambda: node.slots() == [])
    assert verify_path(node.store).problems == []


@pytest.mark.parametrize("restarted", [False, True])
def test_the_other_ranks_learn_that_the_save_cannot_complete(node: Node, restarted: bool):
    node.start()
    with Ranks(node, 2) as ranks:
        ready(ranks)
        durable(ranks, 1)
        ranks[1].start("save_slowly", 2)
        ranks[0].call("save", 2)
        if restarted:
            node.kill()
            ranks[1].kill()
            node.start()
        else:
            ranks[1].kill()
        with pytest.raises(RankError, match=r"rank 1 .*has (ended|left the job) and has not saved") as error:
            ranks[0].call("wait", 2, "staged", None, timeout_s=20)
        assert error.value.kind == "SaveFailedError"
        assert ranks[0].call("handle", 2)[:2] == (None, "abandoned")
        ranks[0].call("save", 3)
        assert ranks[0].call("settle", 3, timeout_s=10)[1] == "abandoned", "nor can any later one"
        ranks[0].kill()
    with Ranks(node, 2) as ranks:
        ranks.call("connect")
        assert [(f["step"], f["intact"]) for f in ranks.call("load")] == [(1, True)] * 2
        durable(ranks, 4)
        assert [rank.slots for rank in node.job("job").ranks] == [3, 3]


# --- old ranks that live on


def test_a_second_start_waits_then_names_who_still_runs_and_disturbs_none(node: Node):
    node.start("--connect-timeout-s", "2")
    with Ranks(node) as old, contextlib.ExitStack() as later:
        ready(old)
        durable(old, 1)
        time.sleep(2.5)  # what one parent starts at once are ranks of one training
        new = later.enter_context(Ranks(node))
        began = time.monotonic()
        new.start("connect")
        for step in range(2, 5):
            durable(old, step)
            time.sleep(0.2)
        with pytest.raises(RankError, match=re.escape(f"pid {old[0].pid} on {os.uname().nodename}")) as error:
            new.results()
        assert "takeover" in str(error.value)
        assert 1.9 < time.monotonic() - began < 20, "the older ranks' saves are in it too"
        durable(old, 5)
        new.start("connect")
        time.sleep(0.3)
        assert not new.done
        old.kill()
        new.results()
        assert new.call("load")[0]["step"] == 5


def test_takeover_replaces_old_ranks_which_then_harm_nothing(node: Node):
    node.start()
    with Ranks(node, 2) as old, Ranks(node, 2) as new:
        ready(old)
        durable(old, 1)
        old.start("save_slowly", 2)
        wait_for(lambda: half_copied(node, 0) and half_copied(node, 1))
        ready(new, takeover=True)
        assert [f["step"] for f in new.call("load")] == [1, 1]
        durable(new, 2)
        durable(new, 3)
        for rank in old.all:
            rank.kill(signal.SIGUSR1)
        old.results()
        assert [end for _, end, _ in old.call("settle", 2)] == ["failed", "failed"]
        old.call("save", 7)
        for _, end, reason in old.call("handle", 7):
            assert end == "failed"
            assert re.search(REPLACED, reason)
        with pytest.raises(RankError, match=REPLACED):
            old[0].call("wait", 7)
        new.call("save", 4)
        old.call("close")
        assert [end for _, end, _ in new.call("settle", 4)] == ["durable", "durable"]
        durable(new, 5)
        new.kill()
    with Ranks(node, 2) as ranks:
        ranks.call("connect")
        assert [(f["step"], f["tier"], f["intact"]) for f in ranks.call("load")] == [(5, "arena", True)] * 2
    assert verify_path(node.store).problems == []


def test_a_restart_from_an_older_step_saves_the_same_steps_again(node: Node):
    node.start("--keep-last", "9")
    with Ranks(node) as ranks:
        ready(ranks)
        for step in (1, 2, 3):
            durable(ranks, step)
        ranks.kill()
    with Ranks(node) as ranks:
        ranks.call("connect")
        assert ranks.call("load", 1)[0]["step"] == 1
        durable(ranks, 2)
        assert ranks.call("load")[0]["step"] == 2, "the newest is of the newest incarnation, not of the largest step"
        durable(ranks, 3)
        ranks.kill()
    with Ranks(node) as ranks:
        ranks.call("connect")
        (found,) = ranks.call("load")
        assert (found["step"], found["intact"]) == (3, True)
    names = sorted(name for name in os.listdir(f"{node.store}/job") if name.startswith("step-"))
    assert [name.partition(".")[0] for name in names] == [f"step-00000000{step}" for step in (1, 2, 2, 3, 3)]
    assert verify_path(node.store).problems == []


# --- ranks that disagree, or stay away


def test_ranks_that_save_different_steps_fail_and_the_next_save_is_whole(node: Node):
    node.start()
    with Ranks(node, 2) as ranks:
        ready(ranks)
        durable(ranks, 1)
        ranks[0].call("save", 2)
        ranks[1].call("save", 3)
        for rank, step in ((0, 2), (1, 3)):
            _, end, reason = ranks[rank].call("settle", step)
            assert end == "failed"
            assert "rank 0 saved step 2" in reason
            assert "rank 1 saved step 3" in reason
        durable(ranks, 4)
        ranks.kill()
    with Ranks(node, 2) as ranks:
        ranks.call("connect")
        assert [(f["step"], f["intact"]) for f in ranks.call("load")] == [(4, True)] * 2


def test_a_rank_that_never_saves_ends_the_wait_of_the_others(node: Node):
    node.start("--stage-timeout-s", "1.5")
    with Ranks(node, 2) as ranks:
        ready(ranks)
        ranks[0].call("save", 1)
        with pytest.raises(RankError, match=r"rank 1 did not deliver within 1.5 s"):
            ranks[0].call("wait", 1, "staged", None, timeout_s=10)
        assert ranks[0].seconds < 1.5 + SLACK_S
        ranks[1].call("save", 1)
        assert ranks[1].call("settle", 1)[1] == "abandoned", "and the late one is told"
        durable(ranks, 2)


def test_a_rank_that_hangs_in_its_read_ends_the_load_of_the_others(node: Node):
    node.start("--read-timeout-s", "1.5")
    with Ranks(node, 2) as ranks:
        ready(ranks)
        durable(ranks, 1)
        ranks.kill()
    with Ranks(node, 2) as ranks:
        ranks.call("connect")
        ranks[1].start("load_and_hang")
        with pytest.raises(RankError, match=r"ranks 1 did not report within 1.5 s") as error:
            ranks[0].call("load", timeout_s=15)
        assert error.value.kind == "RestoreError"
        ranks[1].kill(signal.SIGUSR1)
        with pytest.raises(RankError, match=r"ranks 1 did not report within 1.5 s"):
            ranks[1].result()
        assert [(f["step"], f["intact"]) for f in ranks.call("load")] == [(1, True)] * 2


def test_wait_ends_when_the_daemon_is_gone_for_good(node: Node):
    node.start("--stage-timeout-s", "600")
    with Ranks(node, 2) as ranks:
        ready(ranks, connect_timeout_s=2.0)
        ranks[0].call("save", 1)
        node.kill()
        for call in (("wait", 1, "staged", None), ("wait_newest", "durable", None)):
            with pytest.raises(RankError, match=r"no daemon listens|daemon is gone"):
                ranks[0].call(*call, timeout_s=20)
            assert ranks[0].seconds < 2 + SLACK_S
