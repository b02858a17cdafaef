"""CPU nice value and I/O priority of a process."""

import contextlib
import ctypes
import os
import platform
from typing import NamedTuple

_IOPRIO_SET = {"x86_64": 251, "aarch64": 30, "ppc64le": 273, "s390x": 282}  # C libraries have no function for it
_WHO_PROCESS = 1
_BEST_EFFORT = 2 << 13  # the class that every process is in, and root is needed for none of its eight levels


class Niceness(NamedTuple):
    """``cpu``: 0 to 19, added to what this process has. ``io``: 0 (first) to 7 (last)."""

    cpu: int = 0
    io: int = 4

    def take(self) -> None:
        """For this thread and all that it starts from now on. What a kernel does not know of is left out."""
        os.nice(self.cpu)
        number = _IOPRIO_SET.get(platform.machine())
        if number is not None:
            with contextlib.suppress(OSError, AttributeError):  # its error changes nothing
                ctypes.CDLL(None).syscall(number, _WHO_PROCESS, 0, _BEST_EFFORT | self.io)
