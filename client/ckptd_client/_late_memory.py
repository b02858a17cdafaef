"""Memory of this process that may be written under a proof: whole huge pages, registered with the page guard.

Small pages are put together into huge ones once, by a thread of its own; until that is done they are no part of this.
One for the whole process, as there is one page table. A forked child begins anew.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterable, Sequence

from ckptd_client._page_guard import HUGE_NBYTES, NoProofError, PageGuard, Range, whole_units

log = logging.getLogger("ckptd_client")
_TRIES = 3  # a unit; then its memory is of a kind that cannot be huge, or there is none
_RUN_NBYTES = 64 << 20  # put together in one call, 0.2 s
_MAX_RANGES = 8192  # each may cost two mappings, of vm.max_map_count's 65530


class LateMemory:
    """guard: see PageGuard. Its methods may be called by any thread."""

    def __init__(self, guard: PageGuard) -> None:
        self._guard = guard
        self._lock = threading.Lock()
        self._ready: set[int] = set()  # units, by address, that are registered
        self._ranges = 0  # of units side by side: about as many mappings
        self._tries: dict[int, int] = {}
        self._leased: set[int] = set()  # units that a save copies under their protection
        self._queue: set[int] = set()  # units that are to be put together
        self._thread: threading.Thread | None = None
        self._error = "the kernel made none of these"  # what the last of them ended with

    def arm(self, units: Sequence[Range]) -> list[Range]:
        """Protects what it can of these units: writes to that show from now on. The caller releases it.

        units: of whole_units. What is left out is put together in the background, for a later time.
        """
        with self._lock:
            armed = [one for found in self._registered(units) for one in self._arm(found)]
            got = {start for one in armed for start in _starts(one)}
            self._leased |= got
            self._queue_up(start for one in units for start in _starts(one) if start not in got | self._leased)
        return armed

    def _registered(self, units: Sequence[Range]) -> list[Range]:
        """The parts that are, and that no other save copies just now."""
        free = self._ready - self._leased  # what another save copies under its protection is copied early here
        return whole_units(
            Range(start, start + HUGE_NBYTES) for one in units for start in _starts(one) if start in free
        )

    def _has_room(self, start: int) -> bool:
        """Whether one more range may be registered; next to one that is it costs no mapping."""
        return self._beside(start) > 0 or self._ranges < _MAX_RANGES

    def _beside(self, start: int) -> int:
        return len({start - HUGE_NBYTES, start + HUGE_NBYTES} & self._ready)

    def _arm(self, found: Range) -> list[Range]:
        if self._guard.is_huge(found):
            try:
                self._guard.protect(found)
            except OSError:  # somebody has mapped something else in its place
                self._unprotect([found])
            else:
                return [found]
        if found.stop - found.start == HUGE_NBYTES:
            self._drop(found)
            return []
        return [one for start in _starts(found) for one in self._arm(Range(start, start + HUGE_NBYTES))]

    def _drop(self, unit: Range) -> None:
        self._ready.discard(unit.start)
        self._ranges += self._beside(unit.start) - 1
        with contextlib.suppress(OSError):
            self._guard.unregister(unit)

    def why_not(self, units: Sequence[Range]) -> str:
        """Why none of these can be armed, nor will be; empty when some can, or it is not known yet."""
        with self._lock:
            starts = [start for one in units for start in _starts(one)]
            tried = all(self._tries.get(start, 0) >= _TRIES for start in starts)
            return f"no huge pages: {self._error}" if tried and self._ready.isdisjoint(starts) else ""

    def unwritten(self, armed: Range) -> bool:
        """Whether nobody has written to any page of it since it was armed, and all are still there."""
        return self._guard.unwritten(armed)

    def release(self, armed: Iterable[Range]) -> None:
        """Writes cost nothing again. Each is released once, by who armed it. Never raises."""
        armed = list(armed)
        self._unprotect(armed)
        with self._lock:
            self._leased -= {start for one in armed for start in _starts(one)}

    def _unprotect(self, armed: Iterable[Range]) -> None:
        for one in armed:
            try:
                self._guard.unprotect(one)
            except OSError:  # a part of it is mapped no more: the rest by itself
                for start in _starts(one):
                    with contextlib.suppress(OSError):
                        self._guard.unprotect(Range(start, start + HUGE_NBYTES))

    def forget(self, units: Iterable[Range], but: Iterable[Range] = ()) -> None:
        """They are nobody's any more, but for these and for what a save copies just now."""
        kept = {start for one in but for start in _starts(one)}
        with self._lock:
            for start in {start for one in units for start in _starts(one)} - kept - self._leased:
                self._queue.discard(start)
                self._tries.pop(start, None)
                if start in self._ready:
                    self._drop(Range(start, start + HUGE_NBYTES))

    @property
    def busy(self) -> bool:
        """Whether memory is being put together."""
        with self._lock:
            return bool(self._queue)

    # --- the thread

    def _queue_up(self, starts: Iterable[int]) -> None:
        """Has them put together. Without a thread for it they stay as they are."""
        self._queue |= {start for start in starts if self._tries.get(start, 0) < _TRIES}
        if self._queue and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(target=self._put_together, name="ckptd-huge-pages", daemon=True)
            try:
                self._thread.start()
            except RuntimeError as error:
                self._queue, self._error = set(), str(error)

    def _put_together(self) -> None:
        while (run := self._next_run()) is not None:
            began = time.monotonic()
            try:
                self._guard.collapse(run)
            except OSError as error:
                self._error = error.strerror or str(error)
            self._take_in(run)
            time.sleep(time.monotonic() - began)  # training comes first: half of one core is enough

    def _next_run(self) -> Range | None:
        with self._lock:
            if not self._queue:
                self._thread = None
                return None
            start = stop = min(self._queue)
            while stop in self._queue and stop - start < _RUN_NBYTES:
                stop += HUGE_NBYTES
            return Range(start, stop)

    def _take_in(self, run: Range) -> None:
        """Registers those that are huge now; adjacent ones cost no mapping more."""
        with self._lock:
            for start in _starts(run):
                unit = Range(start, start + HUGE_NBYTES)
                self._tries[start] = self._tries.get(start, 0) + 1
                if start in self._queue and self._guard.is_huge(unit) and self._has_room(start):
                    with contextlib.suppress(OSError):  # another userfaultfd has it
                        self._guard.register(unit)
                        self._ranges += 1 - self._beside(start)
                        self._ready.add(start)
                        self._tries.pop(start)
            self._queue -= set(_starts(run))


def _starts(one: Range) -> range:
    return range(one.start, one.stop, HUGE_NBYTES)


# --- of the process

_made: LateMemory | NoProofError | None = None
_making = threading.Lock()


def late_memory() -> LateMemory:
    """This process's. Raises NoProofError, which says why there is none."""
    global _made  # noqa: PLW0603 - one page table, one guard
    with _making:
        if _made is None:
            try:
                _made = LateMemory(PageGuard())
            except NoProofError as error:
                _made = error
    if isinstance(_made, NoProofError):
        raise _made
    return _made


def _in_child() -> None:
    """The guard that was inherited is of the parent's memory."""
    global _made, _making
    if isinstance(_made, LateMemory):
        _made._guard.close()  # noqa: SLF001 - it is this module's
    _made, _making = None, threading.Lock()


os.register_at_fork(after_in_child=_in_child)
