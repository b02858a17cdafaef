"""Runs a call in a process of its own, with little memory and little time, and says what came of it."""

import ctypes
import json
import os
import resource
import select
import signal
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from ckptd.shared.base.errors import CkptdError

_LIMIT_NBYTES = 3 << 30  # of address space, beyond what is mapped
_trim = ctypes.CDLL(None).malloc_trim


class Came(NamedTuple):
    """kind: "" when it returned, "ours" for an error of ckptd's, else the error's class, "killed" or "hung"."""

    kind: str
    text: str
    seconds: float  # of processor time, all threads
    grown: int  # bytes of memory at the most, beyond what there was before
    length: int = 0  # of the whole text, of which the first few thousand characters are kept


class Hung(BaseException):
    """Nothing of ours may catch it."""


def measured(call: Callable[[], object], timeout_s: float, ours: tuple[type[BaseException], ...] = ()) -> Came:
    """In this process. Memory is what lay in RAM at the most; what is mapped and not touched is none."""

    def hung(_number: int, _frame: object) -> None:
        raise Hung

    signal.signal(signal.SIGALRM, hung)
    _trim(0)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before, began = _peak_nbytes(), time.process_time()
    kind = text = ""
    try:
        signal.setitimer(signal.ITIMER_REAL, timeout_s)
        found = call()
        signal.setitimer(signal.ITIMER_REAL, 0)
        text = found if isinstance(found, str) else ""
    except Hung:
        kind = "hung"
    except (CkptdError, *ours) as error:
        kind, text = "ours", str(error)
    except BaseException as error:
        kind, text = type(error).__name__, str(error)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return Came(kind, text[:4000], time.process_time() - began, _peak_nbytes() - before, len(text))


def _peak_nbytes() -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))


def limit(nbytes: int = _LIMIT_NBYTES) -> None:
    """From here on this process maps no more than so many bytes more."""
    with open("/proc/self/statm") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + nbytes,) * 2)


def apart(call: Callable[[], object], *, timeout_s: float = 6.0, nbytes: int = _LIMIT_NBYTES) -> Came:
    """In a child. A child that is killed by its own harm costs nobody else anything."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if not pid:
        status = 1
        try:
            os.close(ours)
            limit(nbytes)
            os.write(theirs, json.dumps(measured(call, timeout_s)).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(theirs)
    timer = threading.Timer(timeout_s + 2, os.kill, (pid, signal.SIGKILL))
    timer.start()
    said = b""
    while select.select([ours], [], []) and (part := os.read(ours, 1 << 16)):
        said += part
    timer.cancel()
    os.close(ours)
    _, status = os.waitpid(pid, 0)
    return Came(*json.loads(said)) if said else Came("killed", f"status {status}", timeout_s, nbytes)
