"""deploy/slurm on a real Slurm: a job that is requeued, and the prolog and epilog of a site."""

import os
import pathlib
import re
import subprocess

import pytest

from ckptd.arena.ask import ask_status
from tests.cluster import ROOT, wait_for
from tests.deploy import slurm
from tests.deploy.homes import Homes

FILES = pathlib.Path(ROOT) / "deploy/slurm"
PATIENCE_S = 100.0
pytestmark = [
    pytest.mark.skipif(bool(slurm.missing()), reason=f"no Slurm here (Debian: slurmctld slurmd): {slurm.missing()}"),
    pytest.mark.timeout(300),
    pytest.mark.xdist_group("slurm"),
]


@pytest.fixture
def homes():
    with Homes("${SLURMD_NODENAME:-n1}") as homes:
        yield homes


def test_a_job_that_must_go_comes_back_to_memory_and_one_that_fails_leaves_none(homes):
    with slurm.Slurm(homes, nodes=2) as cluster:
        fail = homes.where / "fail"
        job = cluster.submit("--nodes=2", str(FILES / "train.sbatch"), "train", str(fail))
        await_job(cluster, lambda: "saved 2" in cluster.output() or ended(cluster, job))
        assert cluster.state(job) == "RUNNING", cluster.output() + cluster.logs()
        cluster.command("scancel", "--signal=USR1", "--batch", job)
        await_job(cluster, lambda: cluster.output().count("from step") == 4 or ended(cluster, job))
        first, second = cluster.output().split("notice: draining, then requeueing\n")
        assert first.count(", anew") == 2
        assert second.count(", arena") == 2, second
        drained = re.search(rf"train-{job}: step (\d+) is durable(?s:.*)from step", second)
        assert drained, second
        there = sorted(path.name for path in (homes.store / f"train-{job}").glob("step-*"))
        assert there[-1] >= f"step-{int(drained[1]):09d}.i", "it, or what the job that goes on has drained since"
        assert homes.slots("n1")
        fail.touch()
        await_job(cluster, lambda: ended(cluster, job))
        assert cluster.state(job) == "FAILED", cluster.output() + cluster.logs()
        saved = max(int(number) for number in re.findall(r"saved (\d+)", cluster.output()))
        assert homes.durable(f"train-{job}").startswith(f"step-{saved:09d}"), "drained at the end"
        assert homes.slots() == [], cluster.output()
        assert homes.arenas() == {"n1": None, "n2": None}


@pytest.mark.skipif(os.geteuid() != 0, reason="a prolog runs as root")
def test_a_daemon_of_the_prolog_outlives_jobs_and_the_epilog_keeps_within_limits(homes):
    hooks = {name: edited(name, homes.where) for name in ("prolog", "epilog")}
    (homes.where / f"{homes.where.owner()}.env").write_text("CKPTD_DRAIN_BANDWIDTH=20M\nMETRICS_ARGS=--port 9440\n")
    with slurm.Slurm(homes, 1, Prolog=hooks["prolog"], Epilog=hooks["epilog"], PrologFlags="Alloc") as cluster:
        script = homes.where / "job.sh"
        script.write_text(
            '#!/bin/bash\nexport TRAINER_NUMBERS=10000000 CKPTD_JOB=chain CKPTD_NO_AUTOSTART=1\nsrun train "$1"\n'
        )
        assert failed(cluster, script, "2") == "from step 0, anew"
        daemon = ask_status(str(homes.shm / "n1"), 5.0)
        assert homes.durable("chain").startswith("step-000000001"), "drained by the epilog"
        assert failed(cluster, script, "1") == "from step 2, arena"
        assert ask_status(str(homes.shm / "n1"), 5.0).pid == daemon.pid
        assert ask_status(str(homes.shm / "n1"), 5.0).used_nbytes > 0
        text = pathlib.Path(hooks["epilog"]).read_text()
        assert "KEEP_PERCENT=10" in text
        pathlib.Path(hooks["epilog"]).write_text(text.replace("KEEP_PERCENT=10", "KEEP_PERCENT=0"))
        environ = cluster.environ() | {"SLURM_JOB_USER": homes.where.owner()}
        subprocess.run([hooks["epilog"]], env=environ, check=True, timeout=120)
        assert ask_status(str(homes.shm / "n1"), 5.0).used_nbytes == 0


def edited(name, where):
    """The hook as an administrator adapts it: the first lines, which say where things are."""
    path = where / f"{name}.sh"
    text = (FILES / f"{name}.sh").read_text()
    for line, becomes in {
        "PATH=/opt/ckptd/bin:": f"PATH={where}/bin:",
        "SETTINGS=/etc/ckptd/": f"SETTINGS={where}/",
        "LOGS=/var/log": f"LOGS={where}",
    }.items():
        assert line in text or (name == "epilog" and line.startswith("LOGS"))
        text = text.replace(line, becomes)
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def ended(cluster, job):
    return cluster.state(job) not in {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED"}


def failed(cluster, script, *words):
    """Where a job began whose training died, after the epilog."""
    (cluster.where / "job.log").unlink(missing_ok=True)
    job = cluster.submit(str(script), *words)
    await_job(cluster, lambda: ended(cluster, job))
    assert cluster.state(job) == "FAILED", cluster.output() + cluster.logs()
    await_job(cluster, lambda: cluster.command("sinfo", "-h", "-o", "%T") == "idle")  # the epilog is over
    begun = [line for line in cluster.output().splitlines() if line.startswith("from step")]
    assert len(begun) == 1, cluster.output() + cluster.logs()
    return begun[0]


def await_job(cluster, what):
    """wait_for, which says on failure what Slurm and the job said."""
    try:
        wait_for(what, PATIENCE_S, every_s=0.3)
    except AssertionError as error:
        pytest.fail(f"{error}\n{cluster.output()}\n{cluster.logs()}")
