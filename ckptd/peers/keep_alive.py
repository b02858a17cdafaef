"""Signs of life while the loop is in one long turn: other daemons must not take it for dead."""

import threading
import time
from collections.abc import Callable

_CHECKS = 2  # per interval
_HANGS_S = 30.0  # a turn of that length does not end: nothing is sent for it any more


class KeepAlive:
    """A thread that calls ``send`` each interval while a turn of the loop lasts longer than that.

    ``send`` runs in the thread and must not touch what the loop changes. The thread starts with the first turn after
    ``start``; ``begins`` and ``ends`` cost the loop an assignment each.
    """

    def __init__(self, send: Callable[[], None], interval_s: float) -> None:
        self._send = send
        self._interval_s = interval_s
        self._began: float | None = None  # the present turn; None: the loop waits
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """There are links now. Calls after the first do nothing."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="keep-alive", daemon=True)
            self._thread.start()

    def begins(self, now: float) -> None:
        """The loop has something to do. now: of time.monotonic."""
        self._began = now

    def ends(self) -> None:
        """The loop waits again."""
        self._began = None

    def _run(self) -> None:
        sent_at = 0.0
        while not self._over.wait(self._interval_s / _CHECKS):
            began, now = self._began, time.monotonic()
            if began is not None and began + _HANGS_S > now >= max(began, sent_at) + self._interval_s:
                sent_at = now
                self._send()

    def close(self) -> None:
        """Blocks until nothing is sent any more."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()
