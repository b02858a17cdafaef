"""The node under test: one daemon of our own with its arena and store, started and ended by the harness."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import ckptd_client
from bench.states import State

OUT = Path("bench/out")
_READY_TIMEOUT_S = 20.0
_STOP_TIMEOUT_S = 60.0


class Handle(Protocol):
    """The handle of a save."""

    milestone: str
    stall_s: float

    def wait(self, milestone: str, timeout_s: float | None = None) -> None:
        """Blocks until the milestone is reached."""


class Client(Protocol):
    """The part of ckptd_client.Client that is measured."""

    def prepare(self, state: State) -> None:
        """Plans and allocates ahead of the first save."""

    def save(self, state: State, step: int) -> Handle:
        """Stages a checkpoint."""

    def load(self, state: State) -> Any:
        """Restores the newest checkpoint."""

    def close(self) -> None:
        """Ends the connection."""


class Node:
    """A daemon, its arena directory and its store; close removes both directories."""

    def __init__(self, shm_dir: Path, store: Path) -> None:
        self.arena = shm_dir / "arena"
        self.store = store
        self._notify = shm_dir / "notify"
        self._log = store.parent / "daemon.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Process id of the running daemon."""
        if self._process is None:
            raise RuntimeError("no daemon runs")
        return self._process.pid

    def start(self) -> float:
        """Starts a daemon; seconds until its READY message."""
        command = [sys.executable, "-m", "ckptd", "run", "--arena", str(self.arena), "--keep-last", "1"]
        with _datagrams(self._notify) as ready, self._log.open("ab") as log:
            start = time.perf_counter()
            environment = os.environ | {"NOTIFY_SOCKET": str(self._notify)}
            self._process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
            while not self._is_ready(ready, start + _READY_TIMEOUT_S):
                pass
            return time.perf_counter() - start

    def _is_ready(self, messages: socket.socket, deadline: float) -> bool:
        """Whether the next message is READY; raises if the daemon ended or is late."""
        with contextlib.suppress(TimeoutError):
            return b"READY=1" in messages.recv(4096)
        if self._process is None or self._process.poll() is not None or time.perf_counter() > deadline:
            raise RuntimeError(f"the daemon did not start: {self._log.read_text()[-2000:]}")
        return False

    def stop(self) -> None:
        """Ends the daemon and removes its arena, as the loss of the node would."""
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
        shutil.rmtree(self.arena, ignore_errors=True)

    def close(self) -> None:
        """Ends the daemon and removes everything it wrote."""
        self.stop()
        shutil.rmtree(self.store, ignore_errors=True)

    @contextlib.contextmanager
    def client(self, job: str, **options: Any) -> Iterator[Client]:
        """A client of this node, closed at the end."""
        client = ckptd_client.connect(job=job, store=str(self.store), arena=str(self.arena), **options)
        try:
            yield client
        finally:
            client.close()


@contextlib.contextmanager
def scratch(store: Path) -> Iterator[tuple[Path, Path]]:
    """Two directories of this process, on tmpfs and on the disk, removed at the end."""
    name = f"ckptd-bench-{os.getpid()}"
    directories = (Path("/dev/shm") / name, store.resolve() / name)  # noqa: S108  (made exclusively, owner only)
    try:
        for directory in directories:
            directory.mkdir(mode=0o700, parents=True)
        yield directories
    finally:
        for directory in directories:
            shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def _datagrams(path: Path) -> Iterator[socket.socket]:
    """The receiving end of systemd's notification protocol."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(path))
        receiver.settimeout(0.2)
        try:
            yield receiver
        finally:
            path.unlink()
