"""What a store is given to write: the bytes of a file in mapped memory, and how fast they may go."""

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

Report = Callable[[Mapping[str, int]], None]  # gets the bytes written so far of each file; keeps nothing of it
WRITERS = 3  # writes in flight; measured: 1 reaches 0.85 of the disk, 2 to 4 all of it


def _nothing() -> None:
    return None


def _no_report(_done: Mapping[str, int]) -> None:
    return None


def _no_window(_start: int, _stop: int) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


@dataclass(frozen=True)
class Image:
    """What to write.

    source: the mapped slot, page-aligned and readable to nbytes rounded up to 4096; stays the caller's.
    check_source: raises if source is no longer the save's; called when all is written and synced, before the file gets
    its name.
    window: entered while bytes start to stop of source are written, to map and unmap them: beside other writes, where
    it costs nothing. A direct write that takes page faults takes them under the file's lock, one after the other.
    """

    name: str
    nbytes: int
    source: memoryview
    check_source: Callable[[], None] = _nothing
    window: Callable[[int, int], contextlib.AbstractContextManager[None]] = _no_window


class Flow:
    """How fast to write, and whom to tell. Shared by the images of one drain, whatever thread writes them."""

    def __init__(self, *, bytes_per_s: int = 0, writers: int = WRITERS, report: Report = _no_report) -> None:
        self.writers = writers
        self._bytes_per_s = bytes_per_s  # 0: no cap
        self._report = report
        self._lock = threading.Lock()
        self._free_at_s = 0.0
        self._done: Counter[str] = Counter()

    def pace(self, nbytes: int) -> None:
        """Blocks until nbytes more may be written under the cap: before each write as long as it may take.

        Not after it: many drains of one write each would keep to no cap at all.
        """
        if not self._bytes_per_s:
            return
        with self._lock:
            due_s = max(self._free_at_s, time.monotonic()) + nbytes / self._bytes_per_s
            self._free_at_s = due_s
        time.sleep(max(0.0, due_s - time.monotonic()))

    def wrote(self, name: str, nbytes: int) -> int:
        """Counts nbytes of the file as written, and reports. Returns how many are."""
        with self._lock:
            self._done[name] += nbytes
            self._report(self._done)
            return self._done[name]
