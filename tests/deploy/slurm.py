"""Slurm on this machine: munged, slurmctld and slurmd for one or two nodes, in a directory, as this user."""

import contextlib
import os
import shutil
import subprocess
from types import TracebackType
from typing import Self

from tests.cluster import ROOT, wait_for
from tests.deploy.homes import Homes
from tests.ports import free_ports

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
_CONFIG = """\
ClusterName=test
SlurmctldHost=localhost
SlurmctldPort={controller_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
# A requeued job waits for as long as a credential lives, two minutes by default.
AuthInfo=socket={where}/munge.socket,cred_expire=5
StateSaveLocation={where}/state
SlurmdSpoolDir={where}/%n
SlurmctldPidFile={where}/slurmctld.pid
SlurmdPidFile={where}/%n.pid
SlurmctldLogFile={where}/slurmctld.log
SlurmdLogFile={where}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,batch_sched_delay=0,sched_min_interval=0
ReturnToService=2
KillWait=5
{more}
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """Programs that are not installed, empty when all are."""
    return ", ".join(name for name in PROGRAMS if shutil.which(name, path=_path(os.environ["PATH"])) is None)


def _path(path: str) -> str:
    """With the directories of daemons, which an ordinary user's lacks."""
    return os.pathsep.join((path, "/usr/sbin", "/sbin"))


class Slurm:
    """A cluster of nodes n1, n2, ... on loopback. A context manager that ends what it started. more: of slurm.conf."""

    def __init__(self, homes: Homes, nodes: int, **more: str) -> None:
        self._homes = homes
        self.where = homes.where
        self._names = [f"n{number + 1}" for number in range(nodes)]
        self._more = more
        self._daemons: list[subprocess.Popen[bytes]] = []

    def environ(self) -> dict[str, str]:
        """Of every command and job."""
        environ = self._homes.environ(SLURM_CONF=str(self.where / "slurm.conf"), MASTER_ADDR="127.0.0.1")
        return environ | {"PATH": _path(environ["PATH"])}

    def command(self, *words: str) -> str:
        """What a command of Slurm prints. Raises AssertionError with its error."""
        done = subprocess.run(
            words, env=self.environ(), cwd=self.where, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}\n{self.logs()}"
        return done.stdout.strip()

    def submit(self, *words: str) -> str:
        """The number of a job; its output goes to job.log."""
        return self.command("sbatch", "--parsable", "--output", str(self.where / "job.log"), *words)

    def state(self, job: str) -> str:
        """Such as RUNNING; of a job that ended too."""
        shown = self.command("scontrol", "show", "job", "--oneliner", job)
        return next(word.partition("=")[2] for word in shown.split() if word.startswith("JobState="))

    def output(self) -> str:
        """What the job printed so far."""
        with contextlib.suppress(FileNotFoundError):
            return (self.where / "job.log").read_text()
        return ""

    def logs(self) -> str:
        """Of all daemons, for a person."""
        return "\n".join(f"--- {path}\n{path.read_text()[-3000:]}" for path in sorted(self.where.glob("*.log")))

    def __enter__(self) -> Self:
        self._configure()
        socket = self.where / "munge.socket"
        files = [f"--{name}-file={self.where}/munge.{name}" for name in ("key", "pid", "log", "seed")]
        try:
            self._start("munged", "--foreground", "--force", f"--socket={socket}", *files)
            wait_for(socket.exists)
            self._start("slurmctld", "-D")
            for name in self._names:
                self._start("slurmd", "-D", "-N", name)
            wait_for(lambda: self.command("sinfo", "-h", "-o", "%T", "-N").split() == ["idle"] * len(self._names))
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _configure(self) -> None:
        for name in ("state", *self._names):
            (self.where / name).mkdir()
        key = self.where / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        controller, *ports = free_ports(1 + len(self._names))
        described = "NodeName={} NodeHostname=localhost NodeAddr=127.0.0.1 Port={} CPUs=8 RealMemory=1000"
        nodes = "\n".join(map(described.format, self._names, ports))
        more = "\n".join(f"{key}={value}" for key, value in self._more.items())
        values = {"controller_port": controller, "user": self.where.owner(), "where": self.where}
        (self.where / "slurm.conf").write_text(_CONFIG.format(**values, nodes=nodes, more=more))
        (self.where / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")

    def _start(self, program: str, *words: str) -> None:
        with open(self.where / f"{program}.{len(self._daemons)}.log", "ab") as log:
            found = shutil.which(program, path=self.environ()["PATH"])
            assert found is not None
            self._daemons.append(
                subprocess.Popen([found, *words], env=self.environ(), cwd=ROOT, stdout=log, stderr=log)
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if len(self._daemons) > 1:
            with contextlib.suppress(Exception):
                self.command("scancel", "--user", self.where.owner(), "--signal=KILL", "--full")
                self.command("scancel", "--user", self.where.owner())
                wait_for(lambda: not self.command("squeue", "-h"))
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(60)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
