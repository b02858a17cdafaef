"""``ckptd stop`` and ``ckptd forget`` on real daemons, as a script sees them."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ckptd.store.posix.store import PosixStore
from ckptd.system.files import FileLayer
from tests import pythons
from tests.cluster import Node, wait_for
from tests.faults.mounts import FuseStore, needs_fuse
from tests.faults.ranks import MB, Ranks, sealed, told

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240)]

SLOW = ("--drain-bandwidth", "8M")  # of three chunks of 16 MiB the last is written after six seconds
SLOW_NBYTES = 48 * MB


@pytest.fixture(name="node")
def fixture_node(tmp_path: Path):
    with told(str(tmp_path)) as node:
        yield node


def ckptd(node: Node, *words: str) -> subprocess.CompletedProcess[str]:
    return pythons.run(
        [sys.executable, "-m", "ckptd", *words],
        env=node.environ() | {"CKPTD_STORE": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def staged(node: Node, *, drained: bool, nbytes: int = 2 * MB) -> None:
    """A job of two ranks that died after step 1."""
    with Ranks(node, 2, nbytes=nbytes) as ranks:
        ranks.call("connect", drain_every=1 if drained else 100)
        ranks.call("save", 1)
        ranks.call("wait", 1, "durable" if drained else "staged")
        ranks.kill()
    wait_for(lambda: not any(rank.alive for rank in node.job("job").ranks))


def slow_drain(node: Node) -> None:
    """A job that died while the drain of its step 1 is slow."""
    node.start(*SLOW, "--stop-drain-s", "60")
    with Ranks(node, nbytes=SLOW_NBYTES) as ranks:
        ranks.call("connect")
        ranks.call("save", 1)
        wait_for(lambda: node.job("job").drain)
        ranks.kill()
    wait_for(lambda: not any(rank.alive for rank in node.job("job").ranks))


# --- stop


def test_stop_ends_the_daemon_and_says_what_stays_in_memory(node: Node):
    node.start()
    staged(node, drained=True)
    done = ckptd(node, "stop", "--wait")
    assert done.returncode == 0, done.stderr
    assert "step 1" in done.stdout
    assert "durable" in done.stdout
    assert "stays in memory" in done.stdout
    assert node.daemon.wait(10) == 0
    assert sealed(node) == [(0, 1), (1, 1)]
    again = ckptd(node, "stop")
    assert again.returncode == 3
    assert "no daemon" in again.stderr


def test_stop_with_wait_returns_when_the_drain_that_runs_is_done(node: Node):
    slow_drain(node)
    found = json.loads(ckptd(node, "stop", "--json").stdout)
    assert (found["schema"], found["stopped"]) == (1, False)
    assert found["jobs"][0]["durable"] is False
    assert node.daemon.wait(30) == 0
    node.start()
    found = json.loads(ckptd(node, "stop", "--wait", "--json").stdout)
    assert found["stopped"] is True
    assert [(job["job"], job["step"], job["durable"]) for job in found["jobs"]] == [("job", 1, True)]
    assert found["used_nbytes"] > SLOW_NBYTES


def test_stop_with_wait_reports_the_commit_it_waited_for(node: Node):
    slow_drain(node)
    found = json.loads(ckptd(node, "stop", "--wait", "--json").stdout)
    assert [(job["step"], job["durable"]) for job in found["jobs"]] == [(1, True)]
    assert node.daemon.wait(10) == 0


def test_a_wait_that_is_too_short_says_so_and_the_daemon_goes_on_stopping(node: Node):
    slow_drain(node)
    done = ckptd(node, "stop", "--wait", "--timeout", "0.5s")
    assert done.returncode == 3
    assert "still stopping" in done.stderr
    assert node.daemon.wait(30) == 0


def test_a_daemon_that_is_killed_while_it_stops_is_not_waited_for(node: Node):
    slow_drain(node)
    stopping = pythons.Popen(
        [sys.executable, "-m", "ckptd", "stop", "--wait"],
        env=node.environ() | {"CKPTD_STORE": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    node.children.append(stopping)
    time.sleep(1.0)
    assert stopping.poll() is None, "its drain takes four seconds"
    node.kill()
    said, _ = stopping.communicate(timeout=10)
    assert stopping.returncode == 0
    assert "stays in memory and is not durable" in said


@needs_fuse
def test_stop_does_not_call_a_step_not_durable_while_the_store_has_not_answered(tmp_path: Path):
    """A daemon that has just begun knows what is in memory, and not what is durable."""
    with FuseStore(str(tmp_path)) as fuse, told(fuse.path, logs=str(tmp_path)) as node:
        node.start()
        staged(node, drained=True)
        node.kill()
        fuse.hang()
        node.start("--stop-drain-s", "0")
        done = ckptd(node, "stop", "--json")
        fuse.go_on()
        assert [(job["step"], job["durable"]) for job in json.loads(done.stdout)["jobs"]] == [(1, None)]
        assert node.daemon.wait(10) == 0
        node.start()
        wait_for(lambda: node.job("job").store_seen)
        fuse.hang()
        node.kill()
        node.start("--stop-drain-s", "0")
        done = ckptd(node, "stop")
        fuse.go_on()
        text = f"step 1 stays in memory; whether it is durable is not known: {fuse.path} has not answered"
        assert text in done.stdout


def test_stop_names_what_a_store_that_is_no_longer_there_answers(tmp_path: Path):
    store, away = tmp_path / "store", tmp_path / "away"
    store.mkdir()
    with told(str(store), logs=str(tmp_path)) as node:
        node.start()
        staged(node, drained=True)
        node.kill()
        store.rename(away)
        node.start("--stop-drain-s", "0")
        found = json.loads(ckptd(node, "stop", "--json").stdout)["jobs"]
        away.rename(store)
        assert [(job["step"], job["durable"]) for job in found] == [(1, None)]
        assert str(store) in found[0]["store_problem"]


# --- forget


def test_forget_frees_a_dead_job_and_says_how_much(node: Node):
    node.start()
    staged(node, drained=True)
    used = node.status().used_nbytes
    count = len(node.slots())
    found = json.loads(ckptd(node, "forget", "job", "--json").stdout)
    assert (found["job"], found["slots"], found["nbytes"]) == ("job", count, used)
    assert node.slots() == []
    assert node.status().used_nbytes == 0
    assert node.status().jobs == []
    with Ranks(node, 2) as ranks:
        ranks.call("connect")
        assert [f["tier"] for f in ranks.call("load")] == ["pfs", "pfs"]


def test_forget_refuses_while_a_rank_lives(node: Node):
    node.start()
    with Ranks(node) as ranks:
        ranks.call("connect")
        ranks.call("prepare")
        for words in ((), ("--force",)):
            done = ckptd(node, "forget", "job", *words)
            assert done.returncode == 1
            assert f"pid {ranks[0].pid}" in done.stderr
        ranks.call("save", 1)
        assert ranks.call("wait", 1) == [("durable", "durable")]


def test_forget_keeps_what_nothing_else_has_unless_forced(node: Node):
    node.start(*SLOW)
    with Ranks(node, nbytes=SLOW_NBYTES) as ranks:
        ranks.call("connect")
        ranks.call("save", 1)
        ranks.call("wait", 1, "staged")
        ranks.kill()
    wait_for(lambda: not any(rank.alive for rank in node.job("job").ranks))
    done = ckptd(node, "forget", "job")
    assert done.returncode == 1
    assert "step 1" in done.stderr
    assert "--force" in done.stderr
    assert sealed(node) == [(0, 1)]
    done = ckptd(node, "forget", "job", "--force")
    assert done.returncode == 0, done.stderr
    assert "freed" in done.stdout
    wait_for(lambda: node.slots() == [])
    with Ranks(node) as ranks:
        ranks.call("connect")
        assert ranks.call("load") == [None], "nothing unfinished is offered"


@pytest.mark.parametrize("away", ["emptied", "job removed", "another store"])
def test_forget_looks_at_the_store_before_it_gives_up_what_was_durable(node: Node, away: str):
    node.start()
    staged(node, drained=True)
    kept = Path(node.store).rename(f"{node.store}.kept")
    if away == "another store":
        PosixStore(node.store, fs=FileLayer()).open("other")
    elif away == "job removed":
        shutil.copytree(kept, node.store, ignore=shutil.ignore_patterns("job"))
    else:
        Path(node.store).mkdir()
    before = sealed(node)
    done = ckptd(node, "forget", "job")
    assert done.returncode == 1, done.stdout
    assert "step 1" in done.stderr
    assert "--force" in done.stderr
    assert sealed(node) == before
    shutil.rmtree(node.store)
    kept.rename(node.store)
    done = ckptd(node, "forget", "job")
    assert done.returncode == 0, done.stderr


def test_forget_of_an_unknown_job_names_those_there_are(node: Node):
    node.start()
    staged(node, drained=True)
    done = ckptd(node, "forget", "other")
    assert done.returncode == 2
    assert "its jobs: job" in done.stderr
