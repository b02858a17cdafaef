"""Memory of this process that a save may copy late under a proof: huge pages, registered with the page guard.

A thread collapses small pages into huge ones once; until then they are not part of this memory. There is one instance
per process, as there is one page table. A forked child starts with a new instance.

A unit is one huge page, 2 MiB. A shared unit also contains other memory than tensors, such as malloc's data between
them. A write to that data looks like a write to the tensors, so a shared unit is watched first: it becomes late after
several saves without a write to it, and never again after a write.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterable, Sequence

from ckptd_client._local.page_guard import HUGE_NBYTES, NoProofError, PageGuard, Range, common, whole_units, without

log = logging.getLogger("ckptd_client")
_TRIES = 3  # for a unit; then its memory cannot become huge, or no huge page is free
_WATCHED = 3  # saves in which a shared unit is watched
_RUN_NBYTES = 64 << 20  # collapsed in one call, 0.2 s
_MAX_RANGES = 8192  # each may cost two mappings, of vm.max_map_count's 65530


class Lease:
    """Memory of one save: exclusive until the lease ends, and write-protected once protect is called.

    Ends by release, or when it is garbage-collected: by any thread, in any state. A copy in a forked child refers to
    its parent's memory and does nothing.
    """

    def __init__(self, memory: "LateMemory") -> None:
        self._memory, self._pid, self._ended = memory, os.getpid(), False
        self.ranges: list[Range] = []  # in order of addresses; LateMemory fills it

    def protect(self, found: Sequence[Range]) -> bool:
        """Detects writes to this part from now on. False: some of it was mapped in another way and left the lease."""
        lost = [unit for one in common(self.ranges, found) for unit in self._not_protected(one)]
        if lost:
            self._memory.lose(lost)
            self.ranges[:] = without(self.ranges, lost)
        return not lost

    def _not_protected(self, one: Range) -> list[Range]:
        try:
            self._memory.guard.protect(one)
        except OSError:  # another mapping has replaced it
            if one.stop - one.start == HUGE_NBYTES:
                return [one]
            return [unit for part in _each(one) for unit in self._not_protected(part)]
        return []

    def unwritten(self, found: Range) -> bool:
        """Whether no page of this part was written since, and all still exist."""
        return self._memory.guard.unwritten(found)

    def release(self) -> None:
        """Ends the protection and the lease. Idempotent; never raises."""
        if not self._ended and self._pid == os.getpid():
            self._ended = True
            self._memory.take_back(self)

    def __del__(self) -> None:
        self.release()


class LateMemory:
    """The huge pages of this process. guard: see PageGuard. Any thread may call its methods."""

    def __init__(self, guard: PageGuard) -> None:
        self.guard = guard
        self._lock = threading.RLock()  # garbage collection may end a lease within any line below
        self._ready: set[int] = set()  # addresses of registered units
        self._spoiled: set[int] = set()  # shared units that were written
        self._quiet: dict[int, int] = {}  # shared units: number of saves without a write to them
        self._version = 0  # of these three
        self._runs: tuple[Sequence[Range], int, list[Range]] = ((), -1, [])  # units asked for, version, what is usable
        self._ranges = 0  # of adjacent units: about as many mappings
        self._tries: dict[int, int] = {}
        self._leases: dict[int, list[Range]] = {}  # ranges of current leases, by id
        self._queue: set[int] = set()  # units to be collapsed
        self._trusted: tuple[Sequence[Range], int, list[Range]] = ((), -1, [])  # the same of shared units
        self.alone = False  # whether shared units are excluded for good
        self._thread: threading.Thread | None = None
        self._error = "the kernel made none of these"  # of the last collapse

    def lease(self, units: Sequence[Range]) -> Lease:
        """A lease of those units that can be protected now. The caller protects them after its own last write.

        units: from whole_units, the same object while they are equal. The other units are collapsed in the background,
        for a later lease.
        """
        lease = Lease(self)
        with self._lock:
            for run in self._usable(units):
                lease.ranges += self._huge(run)
            if _nbytes(lease.ranges) < _nbytes(units):
                got = {start for one in lease.ranges for start in _starts(one)} | self._leased() | self._spoiled
                wanted = {start for one in units for start in _starts(one)} - got
                self._queue |= {start for start in wanted if self._tries.get(start, 0) < _TRIES}
            self._leases[id(lease)] = lease.ranges
        self._start_collapsing()
        return lease

    def lose(self, units: Iterable[Range]) -> None:
        """Drops units that are mapped in another way now; a later lease may collapse them again."""
        with self._lock:
            for unit in units:
                if unit.start in self._ready:
                    self._drop(unit)

    def _leased(self) -> set[int]:
        leases = list(self._leases.values())  # one may end meanwhile, in this thread
        return {start for ranges in leases for one in ranges for start in _starts(one)}

    def _usable(self, units: Sequence[Range]) -> list[Range]:
        """The parts that are registered and not leased by another save."""
        if not self._leases:
            asked, version, _ = self._runs
            if asked is not units or version != self._version:
                self._runs = (units, self._version, _only(units, self._ready - self._spoiled))
            return self._runs[2]
        return _only(units, self._ready - self._spoiled - self._leased())  # leased units are copied early

    def _has_room(self, start: int) -> bool:
        """Whether one more unit may be registered; next to a registered one it costs no mapping."""
        return self._adjacent(start) > 0 or self._ranges < _MAX_RANGES

    def _adjacent(self, start: int) -> int:
        return len({start - HUGE_NBYTES, start + HUGE_NBYTES} & self._ready)

    def _huge(self, found: Range) -> list[Range]:
        """The parts that still consist of huge pages."""
        if self.guard.is_huge(found):
            return [found]
        if found.stop - found.start == HUGE_NBYTES:
            self._drop(found)
            return []
        return whole_units(part for unit in _each(found) for part in self._huge(unit))

    def _drop(self, unit: Range) -> None:
        self._ready.discard(unit.start)
        self._version += 1
        self._ranges += self._adjacent(unit.start) - 1
        with contextlib.suppress(OSError):
            self.guard.unregister(unit)

    def why_not(self, units: Sequence[Range]) -> str:
        """Why none of these units can ever be late; empty if some can, or if it is not known yet."""
        with self._lock:
            left = {start for one in units for start in _starts(one)} - self._spoiled
            if not left:
                return "others write to the pages that its tensors share" if units else ""
            tried = all(self._tries.get(start, 0) >= _TRIES for start in left)
            return f"no huge pages: {self._error}" if tried and self._ready.isdisjoint(left) else ""

    def take_back(self, lease: Lease) -> None:
        """Ends a lease. Idempotent; never raises."""
        with self._lock:
            self._unprotect(lease.ranges)
            self._leases.pop(id(lease), None)
            lease.ranges = []

    def _unprotect(self, armed: Iterable[Range]) -> None:
        for one in armed:
            try:
                self.guard.unprotect(one)
            except OSError:  # a part is not mapped any more: unprotect unit by unit
                for start in _starts(one):
                    with contextlib.suppress(OSError):
                        self.guard.unprotect(Range(start, start + HUGE_NBYTES))

    def forget(self, units: Iterable[Range], but: Iterable[Range] = ()) -> None:
        """Forgets units, but for those in but and in current leases."""
        with self._lock:
            kept = {start for one in but for start in _starts(one)} | self._leased()
            for start in {start for one in units for start in _starts(one)} - kept:
                self._queue.discard(start)
                self._tries.pop(start, None)
                self._quiet.pop(start, None)
                self._spoiled.discard(start)
                self._version += 1
                if start in self._ready:
                    self._drop(Range(start, start + HUGE_NBYTES))

    def in_child(self) -> None:
        """Closes the guard in a forked child, and replaces the lock, which a thread of the parent may hold."""
        self._lock = threading.RLock()
        self.guard.close()

    @property
    def busy(self) -> bool:
        """Whether memory is being collapsed."""
        with self._lock:
            return bool(self._queue)

    # --- shared units

    def trusted(self, shared: Sequence[Range]) -> tuple[list[Range], list[Range]]:
        """Divides shared units into those that are late, and those that are watched."""
        with self._lock:
            asked, version, late = self._trusted
            if asked is not shared or version != self._version:
                late = _only(shared, {start for start, count in self._quiet.items() if count >= _WATCHED})
                self._trusted = (shared, self._version, late)
        return late, without(shared, late)

    def watched(self, lease: Lease, units: Sequence[Range]) -> None:
        """Records which of these shared units of a lease were written."""
        seen = [(unit, lease.unwritten(unit)) for one in common(units, lease.ranges) for unit in _each(one)]
        with self._lock:
            for unit, unwritten in seen:
                if unwritten:
                    self._quiet[unit.start] = self._quiet.get(unit.start, 0) + 1
                else:
                    self._spoiled.add(unit.start)
                    self._quiet.pop(unit.start, None)
                self._version += 1

    # --- the thread

    def _start_collapsing(self) -> None:
        """Starts the thread that collapses units, if there are any. Not under the lock: the new thread takes it."""
        with self._lock:
            if not self._queue or (
                self._thread is not None and (self._thread.ident is None or self._thread.is_alive())
            ):
                return
            self._thread = thread = threading.Thread(target=self._collapse, name="ckptd-huge-pages", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            with self._lock:
                self._queue, self._error, self._thread = set(), str(error), None

    def _collapse(self) -> None:
        while (run := self._next_run()) is not None:
            began = time.monotonic()
            try:
                self.guard.collapse(run)
            except OSError as error:
                self._error = error.strerror or str(error)
            self._register(run)
            time.sleep(time.monotonic() - began)  # leaves half of the core to training

    def _next_run(self) -> Range | None:
        with self._lock:
            if not self._queue:
                self._thread = None
                return None
            start = stop = min(self._queue)
            while stop in self._queue and stop - start < _RUN_NBYTES:
                stop += HUGE_NBYTES
            return Range(start, stop)

    def _register(self, run: Range) -> None:
        """Registers the units that are huge now; adjacent ones cost no further mapping."""
        with self._lock:
            for start in _starts(run):
                unit = Range(start, start + HUGE_NBYTES)
                self._tries[start] = self._tries.get(start, 0) + 1
                if start in self._queue and self.guard.is_huge(unit) and self._has_room(start):
                    with contextlib.suppress(OSError):  # another userfaultfd has it
                        self.guard.register(unit)
                        self._ranges += 1 - self._adjacent(start)
                        self._ready.add(start)
                        self._version += 1
                        self._tries.pop(start)
            self._queue -= set(_starts(run))


def _starts(one: Range) -> range:
    return range(one.start, one.stop, HUGE_NBYTES)


def _each(one: Range) -> list[Range]:
    return [Range(start, start + HUGE_NBYTES) for start in _starts(one)]


def _only(units: Iterable[Range], these: set[int]) -> list[Range]:
    return whole_units(unit for one in units for unit in _each(one) if unit.start in these)


def _nbytes(ranges: Iterable[Range]) -> int:
    return sum(one.stop - one.start for one in ranges)


# --- of the process

_made: LateMemory | NoProofError | None = None
_making = threading.Lock()


def late_memory() -> LateMemory:
    """The instance of this process. Raises NoProofError with the reason if there is none."""
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
    """Drops the inherited guard, which refers to the parent's memory."""
    global _made, _making
    if isinstance(_made, LateMemory):
        _made.in_child()
    _made, _making = None, threading.Lock()


os.register_at_fork(after_in_child=_in_child)
