"""Blocking work of the daemon in a few threads: it ends as a callback in the main loop, never in the thread."""

import contextlib
import heapq
import itertools
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class Background:
    """``fileno`` becomes readable when a result waits; ``deliver`` runs the callbacks in the caller's thread."""

    def __init__(self, threads: int, name: str) -> None:
        self.threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._results: deque[Callable[[], None]] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._running = 0

    def fileno(self) -> int:
        """Descriptor to poll for reading."""
        return self._wake

    def run(self, work: Callable[[], T], done: Callable[[T | Exception], None]) -> None:
        """Runs work in a thread, then done(result or the exception) in deliver."""
        failed = False

        def job() -> None:
            outcome: T | Exception
            if failed:
                return
            try:
                outcome = work()
            except Exception as error:  # noqa: BLE001 - whatever it is, the loop decides
                outcome = error
            self._results.append(lambda: done(outcome))
            os.eventfd_write(self._wake, 1)

        self._running += 1
        try:
            self._pool.submit(job)
        except RuntimeError as error:  # no thread can be started: that must not end the loop
            failed, outcome = True, error
            self._results.append(lambda: done(outcome))
            os.eventfd_write(self._wake, 1)

    @property
    def busy(self) -> bool:
        """Whether some work is not delivered yet."""
        return self._running > 0

    def deliver(self) -> None:
        """Runs the callbacks of all finished work. What one raises is raised; the next call runs those after it."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        while self._results:
            self._running -= 1
            try:
                self._results.popleft()()
            except BaseException:
                os.eventfd_write(self._wake, 1)
                raise

    def close(self) -> None:
        """Lets go of the threads; what runs ends with the process."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class Rounds:
    """Background work, of which the earlier rounds go first. For the main loop's thread alone.

    The first slot of a rank is what its first save waits for. Made beside its second one, on the same cores and of
    memory that the machine has to find, it takes twice as long; behind all slots of the ranks before it, even longer.
    """

    def __init__(self, background: Background) -> None:
        self._background = background
        self._waiting: list[tuple[int, int, Callable[[], None]]] = []
        self._order = itertools.count()  # of equal rounds what came first
        self._running: list[int] = []  # rounds

    def run(self, number: int, work: Callable[[], T], done: Callable[[T | Exception], None]) -> None:
        """As Background.run, once nothing of an earlier round is left. number: of the round, the lowest is first."""

        def ended(outcome: T | Exception) -> None:
            self._running.remove(number)
            try:
                done(outcome)
            finally:
                self._begin()

        start = lambda: self._background.run(work, ended)  # noqa: E731 - typed by what is around it
        heapq.heappush(self._waiting, (number, next(self._order), start))
        self._begin()

    @property
    def busy(self) -> bool:
        """Whether some work is not delivered yet."""
        return bool(self._running or self._waiting)

    def _begin(self) -> None:
        while self._waiting and len(self._running) < self._background.threads:
            number, _, start = self._waiting[0]
            if self._running and number > min(self._running):
                return
            heapq.heappop(self._waiting)
            self._running.append(number)
            start()
