"""Blocking work of the daemon in a few threads: it ends as a callback in the main loop, never in the thread."""

import contextlib
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
