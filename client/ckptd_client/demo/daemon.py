"""What the orchestrator knows of the daemon: only what ``ckptd status`` tells anybody."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Generator

import msgspec

from ckptd.protocol.status import JobStatus, Status
from ckptd_client.demo.errors import DemoError
from ckptd_client.demo.workspace import Workspace

_WATCH_S = 30.0
_INTERVAL_S = 0.1  # the least that `ckptd status --watch` takes

_decoder = msgspec.json.Decoder(Status)


def ckptd(space: Workspace, *args: str, columns: int, color: bool) -> tuple[int, str]:
    """Exit code of ``ckptd ARGS`` and what it prints: its answer, or else its error."""
    extra = {"COLUMNS": str(columns), **({"FORCE_COLOR": "1"} if color else {})}
    done = subprocess.run(
        _command(*args),
        env=space.environment(extra),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, (done.stdout or done.stderr).rstrip()


def kill_in_drain(space: Workspace) -> tuple[int, JobStatus]:
    """Watches ``ckptd status --json`` until a drain is under way, its end not near, and SIGKILLs the daemon.

    Returns the pid that was killed and the job as it was then. Raises DemoError when no drain is seen.
    """
    with contextlib.closing(_watch(space)) as watched:
        for status in watched:
            for job in status.jobs:
                if job.drain is not None and 0 < job.drain.nbytes_done < job.drain.nbytes / 2:
                    os.kill(status.pid, signal.SIGKILL)
                    return status.pid, job
    raise DemoError(f"ckptd status --watch showed no drain under way, or ended before {_WATCH_S:.0f} s were over")


def _watch(space: Workspace) -> Generator[Status]:
    """One status after another, for _WATCH_S at most."""
    command = _command("status", "--arena", space.arena, "--json", "--watch", "--interval", str(_INTERVAL_S))
    with subprocess.Popen(
        command, env=space.environment({}), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, process_group=0
    ) as process:
        timer = threading.Timer(_WATCH_S, process.kill)
        timer.start()
        try:
            yield from map(_decoder.decode, process.stdout or ())
        finally:
            timer.cancel()
            process.kill()


def _command(*args: str) -> list[str]:
    return [sys.executable, "-m", "ckptd", *args]
