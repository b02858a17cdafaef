"""A process of this node: facts about it from /proc, and calls at the end of this one."""

import atexit
import contextlib
import os
import weakref
from collections.abc import Callable
from multiprocessing import util
from typing import NamedTuple

_STATES = {"R": "running", "S": "sleeping", "D": "in uninterruptible sleep", "T": "stopped", "t": "traced", "Z": "dead"}

_BEGAN = 19  # of the fields after the name


class Process(NamedTuple):
    """A process at the time of the call."""

    pid: int
    name: str
    state: str  # one letter, as ps shows it
    parent: int
    began_s: float  # after the start of the machine

    @property
    def condition(self) -> str:
        """The letter of the state, and its name."""
        return f"state {self.state}: {_STATES.get(self.state, 'unknown')}"

    @property
    def is_stopped(self) -> bool:
        """Whether a signal or a debugger has stopped it, so that it does not answer."""
        return self.state in ("T", "t")


def process_of(pid: int | None) -> Process | None:
    """The process; None if there is none, or it is outside this pid namespace."""
    if not pid:
        return None
    with contextlib.suppress(OSError, ValueError, IndexError):
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            before, _, after = file.read().rpartition(")")
        fields = after.split()
        began_s = int(fields[_BEGAN]) / os.sysconf("SC_CLK_TCK")
        return Process(pid, before.partition("(")[2], fields[0], int(fields[1]), began_s)
    return None


def parent_process() -> Process | None:
    """The parent of this process."""
    return process_of(os.getppid())


def call_at_exit(method: Callable[[], object]) -> None:
    """Calls the bound method when this process ends, if its object still lives then."""
    known = weakref.WeakMethod(method)

    def call() -> None:
        found = known()
        if found is not None:
            found()

    atexit.register(call)
    # A process of multiprocessing, such as mp.spawn's, ends without atexit; others do this after zmq's end.
    util.Finalize(None, call, exitpriority=0)
