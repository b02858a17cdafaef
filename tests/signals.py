"""Signals to processes that tests started, and what has to be waited for after SIGSTOP."""

import os
import signal
from pathlib import Path

from tests.cluster import wait_for


def send(pid: int, number: int) -> bool:
    """Whether the process was there to get it."""
    assert pid > 0, "a signal to 0 is one to the whole group"
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def stop(pid: int) -> None:
    """Returns when no thread of the process runs any more; ``resume`` lets it go on.

    The signal is there before the threads have seen it: on a busy machine one of them may still answer somebody.
    """
    send(pid, signal.SIGSTOP)
    wait_for(lambda: all(map(_stands, Path("/proc").glob(f"{pid}/task/*"))))


def resume(pid: int) -> None:
    """After ``stop``; a process that is gone needs nothing."""
    send(pid, signal.SIGCONT)


def _stands(thread: Path) -> bool:
    """Stopped, or at its end."""
    try:
        return thread.joinpath("stat").read_text().rpartition(")")[2].split()[0] in "TZX"
    except (FileNotFoundError, ProcessLookupError):
        return True
