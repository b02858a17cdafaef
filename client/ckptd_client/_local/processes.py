"""What /proc says of a process of this node: its parent, its name, whether it is stopped."""

import contextlib
import os
from typing import NamedTuple

_STATES = {"R": "running", "S": "sleeping", "D": "in uninterruptible sleep", "T": "stopped", "t": "traced", "Z": "dead"}

_BEGAN = 19  # of the fields after the name


class Process(NamedTuple):
    """As it was when it was asked for."""

    pid: int
    name: str
    state: str  # one letter, as ps shows it
    parent: int
    began_s: float  # after the start of the machine

    @property
    def condition(self) -> str:
        """The state in a word, and the letter."""
        return f"state {self.state}: {_STATES.get(self.state, 'unknown')}"

    @property
    def is_stopped(self) -> bool:
        """Whether a signal or a debugger has stopped it, so that it answers nobody."""
        return self.state in ("T", "t")


def look_at(pid: int | None) -> Process | None:
    """None when there is no such process, or it is outside of this pid namespace."""
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
    """This process's parent."""
    return look_at(os.getppid())
