"""A thread that hears what becomes of saves while training calls nothing.

So a rank whose save waits for ranks that do not save says so within seconds, rank 0 what its user should know of
drains, and each node that its daemon ended.
"""

import contextlib
import threading
import time
import weakref

import zmq

from ckptd.shared.base.errors import CkptdError
from ckptd_client._save.lost_daemon import LostDaemon
from ckptd_client._save.staging import Staging
from ckptd_client.handle import SaveHandle

_PAUSE_S = 0.4
_LATE_S = 15.0  # when all that can be said of a save has been said
_LATE_PAUSE_S = 2.0


class Listening:
    """One client's. The thread begins when a segment is sealed.

    It ends when each save has its end; with the client, and the process.
    """

    def __init__(self, staging: Staging) -> None:
        self._staging = weakref.ref(staging)
        self._lock = threading.Lock()
        self._runs = False
        self._lost = LostDaemon()

    def begin(self) -> None:
        """A segment was handed over, or will be to the next daemon. Never blocks."""
        with self._lock:
            if not self._runs:
                self._runs = True
                # No daemon: the process would end under it while it uses the socket. It waits for the main thread.
                threading.Thread(target=self._run, name="ckptd-listen", daemon=False).start()

    def _run(self) -> None:
        pause, main = _PAUSE_S, threading.main_thread()
        while True:
            main.join(pause)
            staging = self._staging()
            if staging is not None and main.is_alive():
                with contextlib.suppress(CkptdError, zmq.ZMQError):
                    staging.pump(0.0)
                self._lost.look(staging, _open(staging))
            with self._lock:
                waiting = _open(staging)
                if not waiting or not main.is_alive():
                    self._runs = False
                    return
            late = time.monotonic() >= waiting[0].began + _LATE_S and not self._lost.is_awaited
            pause = _LATE_PAUSE_S if late else _PAUSE_S
            del staging, waiting


def _open(staging: Staging | None) -> list[SaveHandle]:
    """Saves of which there is more to hear, the oldest first."""
    return [] if staging is None or staging.closed else staging.link.book.open
