"""The short form of `make nodes`: twelve real daemons, of which two are lost; and nothing is left of it."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from bench.nodes.job import KEPT, RealJob, Shape
from bench.nodes.measure import run
from ckptd.shared.protocol.messages import Milestone, SlotGranted
from tests import pythons

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240)]
LONG = os.environ.get("FAULTS") == "long"
SMALL = Shape(nodes=2, set_size=2, nbytes=64 << 10, patience_s=60.0, peer_timeout_s=2.0)


@pytest.fixture(name="memory")
def fixture_memory():
    """A directory on tmpfs of which no process is left."""
    with tempfile.TemporaryDirectory(prefix="ckptd-test-", dir="/dev/shm") as memory:
        yield Path(memory)
        left = [process for process in Path("/proc").glob("[0-9]*") if memory in words(process)]
        for process in left:
            os.kill(int(process.name), signal.SIGKILL)
        assert left == []


@pytest.fixture(name="forked")
def fixture_forked(monkeypatch):
    """Daemons start in a moment."""
    monkeypatch.setattr("bench.large.daemon.subprocess", pythons)


def words(process):
    """Its command line."""
    try:
        return (process / "cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


@pytest.mark.usefixtures("forked")
def test_two_of_twelve_real_nodes_are_lost_and_all_load_from_memory_and_then_fewer_ranks(memory, tmp_path):
    """The newest save, which is not on the store: ten ranks find it, two are rebuilt; nine ranks pull their shares."""
    shape = SMALL._replace(nodes=12, set_size=6, nbytes=256 << 10)
    rows = run(memory, tmp_path, shape, idle_s=0, show=lambda _: None)
    assert [row.name for row in rows][2:] == [
        "step 100 staged", "step 100 durable", "step 101 staged", "step 101 protected", "loss of 2 nodes noticed",
        "restart of their daemons", "connect again", "load", "connect of 9 ranks", "load of 9 ranks", "bytes moved",
    ]  # fmt: skip
    assert 1 <= rows[-1].value <= rows[-1].bar


@pytest.mark.usefixtures("forked")
def test_a_rank_that_reads_another_bit_is_found(memory, tmp_path):
    with RealJob(memory, tmp_path, SMALL) as job:
        job.start_daemons()
        job.connect()
        job.prepare(KEPT)
        job.hand_over()
        job.reach(KEPT, Milestone.STAGED)
        job.connect()
        job.load()
        job.compare()
        found = job.ranks[1].loaded
        job.ranks[1].loaded = found._replace(content=found.content[:5000] + b"?" + found.content[5001:])
        with pytest.raises(RuntimeError, match="rank 1 has not read what it saved"):
            job.compare()


@pytest.mark.usefixtures("forked")
def test_a_rank_stages_in_no_slot_that_it_has_given_back(memory, tmp_path):
    """A slot that was granted before it asked again: the daemon grants it anew, and clears its seal first."""
    with RealJob(memory, tmp_path, SMALL._replace(nodes=1)) as job:
        job.start_daemons()
        job.connect()
        job.prepare(KEPT)
        job.hand_over()
        job.ranks[0].told[SlotGranted] = SlotGranted(slot="r00000-000002.slot", capacity=0)
        job.prepare(KEPT + 1)
        job.hand_over()
        job.reach(KEPT + 1, Milestone.STAGED)


@pytest.mark.parametrize("number", [signal.SIGTERM, *([signal.SIGINT] if LONG else [])])
def test_nothing_is_left_of_what_is_interrupted(memory, tmp_path, number):
    command = [sys.executable, "-m", "bench.nodes", "2", "--set-size", "2", "--mib", "1", "--idle", "60"]
    command += ["--memory", str(memory), "--store", str(tmp_path)]
    with pythons.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | pythons.ENVIRON) as program:
        assert any(line.startswith(f"step {KEPT} protected") for line in program.stdout)
        program.send_signal(number)
        assert program.wait(30) == 128 + number
    assert (os.listdir(memory), os.listdir(tmp_path)) == ([], [])
