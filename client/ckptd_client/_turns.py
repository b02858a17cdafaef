"""Whose turn it is with a client that several threads use: saves go ahead of whoever only waits for news."""

import contextlib
import threading
import time
from collections.abc import Iterator

from ckptd_client._link import Link

_YIELD_S = 0.005


class Turns:
    """The lock around a client's link."""

    def __init__(self, link: Link) -> None:
        self.lock = threading.RLock()
        self._link = link

    @contextlib.contextmanager
    def first(self, deadline: float | None = None) -> Iterator[bool]:
        """The lock, ahead of threads that only wait for news. False when it could not be had by the deadline."""
        rival = object()
        self._link.rivals.add(rival)
        try:
            left = -1.0 if deadline is None else max(0.0, deadline - time.monotonic())
            mine = self.lock.acquire(timeout=left)
        finally:
            self._link.rivals.discard(rival)
        with self._held(mine, yields=False):
            yield mine

    @contextlib.contextmanager
    def last(self, deadline: float) -> Iterator[bool]:
        """The lock, for a wait that is broken off (PreemptedError) when a save wants it. False as above."""
        while self._link.rivals and time.monotonic() < deadline:
            time.sleep(_YIELD_S)
        mine = self.lock.acquire(timeout=max(0.0, deadline - time.monotonic()))
        with self._held(mine, yields=True):
            yield mine

    @contextlib.contextmanager
    def _held(self, mine: bool, *, yields: bool) -> Iterator[None]:
        if not mine:
            yield
            return
        before, self._link.yields = self._link.yields, yields
        try:
            yield
        finally:
            self._link.yields = before
            self.lock.release()
