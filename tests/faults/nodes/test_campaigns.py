"""The short form of `make histories` and `make kills`: a few seeds, and campaigns that are told to end."""

import contextlib
import glob
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile

import pytest

from tests.cluster import CODE, ROOT, wait_for
from tests.faults.histories import play
from tests.faults.kill_campaign import episode
from tests.pythons import inherited

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240), pytest.mark.xdist_group("nodes-campaigns")]

SEEDS = (0, 4, 15)  # a takeover, a start over, a store that comes back
LONG = os.environ.get("FAULTS") == "long"


@pytest.mark.parametrize("seed", range(20) if LONG else SEEDS)
def test_no_load_of_this_history_mixes_two_runs(zygote, seed: int):
    outcome = play(seed, zygote)
    assert outcome.findings == [], str(outcome)
    assert len(outcome.runs) >= 3


def test_promises_hold_through_these_disturbances(zygote):
    counts = episode(0, 25 if LONG else 4, zygote)
    assert counts.findings == [], str(counts)
    assert counts.disturbances.total() > 0
    assert counts.loads.total() > counts.disturbances.total() / 2


ENDS = [("histories", signal.SIGTERM), *([("kill_campaign", signal.SIGINT)] if LONG else [])]


@pytest.mark.parametrize(("campaign", "number"), ENDS)
def test_a_campaign_that_is_asked_to_end_leaves_nothing(campaign: str, number: int):
    temporary = tempfile.mkdtemp(prefix="ckptd-test-")
    environ = inherited("TESTS_") | {"TMPDIR": temporary, "PYTHONPATH": CODE}
    words = [sys.executable, "-m", f"tests.faults.{campaign}", "100"]  # all that it starts is below it
    process = subprocess.Popen(words, env=environ, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        stores = os.path.join(temporary, "ckptd-test-*", "store", "job", "step-*")
        wait_for(lambda: glob.glob(stores) or process.poll() is not None, 60)
        pids = descendants(process.pid)
        arenas = {arena for pid in pids for arena in arenas_of(pid)}
        assert len(arenas) >= 3, "no daemons"
        process.send_signal(number)
        said = process.communicate(timeout=60)[0].decode()
        assert process.returncode == 128 + number, said
        wait_for(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids))
        assert [arena for arena in arenas if os.path.exists(arena)] == []
        assert os.listdir(temporary) == []
    finally:
        process.terminate()  # which cleans up, if it still runs; after SIGKILL its daemons would stay
        process.communicate(timeout=60)
        shutil.rmtree(temporary)


def descendants(pid: int) -> list[int]:
    """Of a process, as of now."""
    found = []
    for path in glob.glob(f"/proc/{pid}/task/*/children"):
        with contextlib.suppress(OSError), open(path, encoding="ascii") as file:
            for child in map(int, file.read().split()):
                found += [child, *descendants(child)]
    return found


def arenas_of(pid: int) -> list[str]:
    """What the command line of a daemon says."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().decode().split("\0")
    except OSError:
        return []
    return [word for before, word in itertools.pairwise(words) if before == "--arena"]
