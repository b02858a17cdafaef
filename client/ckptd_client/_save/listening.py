"""A thread that hears what becomes of saves while training calls nothing.

So a rank whose save waits for ranks that do not save says so within seconds, rank 0 what its user should know of
drains, and each node that its daemon ended.
"""

import contextlib
import logging
import threading
import time
import weakref

import zmq

from ckptd.shared.base.errors import CkptdError
from ckptd.shared.protocol.messages import End
from ckptd_client._save.lost_daemon import LostDaemon
from ckptd_client._save.staging import Staging
from ckptd_client.handle import SaveHandle

log = logging.getLogger("ckptd_client")
_PAUSE_S = 0.4
_LATE_S = 15.0  # when all that can be said of a save has been said
_LATE_PAUSE_S = 2.0


class Listening:
    """One client's. The thread begins when a segment is sealed.

    It ends when each save has its end, and the newest is not in this node's memory alone; with the client, and the
    process.
    """

    def __init__(self, staging: Staging) -> None:
        self._staging = weakref.ref(staging)
        self._lock = threading.Lock()
        self._runs = False
        self._lost = LostDaemon()

    def begin(self) -> None:
        """A segment was handed over, or will be to the next daemon. Never blocks."""
        with self._lock:
            if self._runs:
                return
            # No daemon: the process would end under it while it uses the socket. It waits for the main thread.
            thread = threading.Thread(target=self._run, name="ckptd-listen", daemon=False)
            with contextlib.suppress(RuntimeError):  # none can be started: the save is handed over all the same
                thread.start()
                self._runs = True

    def _run(self) -> None:
        try:
            self._listen()
        finally:
            self._runs = False

    def _listen(self) -> None:
        pause, main = _PAUSE_S, threading.main_thread()
        while True:
            main.join(pause)
            staging = self._staging()
            if staging is not None and main.is_alive():
                try:
                    with contextlib.suppress(CkptdError, zmq.ZMQError):
                        staging.pump(0.0)
                    self._lost.look(staging, _open(staging))
                except Exception as error:  # noqa: BLE001 - no descriptor is left, say: the next look may have one
                    log.debug("ckptd: a look at the daemon failed: %s: %s", type(error).__name__, error)
            with self._lock:
                waiting = _open(staging)
                if not waiting or not main.is_alive():
                    self._runs = False
                    return
            late = time.monotonic() >= waiting[0].began + _LATE_S and not self._lost.is_awaited
            pause = _LATE_PAUSE_S if late else _PAUSE_S
            del staging, waiting


def _open(staging: Staging | None) -> list[SaveHandle]:
    """Saves of which there is more to hear, the oldest first; else the newest, while this memory alone has it."""
    if staging is None or staging.closed:
        return []
    book = staging.link.book
    newest = book.newest
    return book.open or ([newest] if newest is not None and newest.known_end is End.KEPT else [])
