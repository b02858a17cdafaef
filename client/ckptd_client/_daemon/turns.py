"""The lock around a client that several threads use: saves have priority over waits for updates."""

import contextlib
import os
import threading
import time
from collections.abc import Iterator

from ckptd.shared.base.errors import UsageError
from ckptd_client._daemon.link import Link

_YIELD_S = 0.005


class Owner:
    """The process that connected a client. A forked child has neither its sockets nor its slots nor its locks.

    Every method that takes a lock of the client checks this first: in a child no thread would release the lock.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._numbers = threading.RLock()

    @property
    def is_here(self) -> bool:
        """Whether this process connected."""
        return os.getpid() == self.pid

    def check(self) -> None:
        """Raises UsageError in a forked child."""
        if not self.is_here:
            text = f"this client is of process {self.pid}, and this is {os.getpid()}, a child forked from it"
            hint = f"call it in process {self.pid}; for a job of this child's own: connect(job=..., alone=True)"
            raise UsageError(text, hint=hint)

    @contextlib.contextmanager
    def numbers(self) -> Iterator[None]:
        """The lock of the numbers of saves. Held briefly, also by a save that cannot get the lock of the link."""
        self.check()
        with self._numbers:
            yield


class Turns:
    """The lock around a client's link."""

    def __init__(self, link: Link, owner: Owner) -> None:
        self.lock = threading.RLock()
        self._owner = owner
        self._link = link

    @contextlib.contextmanager
    def first(self, deadline: float | None = None) -> Iterator[bool]:
        """Takes the lock, with priority over threads that wait for updates. False at the deadline.

        Raises UsageError in a forked child.
        """
        self._owner.check()
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
        """Takes the lock for a wait that ends (PreemptedError) when a save wants the lock. Otherwise as first."""
        self._owner.check()
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
