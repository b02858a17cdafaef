"""The daemon is absent, dies, stops answering or is stopped: training goes on, and what was sealed is not lost."""

import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest

from ckptd.checkpoint.verify import verify_path
from ckptd.shared.format.arena_paths import LOCK
from tests.cluster import Node, wait_for
from tests.faults.ranks import JOB, MB, RankError, Ranks, daemons, sealed, told
from tests.signals import resume, stop

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240)]

LONG = os.environ.get("FAULTS") == "long"
SLOW = ("--drain-bandwidth", "16M")  # of three chunks of 16 MiB the last is written after three seconds
SLOW_NBYTES = 48 * MB
SLACK_S = 0.9  # of two busy cores, over a deadline: less than a second wait of the same length


@pytest.fixture(name="node")
def fixture_node(tmp_path: Path):
    with told(str(tmp_path)) as node:
        yield node


def ready(ranks: Ranks, **settings) -> Ranks:
    """Connected, and with slots."""
    ranks.call("connect", **settings)
    ranks.call("prepare")
    return ranks


def own_daemon(node: Node) -> int:
    """Pid of the daemon that a client started."""
    return node.status().pid


def test_a_daemon_whose_arena_was_removed_makes_room_for_another(node: Node):
    """As logind does at a user's last logout: nobody would ever find that daemon again."""
    daemon = node.start()
    with Ranks(node) as ranks:
        ready(ranks)
        ranks.call("save", 1)
        ranks.call("wait", 1, "durable")
        shutil.rmtree(node.arena)
        os.mkdir(node.arena, mode=0o700)
        assert daemon.wait(10) == 1
        assert "enable-linger" in node.log_text()
        node.start()
        ranks.call("save", 2)
        ranks.call("wait", 2, "durable")
        ranks.call("close")
    assert verify_path(node.store).problems == []


# --- none runs


def test_without_a_daemon_connect_says_so_when_it_may_not_start_one(node: Node):
    with Ranks(node) as ranks:
        with pytest.raises(RankError, match="no daemon listens") as error:
            ranks.call("connect", start=False, connect_timeout_s=1.0)
        assert error.value.kind == "ConnectError"
        assert "ckptd run" in str(error.value)
        assert error.value.seconds < 10, "soon after the time that connect was given"
    assert daemons(node.arena) == []


def test_a_client_starts_a_daemon_and_says_so_and_it_leaves_when_it_is_empty(node: Node):
    with Ranks(node) as ranks:
        ranks.call("connect")
        pid = own_daemon(node)
        logs = [log for log in ranks[0].call("logs") if f"daemon pid {pid} started" in log]
        assert len(logs) == 1
        assert re.search(
            rf"ckptd: job \S+, rank 0 of \d+, store {node.store}: daemon pid \d+ started, log \S+/ckptd.log$", logs[0]
        )
        ranks.call("save", 1)
        ranks.call("wait", 1)
        ranks.call("close")
    wait_for(lambda: not os.path.exists(f"/proc/{pid}"))
    assert not os.path.exists(node.arena)


def test_eight_ranks_that_start_a_daemon_at_once_end_with_one(node: Node):
    with Ranks(node, 8) as ranks:
        ranks.call("connect")
        wait_for(lambda: daemons(node.arena) == [own_daemon(node)])
        ranks.call("save", 1)
        assert ranks.call("wait", 1) == [("durable", "durable")] * 8
        ranks.call("close")
    wait_for(lambda: daemons(node.arena) == [])


# --- it is killed between saves


def test_a_daemon_that_a_client_started_comes_back_by_itself(node: Node):
    with Ranks(node, 2) as ranks:
        ready(ranks)
        ranks.call("save", 1)
        ranks.call("wait", 1, "staged")
        old = own_daemon(node)
        os.kill(old, signal.SIGKILL)
        ranks.call("save", 2)
        assert ranks.call("settle", 2) == [("durable", "durable", "")] * 2
        assert own_daemon(node) != old
        assert {milestone for milestone, _, _ in ranks.call("handle", 1)} <= {"staged", "durable"}
        ranks.call("close")


def test_saves_go_on_with_a_daemon_that_was_started_again(node: Node):
    node.start()
    with Ranks(node, 2) as ranks:
        ready(ranks)
        ranks.call("save", 1)
        ranks.call("wait", 1)
        node.kill()
        node.start()
        ranks.call("save", 2)
        assert ranks.call("settle", 2) == [("durable", "durable", "")] * 2


def test_a_save_that_was_to_be_drained_for_sure_is_so_by_the_next_daemon(node: Node):
    node.start(*SLOW)
    with Ranks(node, nbytes=SLOW_NBYTES) as ranks:
        ready(ranks, drain_every=1000)
        ranks.call("save", 1)
        ranks.call("wait", 1)
        ranks.call("save", 2, drain=True)
        ranks.call("wait", 2, "staged")
        node.kill()
        node.start(*SLOW)
        ranks.call("save", 3)
        assert ranks.call("settle", 2) == [("durable", "durable", "")]


def test_without_its_daemon_training_goes_on_and_saves_say_why_they_failed(node: Node):
    node.start()
    with Ranks(node) as ranks:
        ready(ranks, save_timeout_s=3.0)
        ranks.call("save", 1)
        ranks.call("wait", 1)
        node.kill()
        assert ranks.call("save", 2)[0] <= 3.0 + SLACK_S
        assert ranks.call("save", 3)[0] <= SLACK_S  # it does not wait again so soon
        for step in (2, 3):
            ((_, end, reason),) = ranks.call("handle", step)
            assert end == "failed"
            assert "daemon" in reason
        with pytest.raises(RankError, match="will not become durable"):
            ranks.call("wait", 3)
        node.start()
        assert ranks.call("steps") == [[1]]  # who does not train may wait for the daemon, and finds it at once
        assert saved(ranks, 4)


def saved(ranks: Ranks, step: int) -> bool:
    """Whether a save becomes durable."""
    ranks.call("save", step)
    return all(end == "durable" for _, end, _ in ranks.call("settle", step))


# --- training calls nothing while it dies


def heard(ranks: Ranks, rank: int, what: str, timeout_s: float = 8.0) -> list[str]:
    """What the rank said, once something of it is this; nothing of the client's is called meanwhile."""

    def logs() -> list[str]:
        ranks[rank].call("sleep", 0.2)
        found = ranks[rank].call("logs")
        return found if any(what in text for text in found) else []

    found = wait_for(logs, timeout_s)
    assert isinstance(found, list)
    return found


def is_durable(node: Node, step: int) -> bool:
    job = node.job(JOB)
    return job is not None and any(one.step == step and one.milestone == "durable" for one in job.checkpoints)


def test_a_death_is_said_within_seconds_and_the_next_daemon_is_found(node: Node):
    node.start(*SLOW)
    with Ranks(node, nbytes=SLOW_NBYTES) as ranks:
        ready(ranks)
        ranks.call("save", 1)
        ranks.call("wait", 1, "staged")
        node.kill()
        heard(ranks, 0, "the daemon of this node ended", 4)
        node.start()
        texts = heard(ranks, 0, "a daemon of this node runs again and has step 1")
        (text,) = [text for text in texts if "daemon of this node ended" in text]
        assert text.startswith("ckptd: the daemon of this node ended: step 1 is not durable before another one runs; ")
        assert f"; start one: ckptd run --arena {node.arena}; its stderr says why it ended" in text
        wait_for(lambda: is_durable(node, 1))
        ranks.call("sleep", 3.0)
        assert ranks.call("logs") == [texts], "once"


def test_a_daemon_that_a_client_started_is_started_again_without_a_call(node: Node):
    with Ranks(node, 2, nbytes=SLOW_NBYTES, CKPTD_DRAIN_BANDWIDTH="16M") as ranks:
        ready(ranks)
        old = own_daemon(node)
        ranks.call("save", 1)
        ranks.call("wait", 1, "staged")
        os.kill(old, signal.SIGKILL)
        for rank in (0, 1):
            (text,) = [one for one in heard(ranks, rank, "daemon of this node ended") if "node ended" in one]
            assert "; one is started in 3 s; why it ended: " in text
            heard(ranks, rank, "a daemon of this node runs again", 12)
        wait_for(lambda: is_durable(node, 1))
        assert own_daemon(node) != old
        ranks.call("close")


def test_what_was_lost_with_the_memory_is_said_when_the_next_daemon_is_found(node: Node):
    node.start(*SLOW)
    with Ranks(node, nbytes=SLOW_NBYTES) as ranks:
        ready(ranks)
        ranks.call("save", 1)
        ranks.call("wait", 1, "staged")
        node.kill()
        heard(ranks, 0, "the daemon of this node ended", 4)
        shutil.rmtree(node.arena)
        node.start()
        texts = heard(ranks, 0, "a daemon of this node runs again", 12)
        assert "step 1 is lost: the daemon that knew of it is gone" in texts[-1]
        assert "has step 1" not in texts[-1]


def test_of_what_only_this_memory_has_a_death_is_said_too(node: Node):
    node.start()
    with Ranks(node) as ranks:
        ready(ranks, drain_every=1000)
        ranks.call("save", 1000)
        ranks.call("wait", 1000, "durable")
        ranks.call("save", 1001)
        ranks.call("wait", 1001, "staged")
        ranks.call("sleep", 1.0)
        node.kill()
        heard(ranks, 0, "the daemon of this node ended: step 1001 is not durable", 6)


def test_a_save_that_waits_for_ranks_learns_of_it_on_any_rank(node: Node):
    node.start()
    with Ranks(node, 2) as ranks:
        ready(ranks)
        ranks[1].call("save", 1)
        node.kill()
        heard(ranks, 1, "the daemon of this node ended: step 1 is not durable", 4)
        assert not [text for text in ranks[0].call("logs") if "daemon of this node ended" in text], "it saved nothing"


@pytest.mark.parametrize("seconds", ["0.5", "3.7"])  # while others may start the next one, and while it is started here
def test_a_process_whose_daemon_died_ends_at_once(node: Node, seconds: str):
    code = """
import os, signal, sys, time, torch, ckptd_client
from ckptd.shared.files import locks
client = ckptd_client.connect("job", alone=True)
client.save({"w": torch.ones(1 << 22)}, 1)
os.kill(locks.holder(sys.argv[1]), signal.SIGKILL)
time.sleep(float(sys.argv[2]))
print(time.time())
"""
    process = node.run(code, os.path.join(node.arena, LOCK), seconds, CKPTD_DRAIN_BANDWIDTH="4M")
    out, errors = process.communicate(timeout=40)
    assert process.returncode == 0, errors
    assert time.time() - float(out) < 6, errors  # an attempt to come back takes 10
    assert b"Fatal" not in errors


# --- it dies or stops while a save waits for it


@pytest.mark.parametrize("world", [1, 2] if LONG else [1])
def test_killed_while_a_save_waits_for_its_acknowledgement(node: Node, world: int):
    node.start()
    with Ranks(node, world) as ranks:
        ready(ranks)
        stop(node.daemon.pid)
        ranks.start("save", 1)
        wait_for(lambda: sealed(node) == [(rank, 1) for rank in range(world)])
        time.sleep(0.2)
        assert not ranks.done
        node.kill()
        assert max(ranks.results()) < 2
        assert all(end is None for _, end, _ in ranks.call("handle", 1))
        node.start()
        ranks.call("save", 2)
        assert ranks.call("settle", 2) == [("durable", "durable", "")] * world
        for milestone, end, _ in ranks.call("handle", 1):
            assert milestone in ("staged", "durable")
            assert end in ("durable", "superseded")


def test_a_waiting_handle_is_enough_to_bring_the_sealed_segment_home(node: Node):
    node.start()
    with Ranks(node) as ranks:
        ready(ranks)
        stop(node.daemon.pid)
        ranks.start("save", 1)
        wait_for(lambda: sealed(node) == [(0, 1)])
        node.kill()
        ranks.results()
        ranks.start("wait", 1)
        node.start()
        assert ranks.results() == [("durable", "durable")]


def test_a_segment_sealed_after_the_next_daemon_looked_is_handed_to_it(node: Node):
    node.start()
    with Ranks(node, 2) as ranks:
        ready(ranks)
        ranks.call("save", 1)
        ranks.call("wait", 1)
        ranks.start("save_slowly", 2)
        wait_for(lambda: len([path for path in node.slots() if any(content(path))]) == 4)  # two of each rank
        node.kill()
        node.start()
        for rank in ranks.all:
            rank.kill(signal.SIGUSR1)
        assert max(ranks.results()) < 5
        ranks.start("wait", 2)
        assert ranks.results() == [("durable", "durable")] * 2


def content(path: str) -> bytes:
    """Some bytes of what a rank copies first."""
    with open(path, "rb") as file:
        return os.pread(file.fileno(), 4096, os.path.getsize(path) // 8)


def test_a_daemon_that_stops_answering_never_holds_a_save_beyond_its_deadline(node: Node):
    node.start()
    with Ranks(node) as ranks:
        ready(ranks, save_timeout_s=1.0)
        stop(node.daemon.pid)
        for step in (1, 2, 3, 4, 5):  # more than there are slots
            (stall,) = ranks.call("save", step)
            assert stall <= 1.0 + SLACK_S, step
            ((_, end, reason),) = ranks.call("handle", step)
            assert end in ("failed", "skipped"), (step, end)
            assert reason
        resume(node.daemon.pid)
        assert saved(ranks, 6)
        node.kill()
        node.start()
        assert saved(ranks, 7), "what was never acknowledged must not stand in the way of the next daemon"


def test_a_new_daemon_that_does_not_answer_holds_no_save_either(node: Node):
    node.start()
    with Ranks(node) as ranks:
        ready(ranks, save_timeout_s=2.0)
        node.kill()
        stop(node.start().pid)
        assert ranks.call("save", 1)[0] <= 2.0 + SLACK_S


# --- it is stopped, in the middle of a drain


def test_sigterm_finishes_the_drain_that_runs(node: Node):
    node.start(*SLOW)
    with Ranks(node, nbytes=SLOW_NBYTES) as ranks:
        ready(ranks)
        ranks.call("save", 1)
        wait_for(lambda: (job := node.job("job")) and job.drain and job.drain.nbytes_done)
        assert node.stop(15) == 0
        assert [name for name in os.listdir(f"{node.store}/job") if name.startswith("step-")] == [
            "step-000000001.i0001"
        ]


def test_what_a_stop_leaves_unfinished_the_next_start_finishes(node: Node):
    node.start(*SLOW, "--stop-drain-s", "0")
    with Ranks(node, nbytes=SLOW_NBYTES) as ranks:
        ready(ranks)
        ranks.call("save", 1)
        wait_for(lambda: (job := node.job("job")) and job.drain and job.drain.nbytes_done)
        began = time.monotonic()
        assert node.stop(15) == 0
        assert time.monotonic() - began < 5
        assert not [name for name in os.listdir(f"{node.store}/job") if name.startswith("step-")]
        ranks.kill()  # nobody asks for it, nobody is there
    node.start()
    wait_for(lambda: os.path.exists(f"{node.store}/job/step-000000001.i0001/COMMITTED"))
    with Ranks(node, nbytes=SLOW_NBYTES) as ranks:
        ranks.call("connect")
        (found,) = ranks.call("load")
        assert (found["step"], found["intact"]) == (1, True)
