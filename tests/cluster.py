"""Real daemons and real ranks for tests: an arena under /dev/shm and a store of their own, nothing left behind."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from ckptd.arena.ask import ask_status
from ckptd.shared.protocol.status import JobStatus, Status
from tests import pythons
from tests.pythons import CODE, ENVIRON, ROOT

__all__ = ["CODE", "ROOT", "Node", "wait_for"]


def wait_for(what: Callable[[], object], timeout_s: float = 60.0, *, every_s: float = 0.01) -> object:
    """The first true value of what(), or an AssertionError after timeout_s."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = what()
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(every_s)


class Node:
    """One arena and the daemons that serve it, one after the other. A context manager that leaves nothing."""

    def __init__(self, store: str, *, arena: str | None = None) -> None:
        self.store = store
        self.arena = arena or tempfile.mkdtemp(prefix="ckptd-test-", dir="/dev/shm")
        # Of launchers and DataLoaders that are killed here; short, since they bind sockets in it.
        self.temporary = tempfile.mkdtemp(prefix="ckptd-test-")
        self.log = os.path.join(store, f"daemon-{os.path.basename(self.arena)}.log")
        self.daemon: subprocess.Popen[bytes] | None = None
        self.children: list[subprocess.Popen[bytes]] = []

    def environ(self, **extra: str) -> dict[str, str]:
        """Of every process of this node: no setting of the caller's own gets in."""
        clean = pythons.inherited("CKPTD_", "NOTIFY_", "WATCHDOG_")
        return (
            clean
            | ENVIRON
            | {"CKPTD_ARENA": self.arena, "CKPTD_STORE": self.store, "CKPTD_CONFIG": "/dev/null"}
            | {"CKPTD_PEER_ADDRESS": "127.0.0.1"}
            | {"TMPDIR": self.temporary}
            | extra
        )

    def start(
        self, *flags: str, ready: bool = True, program: Sequence[str] = ("-m", "ckptd"), **environ: str
    ) -> subprocess.Popen[bytes]:
        """Starts `ckptd run` with these flags and extra variables; returns once it answers."""
        with open(self.log, "ab") as log:
            self.daemon = pythons.Popen(
                [sys.executable, "-P", *program, "run", "--arena", self.arena, *flags],
                env=self.environ(**environ) | {"CKPTD_STORE": ""},
                stdout=log,
                stderr=log,
            )
        if ready:
            wait_for(lambda: self.try_status() is not None or self.daemon.poll() is not None)
            assert self.daemon.poll() is None, self.log_text()
        return self.daemon

    def run(self, code: str, *args: str, **environ: str) -> subprocess.Popen[bytes]:
        """Starts a Python process (a rank) that runs code, with args in sys.argv[1:]; input and output are pipes."""
        process = pythons.Popen(
            [sys.executable, "-c", code, *args],
            env=self.environ(**environ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.children.append(process)
        return process

    def complete(self, *command: str, timeout_s: float, **environ: str) -> str:
        """What a command prints that runs beside the daemon to its good end."""
        done = pythons.run(
            command,
            env=self.environ(**environ),
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def status(self) -> Status:
        """The daemon's answer; raises when there is none."""
        return ask_status(self.arena, 5.0)

    def try_status(self) -> Status | None:
        """The daemon's answer, None when there is none."""
        try:
            return ask_status(self.arena, 1.0)
        except Exception:
            return None

    def job(self, name: str) -> JobStatus | None:
        """A job's part of the status."""
        status = self.try_status()
        return next((job for job in status.jobs if job.job == name), None) if status else None

    def kill(self) -> None:
        """SIGKILL to the daemon, and waits until it is gone."""
        assert self.daemon is not None
        self.daemon.kill()
        self.daemon.wait(60)

    def stop(self, timeout_s: float = 60.0) -> int:
        """SIGTERM to the daemon; its exit status."""
        assert self.daemon is not None
        self.daemon.send_signal(signal.SIGTERM)
        return self.daemon.wait(timeout_s)

    def log_text(self) -> str:
        """What the daemons of this node logged."""
        with open(self.log, encoding="utf-8", errors="replace") as file:
            return file.read()

    def slots(self) -> list[str]:
        """Paths of all slot files in the arena."""
        return sorted(
            os.path.join(directory, name)
            for directory, _, names in os.walk(self.arena)
            for name in names
            if name.endswith(".slot")
        )

    def lose_arena(self) -> None:
        """What losing the node's memory means."""
        shutil.rmtree(self.arena)
        os.mkdir(self.arena, 0o700)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for child in self.children:
            if child.poll() is None:
                child.kill()
            child.communicate()
        self._end_daemons()
        shutil.rmtree(self.arena, ignore_errors=True)
        shutil.rmtree(self.temporary, ignore_errors=True)

    def _end_daemons(self) -> None:
        """Ends our daemon, and one that a client started on this arena (its pid stands in the status)."""
        if self.daemon is not None and self.daemon.poll() is None:
            self.daemon.kill()
            self.daemon.wait(60)
        status = self.try_status()
        if status is not None:
            os.kill(status.pid, signal.SIGKILL)
            wait_for(lambda: not os.path.exists(f"/proc/{status.pid}"))
