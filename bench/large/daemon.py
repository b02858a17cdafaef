"""A real daemon that is measured: its CPU time, memory, descriptors and long turns."""

import contextlib
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import zmq

from ckptd.arena.ask import Daemon, ask_status
from ckptd.shared.base.errors import CkptdError
from ckptd.shared.format import arena_paths
from ckptd.shared.protocol import messages as m
from ckptd.shared.protocol.status import Status
from ckptd.shared.protocol.topology import Peer

_READY_S = 20.0
_LOG_CHARS = 2000
_HERTZ = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Sample:
    """What a process has used so far. cpu_s: of its threads, without children. rss_mib: without shared memory."""

    cpu_s: float
    rss_mib: float
    descriptors: int


class RealDaemon:
    """A ``ckptd run`` on an arena of its own."""

    def __init__(self, arena: Path, node: str, *settings: str) -> None:
        self.arena = str(arena)
        self.node = node
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Blocks until it answers. Raises RuntimeError when it does not."""
        self.spawn()
        self.await_ready(_READY_S)

    def spawn(self) -> None:
        """Starts its process, in a session of its own: what a terminal sends does not reach it."""
        command = [sys.executable, "-m", "ckptd", "run", "--arena", self.arena, "--node", self.node, *self._settings]
        environ = {name: value for name, value in os.environ.items() if not name.startswith("CKPTD_")}
        environ.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed daemon finds its modules compiled
        environ["PYTHONPYCACHEPREFIX"] = os.path.join(os.path.dirname(self.arena), "compiled")
        with open(f"{self.arena}.log", "ab") as log:
            self._process = subprocess.Popen(command, env=environ, stdout=log, stderr=log, start_new_session=True)

    def await_ready(self, timeout_s: float) -> None:
        """Blocks until it answers. Raises RuntimeError, with the end of its log, when it does not."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and self._process is not None and self._process.poll() is None:
            with contextlib.suppress(CkptdError):
                ask_status(self.arena, 1.0)
                return
            time.sleep(0.02)
        said = Path(f"{self.arena}.log").read_text(encoding="utf-8", errors="replace")[-_LOG_CHARS:]
        raise RuntimeError(f"no daemon in {self.arena} within {timeout_s:g} s: {said}")

    @property
    def runs(self) -> bool:
        """Whether its process was started, and not killed."""
        return self._process is not None

    def kill(self) -> None:
        """As a node's out-of-memory killer does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._process = None

    def sample(self) -> Sample:
        """From /proc."""
        assert self._process is not None  # noqa: S101 - it runs
        proc = Path("/proc") / str(self._process.pid)
        fields = (proc / "stat").read_text().rpartition(")")[2].split()
        memory = dict(line.split()[:2] for line in (proc / "status").read_text().splitlines() if line.startswith("Rss"))
        rss_mib = (int(memory["RssAnon:"]) + int(memory["RssFile:"])) / 1024
        return Sample((int(fields[11]) + int(fields[12])) / _HERTZ, rss_mib, len(os.listdir(proc / "fd")))

    def status(self, *, nodes: bool = False) -> Status:
        """Its own picture. Raises CkptdError."""
        with Daemon(self.arena, 30.0) as daemon:
            return daemon.status(nodes=nodes)

    def peer(self) -> Peer:
        """As other daemons reach it."""
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.linger = 0
            socket.connect(f"ipc://{self.arena}/{arena_paths.SOCKET}")
            socket.send(m.encode(m.AskNode(seq=1)))
            reply = m.decode_reply(socket.recv())
        assert isinstance(reply, m.NodeInfo)  # noqa: S101 - what else
        return reply.peer
