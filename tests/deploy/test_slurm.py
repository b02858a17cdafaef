"""deploy/slurm on a real Slurm: a job that is requeued, and the prolog and epilog of a site."""

import contextlib
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile

import pytest

from ckptd.ask import ask_status
from ckptd.locks import holder
from tests.cluster import CODE, ROOT, wait_for
from tests.deploy import slurm

FILES = pathlib.Path(ROOT) / "deploy/slurm"
TRAINER = str(pathlib.Path(__file__).with_name("trainer.py"))
PATIENCE_S = 60.0
pytestmark = [
    pytest.mark.skipif(bool(slurm.missing()), reason=f"no Slurm here (Debian: slurmctld slurmd): {slurm.missing()}"),
    pytest.mark.timeout(240),
    pytest.mark.xdist_group("slurm"),
]

# Both nodes are this machine: each has an arena of its own, and what a node's processes need to find this tree.
NODE = """\
export CKPTD_ARENA={shm}/"${{SLURMD_NODENAME:-n1}}" CKPTD_NODE="${{SLURMD_NODENAME:-n1}}"
export CKPTD_STORE={store} CKPTD_PEER_ADDRESS=127.0.0.1 CKPTD_CONFIG=/dev/null
export PYTHONPATH={code} PYTHONWARNINGS=ignore PYTHONUNBUFFERED=1 GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1
exec {python} -P {program} "$@"
"""


@pytest.fixture
def site():
    """A short directory for Slurm, and a place for arenas; daemons that are still there are ended."""
    where = pathlib.Path(tempfile.mkdtemp(prefix="ckptd-slurm-"))
    shm = pathlib.Path(tempfile.mkdtemp(prefix="ckptd-slurm-", dir="/dev/shm"))
    try:
        yield where, shm
    finally:
        for arena in shm.iterdir():
            end_daemon(arena)
        shutil.rmtree(shm)
        shutil.rmtree(where)


def end_daemon(arena):
    pid = None
    with contextlib.suppress(OSError):
        pid = holder(str(arena / "lock"))
    if pid:
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not os.path.exists(f"/proc/{pid}"))


def install(cluster, shm):
    """What a site has on its nodes: the command, and here a training, with the settings of the node."""
    for name, program in {"ckptd": "-m ckptd", "train": TRAINER}.items():
        path = cluster.where / "bin" / name
        values = {"shm": shm, "store": cluster.where / "store", "code": CODE, "python": sys.executable}
        path.write_text("#!/bin/sh\n" + NODE.format(program=program, **values))
        path.chmod(0o755)


def slots(arena):
    return list(arena.rglob("*.slot"))


def test_a_job_that_must_go_comes_back_to_memory_and_one_that_fails_leaves_none(site):
    where, shm = site
    with slurm.Slurm(where, nodes=2) as cluster:
        install(cluster, shm)
        fail = where / "fail"
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
        assert os.path.isdir(where / f"store/train-{job}/step-{int(drained[1]):09d}.i0002")
        assert len(slots(shm / "n1")) > 0
        fail.touch()
        await_job(cluster, lambda: ended(cluster, job))
        assert cluster.state(job) == "FAILED", cluster.output() + cluster.logs()
        saved = max(int(number) for number in re.findall(r"saved (\d+)", cluster.output()))
        assert os.readlink(where / f"store/train-{job}/latest").startswith(f"step-{saved:09d}"), "drained at the end"
        assert slots(shm) == [], cluster.output()
        assert [holder(str(arena / "lock")) for arena in shm.iterdir()] == [None, None], "daemons have ended"


@pytest.mark.skipif(os.geteuid() != 0, reason="a prolog runs as root")
def test_a_daemon_of_the_prolog_outlives_jobs_and_the_epilog_keeps_within_limits(site):
    where, shm = site
    hooks = {name: edited(name, where) for name in ("prolog", "epilog")}
    with slurm.Slurm(where, 1, Prolog=hooks["prolog"], Epilog=hooks["epilog"], PrologFlags="Alloc") as cluster:
        install(cluster, shm)
        (where / "store").mkdir()
        script = where / "job.sh"
        script.write_text('#!/bin/bash\nexport CKPTD_JOB=chain CKPTD_NO_AUTOSTART=1\nsrun train "$1"\n')
        assert failed(cluster, script, "2") == "from step 0, anew"
        daemon = ask_status(str(shm / "n1"), 5.0)
        assert os.readlink(where / "store/chain/latest").startswith("step-000000001"), "drained by the epilog"
        assert failed(cluster, script, "1") == "from step 2, arena"
        assert ask_status(str(shm / "n1"), 5.0).pid == daemon.pid
        assert ask_status(str(shm / "n1"), 5.0).used_nbytes > 0
        text = pathlib.Path(hooks["epilog"]).read_text()
        assert "KEEP_PERCENT=10" in text
        pathlib.Path(hooks["epilog"]).write_text(text.replace("KEEP_PERCENT=10", "KEEP_PERCENT=0"))
        environ = cluster.environ() | {"SLURM_JOB_USER": where.owner()}
        subprocess.run([hooks["epilog"]], env=environ, check=True, timeout=60)
        assert ask_status(str(shm / "n1"), 5.0).used_nbytes == 0


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
