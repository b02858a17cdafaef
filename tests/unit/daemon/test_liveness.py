"""Rank files that the daemon looks at while ranks make them."""

import os
import shutil
import subprocess
import sys
import tempfile

import pytest

from ckptd.daemon.liveness import Liveness
from ckptd.shared.base.ids import JobKey
from ckptd.shared.files import locks
from ckptd.shared.format import arena_paths
from tests import pythons

pytestmark = pytest.mark.process
JOB, SESSION = JobKey("/store", "job"), "5e5510"
RANK = """
import sys
from ckptd.shared.base.ids import JobKey
from ckptd_client._local.slots import RankFile
held = RankFile(sys.argv[1], JobKey("/store", "job"), 0, sys.argv[2])
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def arena():
    """A directory in memory."""
    path = tempfile.mkdtemp(prefix="ckptd-test-", dir="/dev/shm")
    yield path
    shutil.rmtree(path)


@pytest.fixture
def rank(arena):
    """Starts a process that holds the rank file."""
    begun = []

    def start():
        words = [sys.executable, "-c", RANK, arena, SESSION]
        environ = pythons.inherited("CKPTD_") | pythons.ENVIRON
        begun.append(pythons.Popen(words, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        assert begun[0].stdout.readline() == "held\n"

    yield start
    for process in begun:
        process.communicate("", timeout=20)


def test_a_file_that_its_rank_locks_and_writes_while_the_daemon_looks_at_it_stays(arena, rank, monkeypatch):
    directory = os.path.join(arena, arena_paths.job_dir(JOB))
    path = os.path.join(directory, arena_paths.rank_file_name(0, SESSION))
    os.makedirs(directory, mode=0o700)
    with open(path, "x", encoding="ascii"):
        pass
    liveness, holder = Liveness(), locks.holder

    def found_before_it_is_locked(path):
        pid = holder(path)
        rank()
        return pid

    with monkeypatch.context() as patched:
        patched.setattr(locks, "holder", found_before_it_is_locked)
        assert liveness.look(directory) == ([], [])
    live, dead = liveness.look(directory)
    assert ([one.rank for one in live], dead) == ([0], [])
    assert liveness.knows(path)
    liveness.close()
