"""Rank files that the daemon looks at while ranks make them."""

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile

import pytest

from ckptd.arena.arena import Arena
from ckptd.daemon.liveness import Liveness
from ckptd.shared.base.errors import ConnectError
from ckptd.shared.base.ids import JobKey
from ckptd.shared.format import arena_paths
from ckptd_client._local.slots import RankFile
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


def forget(arena, directory):
    """What a daemon does that gives up the job's former run."""
    Arena(arena).forget_job(JOB)
    assert not os.path.exists(directory)


def look(arena, directory):
    """What a daemon does when another rank attaches."""
    assert Liveness().look(directory) == ([], [])


def gone(arena, directory):
    """The directory is removed, with what lies in it."""
    shutil.rmtree(directory)


@pytest.mark.parametrize("meanwhile", [forget, look, gone])
def test_a_rank_file_stays_whatever_the_daemon_does_while_it_is_made(arena, meanwhile, monkeypatch):
    directory = os.path.join(arena, arena_paths.job_dir(JOB))
    lock, once = fcntl.lockf, [meanwhile]

    def locked_late(fd, flags):
        while once:
            once.pop()(arena, directory)
        lock(fd, flags)

    monkeypatch.setattr(fcntl, "lockf", locked_late)
    made = RankFile(arena, JOB, 0, SESSION)
    assert not once
    assert not made.lost
    assert os.listdir(directory) == [os.path.basename(made.path)]
    made.close()


def test_a_rank_takes_the_place_of_its_ended_process_and_of_no_living_one(arena, rank):
    ended = RankFile(arena, JOB, 0, SESSION)
    ended.close()
    rank()
    liveness = Liveness()
    live, dead = liveness.look(os.path.dirname(ended.path))
    assert ([one.rank for one in live], dead) == ([0], [])
    with pytest.raises(ConnectError, match="it is this rank of this session already"):
        RankFile(arena, JOB, 0, SESSION)
    assert liveness.ended() == []
    assert os.listdir(os.path.dirname(ended.path)) == [os.path.basename(ended.path)]
    liveness.close()
