"""The files, nodes, arenas and processes of one demo, and their removal at its end."""

import glob
import os
import shutil
import signal
import tempfile
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Self

_MARK = "DEMO_WORKSPACE"  # not CKPTD_*: the daemon refuses variables of that prefix that it does not know
_ARENAS = "/dev/shm/ckptd-demo-"  # noqa: S108
_LEAVE_S = 20.0
_KILL_S = 10.0
_POLL_S = 0.02
ADDRESS = "127.0.0.1"  # other machines cannot reach the demo


class Workspace:
    """A directory for store, journals and logs, and paths of arenas. The end of the ``with`` removes everything.

    Every process of the demo has the directory's name in its environment, which also finds those that the demo did not
    start itself: the daemons and their workers.
    """

    def __init__(self) -> None:
        self.root = tempfile.mkdtemp(prefix="ckptd-demo-")
        self.store = self.path("store")
        os.mkdir(self.store)

    def path(self, name: str) -> str:
        """A path in the directory."""
        return os.path.join(self.root, name)

    @staticmethod
    def arena(name: str) -> str:
        """Path of a node's arena. The daemon creates it, for its owner only."""
        return f"{_ARENAS}{os.getpid()}-{name}"

    def environment(self, extra: dict[str, str]) -> dict[str, str]:
        """The environment of a process of the demo: ours, without the user's settings of ckptd."""
        ours = {key: value for key, value in os.environ.items() if not key.startswith("CKPTD_")}
        own = {"CKPTD_CONFIG": os.devnull, "OMP_NUM_THREADS": "1", "TMPDIR": self.root, _MARK: self.root}
        return {**ours, **own, **extra}

    def wait_until_empty(self) -> bool:
        """Whether all processes of the demo end by themselves within _LEAVE_S."""
        deadline = time.monotonic() + _LEAVE_S
        while self._processes():
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # a second Ctrl-C must not stop the removal
        self._end_processes()
        for arena in glob.glob(self.arena("*")):
            shutil.rmtree(arena, ignore_errors=True)
        shutil.rmtree(self.root, ignore_errors=True)

    def _end_processes(self) -> None:
        deadline = time.monotonic() + _KILL_S
        while (pids := self._processes()) and time.monotonic() < deadline:
            for pid in pids:
                self._kill(pid)
            time.sleep(_POLL_S)

    def _kill(self, pid: int) -> None:
        try:
            process = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        try:
            if self._is_ours(pid):  # checked again: now the pid cannot pass to another process
                signal.pidfd_send_signal(process, signal.SIGKILL)
        except ProcessLookupError:
            pass
        finally:
            os.close(process)

    def _processes(self) -> list[int]:
        return [int(name) for name in os.listdir("/proc") if name.isdigit() and self._is_ours(int(name))]

    def _is_ours(self, pid: int) -> bool:
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                return f"{_MARK}={self.root}".encode() in file.read().split(b"\0")
        except OSError:  # it has ended, or belongs to another user
            return False


@dataclass(frozen=True, slots=True)
class Node:
    """A node: a name and an arena, which distinguish two daemons on one machine."""

    name: str
    arena: str

    def settings(self) -> dict[str, str]:
        """Environment of the node's ranks, and of the daemon that the first of them starts."""
        return {"CKPTD_NODE": self.name, "CKPTD_PEER_ADDRESS": ADDRESS}

    def lose_memory(self) -> None:
        """Removes the arena, as a loss of power does. The node's processes must have ended. Raises OSError."""
        shutil.rmtree(self.arena)


def nodes(space: Workspace, names: str) -> list[Node]:
    """One node for each letter."""
    return [Node(name=f"node-{name}", arena=space.arena(name)) for name in names]
