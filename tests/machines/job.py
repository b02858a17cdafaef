"""A training job across the machines, started as a user would, and what its ranks say."""

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tests.cluster import wait_for
from tests.machines.cluster import Machines
from tests.machines.machine import Machine
from tests.machines.tree import JOB_DIR, USER

_SCRIPT = f"{JOB_DIR}/train.py"
_START_S = 90  # four ranks that import torch, on the machine's two cores


class Line(NamedTuple):
    """One fact: ``words`` after its name."""

    rank: int
    what: str
    words: list[str]


class Job:
    """One start of a job: a rank on each of the machines. ``launcher``: torchrun or mpiexec."""

    def __init__(self, machines: Sequence[Machine], name: str, *flags: str, launcher: str, logs: str) -> None:
        self.name = name
        self.machines = list(machines)
        self._stop_file = f"/tmp/{name}.stop"
        self._processes: list[subprocess.Popen[bytes]] = []
        self._logs: list[str] = []
        self.machines[0].user_does(f"rm -f {self._stop_file}")
        program = [_SCRIPT, name, f"--stop-file={self._stop_file}", *flags]
        commands = _torchrun(self.machines, program) if launcher == "torchrun" else _mpiexec(self.machines, program)
        for machine, command in commands:
            log = os.path.join(logs, f"{name}-{machine.name}-{len(os.listdir(logs))}.log")
            self._logs.append(log)
            with open(log, "wb") as file:
                login = machine.login(command)
                self._processes.append(
                    subprocess.Popen(login, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT)
                )

    # --- what it says

    def output(self) -> str:
        """Everything, of all its ranks."""
        texts = []
        for log in self._logs:
            with open(log, errors="replace") as file:
                texts.append(file.read())
        return "\n".join(texts)

    def lines(self, what: str) -> list[Line]:
        """Every fact of this name so far."""
        found = re.findall(rf"^rank(\d+) {what}\b ?(.*)$", self.output(), re.MULTILINE)
        return [Line(int(rank), what, words.split()) for rank, words in found]

    def steps(self, what: str, rank: int = 0) -> list[int]:
        """Those that one rank has told with this fact."""
        return [int(line.words[0]) for line in self.lines(what) if line.rank == rank]

    def digests(self) -> dict[tuple[int, int], str]:
        """What each rank said that it saved, by rank and step."""
        return {(line.rank, int(line.words[0])): line.words[1] for line in self.lines("saved")}

    def wait_lines(self, what: str, count: int = 0, timeout_s: float = _START_S) -> list[Line]:
        """Once there are as many, by default one of each rank."""
        count = count or len(self.machines)

        def there() -> list[Line]:
            lines = self.lines(what)
            assert len(lines) >= count or self.runs, f"{self.name} ended without {what}\n{self.output()[-4000:]}"
            return lines if len(lines) >= count else []

        return wait_for(there, timeout_s, every_s=0.2)  # type: ignore[return-value]

    def wait_step(self, step: int, timeout_s: float = 60) -> None:
        """Until rank 0 has trained it."""
        wait_for(lambda: max(self.steps("step"), default=-1) >= step, timeout_s, every_s=0.2)

    def wait_more(self, steps: int, timeout_s: float = 60) -> None:
        """Until rank 0 has trained so many more."""
        self.wait_step(max(self.steps("step"), default=-1) + steps, timeout_s)

    # --- its end

    @property
    def runs(self) -> bool:
        """Whether a launcher of it does."""
        return any(process.poll() is None for process in self._processes)

    def finish(self, timeout_s: float = 90) -> None:
        """Has it stop after the step it is at, drain and close. Fails when a rank did not end well."""
        self.machines[0].user_does(f"touch {self._stop_file}")
        for process in self._processes:
            process.wait(timeout_s)
        assert [process.returncode for process in self._processes] == [0] * len(self._processes), self.output()[-6000:]
        assert len(self.lines("finished")) == len(self.machines)

    def kill(self) -> None:
        """SIGKILL to every rank that still is somewhere, and to the launchers."""
        for machine in self.machines:
            machine.root_does(f"pkill -KILL -u {USER} -f '{_SCRIPT}|hydra'", check=False)
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait(10)


@contextlib.contextmanager
def running(machines: Machines, name: str, *flags: str, launcher: str = "torchrun", logs: str) -> Iterator[Job]:
    """A job on all machines; killed at the end if it still runs. What it said is printed when the test fails."""
    job = Job(machines.all, name, *flags, launcher=launcher, logs=logs)
    try:
        yield job
    except BaseException:
        print(job.output()[-6000:])
        raise
    finally:
        job.kill()


def _torchrun(machines: Sequence[Machine], program: Sequence[str]) -> list[tuple[Machine, str]]:
    """On each machine its own launcher: rank 0's has the rendezvous."""
    words = f"torchrun --nnodes {len(machines)} --nproc-per-node 1 --master-addr n1 --master-port 29500 --node-rank"
    return [(machine, f"{words} {rank} {' '.join(program)}") for rank, machine in enumerate(machines)]


def _mpiexec(machines: Sequence[Machine], program: Sequence[str]) -> list[tuple[Machine, str]]:
    """One launcher, which logs in on the others."""
    hosts = ",".join(machine.name for machine in machines)
    command = f"mpiexec -launcher ssh -hosts {hosts} -ppn 1 python {' '.join(program)} --mpi"
    return [(machines[0], command)]
