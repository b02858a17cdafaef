"""deploy/mpi, by a real mpiexec; two hosts that are this machine."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from tests.cluster import ROOT
from tests.deploy.homes import Homes

SCRIPT = os.path.join(ROOT, "deploy/mpi/train.sh")
MPIEXEC = pathlib.Path(sys.executable).with_name("mpiexec")
# A drain of 2 s, which nobody waits for who only stops.
SLOW = {"TRAINER_NUMBERS": "10000000", "CKPTD_DRAIN_BANDWIDTH": "20M", "CKPTD_STOP_DRAIN_S": "0"}
pytestmark = pytest.mark.skipif(not MPIEXEC.exists(), reason="no mpiexec beside this python (pip: mpich)")


@pytest.fixture
def homes():
    with Homes("n$PMI_RANK") as homes:
        yield homes


def train(homes, *words):
    assert shutil.which("mpiexec", path=homes.environ()["PATH"]) == str(MPIEXEC)
    environ = homes.environ(HOSTS="localhost,127.0.0.1", PPN="1", HYDRA_LAUNCHER="fork", CKPTD_JOB="job", **SLOW)
    return subprocess.run(
        [SCRIPT, "train", *words], env=environ, capture_output=True, text=True, timeout=110, check=False
    )


def test_a_daemon_on_each_host_outlives_the_training_and_ends_well(homes):
    done = train(homes, "3")
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.count("from step 0, anew") == 2
    assert homes.durable("job").startswith("step-000000002"), "what the dead training left was drained"
    assert homes.arenas() == {"n0": None, "n1": None}
    assert homes.slots("n0"), "and stays in memory"
