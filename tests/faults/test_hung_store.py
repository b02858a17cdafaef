"""A store that hangs, or is full: the daemon answers, stops and restarts all the same; saves go on staging."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import zmq

from ckptd.checkpoint.verify import verify_path
from tests.cluster import Node, wait_for
from tests.faults.mounts import FuseStore, mounted, needs_fuse, needs_root
from tests.faults.ranks import JOB, MB, RankError, Ranks, told

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240)]

STORE_TIMEOUT_S = 1.5
FLAGS = ("--store-timeout-s", str(STORE_TIMEOUT_S), "--stop-drain-s", "1")
FULL_NBYTES = 24 * MB
STATE_NBYTES = 8 * MB


@pytest.fixture(name="fuse")
def fixture_fuse(tmp_path: Path):
    with FuseStore(str(tmp_path)) as fuse:
        yield fuse


@pytest.fixture(name="node")
def fixture_node(fuse: FuseStore, tmp_path: Path):
    with told(fuse.path, logs=str(tmp_path)) as node:
        node.start(*FLAGS)
        yield node
        fuse.go_on()


def answers_at_once(node: Node) -> None:
    """Status waits for no store."""
    began = time.monotonic()
    node.status()
    assert time.monotonic() - began < STORE_TIMEOUT_S


def restart(node: Node) -> None:
    """Stops in time, is ready in time."""
    began = time.monotonic()
    assert node.stop(10) == 0
    assert time.monotonic() - began < 9, "a drain that hangs is waited for no longer than stop_drain_s"
    began = time.monotonic()
    node.start(*FLAGS)
    assert time.monotonic() - began < 10
    answers_at_once(node)


def hang_in_a_drain(node: Node, fuse: FuseStore, ranks: Ranks, step: int) -> None:
    """The store stops answering while the step is drained."""
    ranks.call("save", step)
    wait_for(lambda: (job := node.job(JOB)) and job.drain is not None, every_s=0.001)
    fuse.hang()
    assert ranks.call("handle", step)[0][1] is None, "it was durable before the store hung"


@needs_fuse
def test_a_store_that_hangs_in_a_drain_stops_that_drain_and_nothing_else(node: Node, fuse: FuseStore):
    with Ranks(node, nbytes=32 * MB) as ranks:
        ranks.call("connect")
        ranks.call("save", 1)
        ranks.call("wait", 1)
        hang_in_a_drain(node, fuse, ranks, 2)
        for step in (3, 4, 5):
            assert ranks.call("save", step)[0] < 2
            assert ranks.call("wait", step, "staged") == [("staged", None)]
            answers_at_once(node)
        restart(node)
        ranks.call("save", 6)
        assert ranks.call("wait", 6, "staged") == [("staged", None)]
        answers_at_once(node)
        fuse.go_on()
        assert ranks.call("wait", 6, timeout_s=60) == [("durable", "durable")]
        ranks.call("close")
    wait_for(lambda: node.slots() == [])
    assert verify_path(f"{fuse.behind}/{JOB}").problems == []


@needs_fuse
def test_load_from_memory_needs_no_store_and_says_what_it_did_without(node: Node, fuse: FuseStore):
    with Ranks(node) as ranks:
        ranks.call("connect")
        ranks.call("save", 1)
        ranks.call("wait", 1)
        fuse.hang()
        ranks.call("save", 2)
        ranks.call("wait", 2, "staged")
        ranks.kill()
    restart(node)
    with Ranks(node) as ranks:
        (incarnation,) = ranks.call("connect")
        assert ranks[0].seconds < STORE_TIMEOUT_S + 6
        assert incarnation > 1, "an incarnation that lies in memory is not given again"
        assert [log for log in ranks[0].call("logs") if "did not give an incarnation number" in log]
        (found,) = ranks.call("load")
        assert (found["step"], found["tier"], found["intact"]) == (2, "arena", True)
        assert any("did not answer" in note for note in found["notes"])
        ranks.call("save", 3)
        ranks.call("wait", 3, "staged")
        fuse.go_on()
        assert ranks.call("wait_newest") == [3]


@needs_fuse
def test_load_with_nothing_in_memory_is_an_error_not_a_fresh_start(node: Node, fuse: FuseStore):
    with Ranks(node) as ranks:
        ranks.call("connect")
        ranks.call("save", 1)
        ranks.call("wait", 1)
        ranks.call("close")
    wait_for(lambda: node.slots() == [])
    fuse.hang()
    with Ranks(node) as ranks:
        ranks.call("connect")
        with pytest.raises(RankError, match="cannot tell whether there is a checkpoint") as error:
            ranks.call("load")
        assert error.value.kind == "RestoreError"
        assert error.value.seconds < STORE_TIMEOUT_S + 2
        fuse.go_on()
        assert ranks.call("load")[0]["intact"]


@needs_fuse
def test_a_hung_store_harms_no_job_on_another_store(node: Node, fuse: FuseStore, tmp_path: Path):
    other = tmp_path / "other"
    other.mkdir()
    with Ranks(node, nbytes=32 * MB) as ranks, Ranks(node, CKPTD_STORE=str(other)) as neighbours:
        ranks.call("connect")
        neighbours.call("connect")
        hang_in_a_drain(node, fuse, ranks, 1)
        for step in range(1, 5):
            neighbours.call("save", step)
            assert neighbours.call("wait", step, timeout_s=10) == [("durable", "durable")]
        assert ranks.call("handle", 1)[0][1] is None


@needs_fuse
def test_a_save_is_durable_when_the_directory_of_its_trainer_no_longer_hangs(fuse: FuseStore, tmp_path: Path):
    """It lies on another file system than the store, where the checkpoint is committed meanwhile."""
    (tmp_path / "store").mkdir()
    with told(str(tmp_path / "store")) as node:
        node.start()
        with Ranks(node) as ranks:
            ranks.call("connect")
            fuse.hang()
            for step in (1, 2):
                ranks.call("save_files", step, directory=f"{fuse.path}/step{step}")
            wait_for(lambda: list((tmp_path / "store").glob("*/step-000000001.*/COMMITTED")))
            time.sleep(1.0)
            answers_at_once(node)
            assert [ranks.call("handle", step)[0][:2] for step in (1, 2)] == [("staged", None)] * 2
            fuse.go_on()
            for step in (1, 2):
                assert ranks.call("wait", step) == [("durable", "durable")]
                assert f"step{step}" in os.listdir(fuse.behind)
            ranks.call("close")


@needs_root
def test_a_full_store_is_tried_again_until_there_is_room(tmp_path: Path):
    store = tmp_path / "store"
    store.mkdir()
    with (
        mounted(str(store), "-t", "tmpfs", "-o", f"size={FULL_NBYTES}", "tmpfs"),
        told(str(store), logs=str(tmp_path)) as node,
    ):
        node.start()
        hog = store / "hog"
        with Ranks(node, nbytes=STATE_NBYTES) as ranks:
            ranks.call("connect")
            ranks.call("save", 1)
            ranks.call("wait", 1)
            subprocess.run(["dd", "if=/dev/zero", f"of={hog}", "bs=1M"], check=False, capture_output=True)
            os.truncate(hog, os.path.getsize(hog) - 4 * MB)  # half of a checkpoint fits
            ranks.call("save", 2)
            wait_for(lambda: (drain := node.job(JOB).drain) and drain.attempt >= 3 and drain.retry_in_s)
            drain = node.job(JOB).drain
            assert "No space left" in drain.last_error
            assert "free space on the store" in drain.last_error
            assert 1 < drain.retry_in_s <= 2
            assert any("No space left" in error for error in node.job(JOB).errors)
            ranks.call("save", 3)
            assert ranks.call("wait", 3, "staged") == [("staged", None)]
            hog.unlink()
            assert ranks.call("wait", 3) == [("durable", "durable")]
            assert ranks.call("settle", 2)[0][1] == "superseded"
            ranks.call("close")
        wait_for(lambda: node.slots() == [])
        wait_for(lambda: not [name for name in os.listdir(store / JOB) if ".partial-" in name])
        assert verify_path(str(store / JOB)).problems == []


# --- an environment that lies on a mount that hangs


@needs_fuse
def test_a_worker_that_cannot_be_started_while_its_python_hangs_holds_nothing_up(tmp_path: Path):
    with FuseStore(str(tmp_path)) as fuse, told(str(tmp_path)) as node:
        os.symlink(sys.executable, os.path.join(fuse.behind, "python"))
        packages = os.pathsep.join([node.environ()["PYTHONPATH"], os.path.dirname(os.path.dirname(zmq.__file__))])
        with open(node.log, "ab") as log:
            node.daemon = subprocess.Popen(
                [os.path.join(fuse.path, "python"), "-P", "-m", "ckptd", "run", "--arena", node.arena, *FLAGS],
                env=node.environ(PYTHONPATH=packages) | {"CKPTD_STORE": ""},
                stdout=log,
                stderr=log,
            )
        wait_for(node.try_status)
        time.sleep(1.5)  # the kernel knows the name for a second
        fuse.hang()
        try:
            with Ranks(node) as ranks:
                ranks.start("connect")
                for _ in range(20):
                    answers_at_once(node)
                    time.sleep(0.1)
                ranks.results(10)
                ranks.call("save", 1)
                assert ranks.call("wait", 1, "staged") == [("staged", None)]
                answers_at_once(node)
                fuse.go_on()
                assert ranks.call("wait", 1, timeout_s=60) == [("durable", "durable")]
        finally:
            fuse.go_on()
