"""Hosts that are all this machine: for each an arena of its own, and the commands `ckptd` and `train` that find it."""

import contextlib
import os
import pathlib
import shutil
import signal
import sys
import tempfile
from types import TracebackType
from typing import Self

from ckptd.shared.files.locks import holder
from tests import pythons
from tests.cluster import CODE, wait_for

TRAINER = str(pathlib.Path(__file__).with_name("trainer.py"))
_COMMAND = """\
#!/bin/sh
export CKPTD_ARENA="{shm}/{name}" CKPTD_NODE="{name}"
export CKPTD_STORE={store} CKPTD_PEER_ADDRESS=127.0.0.1 CKPTD_CONFIG=/dev/null
export PYTHONPATH={code} PYTHONWARNINGS=ignore GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1
exec {python} -P {program} "$@"
"""


class Homes:
    """A short directory, `where`, and one on tmpfs for arenas, `shm`. A context manager that leaves no daemon.

    name: what the shell of a host makes of it is the host's name, such as "n$PMI_RANK".
    """

    def __init__(self, name: str) -> None:
        self.where = pathlib.Path(tempfile.mkdtemp(prefix="ckptd-deploy-"))
        self.shm = pathlib.Path(tempfile.mkdtemp(prefix="ckptd-deploy-", dir="/dev/shm"))
        self.store = self.where / "store"
        self.bin = self.where / "bin"
        self.bin.mkdir()
        values = {"shm": self.shm, "store": self.store, "code": CODE, "python": pythons.shim()}
        for command, program in {"ckptd": "-m ckptd", "train": TRAINER}.items():
            path = self.bin / command
            path.write_text(_COMMAND.format(name=name, program=program, **values))
            path.chmod(0o755)

    def environ(self, **more: str) -> dict[str, str]:
        """The commands come first in PATH, no settings of the caller get in."""
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("CKPTD_", "SLURM_", "SBATCH_", "PMI"))}
        path = os.pathsep.join((str(self.bin), os.path.dirname(sys.executable), os.environ["PATH"]))
        return clean | {"PATH": path, "HOME": str(self.where), "TMPDIR": str(self.where)} | more

    def arenas(self) -> dict[str, int | None]:
        """By host: the pid of its daemon, None if that has ended."""
        return {arena.name: holder(str(arena / "lock")) for arena in sorted(self.shm.iterdir())}

    def slots(self, host: str = "") -> list[pathlib.Path]:
        """Slot files of a host, or of all."""
        return list((self.shm / host).rglob("*.slot"))

    def durable(self, job: str) -> str:
        """The name of the newest checkpoint on the store."""
        return os.readlink(self.store / job / "latest")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for arena in self.shm.iterdir():
            with contextlib.suppress(OSError):
                pid = holder(str(arena / "lock"))
                if pid:
                    os.kill(pid, signal.SIGKILL)
                    wait_for(lambda pid=pid: not _lives(pid))
        shutil.rmtree(self.shm)
        shutil.rmtree(self.where)


def _lives(pid: int) -> bool:
    """Whether it runs; one that ended and that nobody has waited for does not."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
