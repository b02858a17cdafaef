"""A memory that is full to the last page: a restart connects and loads what lies there, or hears what to free."""

import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import pythons
from tests.cluster import Node, wait_for
from tests.faults.mounts import mounted, needs_root
from tests.faults.ranks import MB, RankError, Ranks, daemons, told

pytestmark = [pytest.mark.faults, pytest.mark.timeout(120), needs_root]

LONG = os.environ.get("FAULTS") == "long"
SHM_NBYTES = 64 * MB
NBYTES = 2 * MB


@pytest.fixture(name="node")
def fixture_node(tmp_path: Path):
    store, shm = tmp_path / "store", tmp_path / "shm"
    store.mkdir()
    shm.mkdir()
    with mounted(str(shm), "-t", "tmpfs", "-o", f"size={SHM_NBYTES},mode=0755", "tmpfs"):
        with told(str(store), arena=str(shm / "arena")) as node:
            yield node
        for pid in daemons(node.arena):  # those that a client started
            os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not daemons(node.arena))
        shutil.rmtree(node.arena, ignore_errors=True)


def fill(node: Node) -> str:
    """Takes every page that is left; the path of the file that has them."""
    hog = os.path.join(os.path.dirname(node.arena), "hog")
    fd = os.open(hog, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with contextlib.suppress(OSError):
        while True:
            os.write(fd, bytes(MB))
    with contextlib.suppress(OSError):
        while True:
            os.write(fd, bytes(4096))
    os.close(fd)
    return hog


@contextlib.contextmanager
def staged(node: Node, world: int) -> Iterator[Ranks]:
    """Ranks that have saved step 1, durable, and step 2, in memory only."""
    with Ranks(node, world, nbytes=NBYTES) as ranks:
        ranks.call("connect", drain_every=100)
        ranks.call("save", 1)
        ranks.call("wait", 1)
        ranks.call("save", 2)
        ranks.call("wait", 2, "staged")
        yield ranks


def assert_loads_and_goes_on(ranks: Ranks, *, tier: str = "arena", step: int = 2) -> None:
    ranks.call("connect", drain_every=100)
    for found in ranks.call("load"):
        assert (found["step"], found["tier"], found["intact"]) == (step, tier, True)
    assert all(ranks.call("hears_preemption", step))
    ranks.call("save", 3, drain=True)
    assert {end for _, end in ranks.call("wait", 3)} == {"durable"}


CASES = list(itertools.product(("lives", "is killed"), (1, 2, 5))) if LONG else (("lives", 1), ("is killed", 2))


@pytest.mark.parametrize(("daemon", "world"), CASES)
def test_ranks_come_back_to_what_lies_in_a_full_memory(node, world, daemon):
    node.start()
    with staged(node, world) as ranks:
        if daemon == "is killed":
            node.kill()
        ranks.kill()
    if daemon == "lives":
        wait_for(lambda: not [name for name in files_of(node) if name.endswith(".rank")])
    fill(node)
    if daemon == "is killed":
        node.start()
    for _ in range(2):  # also for ranks that die and come again
        with Ranks(node, world, nbytes=NBYTES) as ranks:
            assert_loads_and_goes_on(ranks, step=2 if _ == 0 else 3)
            ranks.kill()


def test_a_memory_that_fills_while_ranks_live_does_not_keep_a_second_job_out(node):
    node.start()
    with staged(node, 2) as ranks:
        fill(node)
        ranks.kill()
    with Ranks(node, 2, nbytes=NBYTES) as ranks:
        assert_loads_and_goes_on(ranks)


def test_a_daemon_that_clients_start_serves_a_full_memory(node):
    with staged(node, 2) as ranks:
        for pid in daemons(node.arena):
            os.kill(pid, signal.SIGKILL)
        ranks.kill()
    wait_for(lambda: not daemons(node.arena))
    os.unlink(os.path.join(node.arena, "ckptd.log"))
    fill(node)
    with Ranks(node, 2, nbytes=NBYTES) as ranks:
        assert_loads_and_goes_on(ranks)


def test_a_node_with_nothing_but_a_full_memory_loads_from_the_store_or_says_what_to_free(node):
    node.start()
    with staged(node, 1) as ranks:
        ranks.call("wait_newest")
        ranks.kill()
    node.stop()
    shutil.rmtree(node.arena)
    hog = fill(node)
    with Ranks(node, 1, nbytes=NBYTES) as ranks:
        with pytest.raises(RankError) as error:
            ranks.call("connect", start=True)
        assert error.value.kind in {"BudgetError", "ConfigError", "ConnectError"}, error.value
        assert_says_what_to_free(str(error.value), node)
        os.unlink(hog)
        assert_loads_and_goes_on(ranks, tier="pfs")


def assert_says_what_to_free(text: str, node: Node) -> None:
    mount = os.path.dirname(node.arena)
    assert re.search(rf"there is no room for .* in {node.arena}: {mount} is full: \d+ bytes free of 64 MiB", text), text
    assert f"du -sh {mount}/*" in text
    assert "mount -o remount,size=" in text


def test_a_process_that_takes_each_page_that_is_freed_keeps_no_rank_out(node):
    node.start()
    over = threading.Event()

    def take():
        while not over.wait(0.01):
            fill(node)

    with staged(node, 2) as ranks:
        ranks.kill()
    thread = threading.Thread(target=take)
    thread.start()
    try:
        for step in (2, 3, 3):
            with Ranks(node, 2, nbytes=NBYTES) as ranks:
                assert_loads_and_goes_on(ranks, step=step)
                ranks.kill()
    finally:
        over.set()
        thread.join()


def test_a_daemon_that_finds_no_page_says_so_in_one_line(node):
    fill(node)
    words = [sys.executable, "-m", "ckptd", "run", "--arena", node.arena]
    done = pythons.run(words, env=node.environ(), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert_says_what_to_free(done.stderr, node)
    assert "Traceback" not in done.stderr


def test_a_memory_without_a_file_left_is_reported_as_such(node):
    mount = os.path.dirname(node.arena)
    subprocess.run(["mount", "-o", "remount,nr_inodes=20", mount], check=True)
    with contextlib.suppress(OSError):
        for number in range(20):
            os.close(os.open(f"{mount}/{number}", os.O_CREAT))
    with Ranks(node, nbytes=NBYTES) as ranks, pytest.raises(RankError) as error:
        ranks.call("connect")
    assert error.value.kind == "BudgetError"
    assert f"{mount} is full: no file left of 20" in str(error.value)
    assert "mount -o remount,nr_inodes=" in str(error.value)


def files_of(node: Node) -> list[str]:
    return [name for _, _, names in os.walk(os.path.join(node.arena, "jobs")) for name in names]
