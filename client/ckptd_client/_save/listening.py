"""A thread that receives updates on saves while training calls no method.

So within seconds a rank warns that its save waits for other ranks, rank 0 reports problems of drains, and each node
reports that its daemon ended.
"""

import contextlib
import logging
import threading
import time
import weakref

import zmq

from ckptd.shared.base.errors import CkptdError
from ckptd.shared.protocol.messages import End
from ckptd_client._local.save_record import SaveRecord
from ckptd_client._save.lost_daemon import LostDaemon
from ckptd_client._save.staging import Staging

log = logging.getLogger("ckptd_client")
_PAUSE_S = 0.4
_LATE_S = 15.0  # after this a save usually has no further updates
_LATE_PAUSE_S = 2.0


class Listening:
    """The listening thread of one client. It starts when a segment is sealed.

    It ends once every save has ended and the newest is not only in this node's memory, and with the client and the
    process.
    """

    def __init__(self, staging: Staging) -> None:
        self._staging = weakref.ref(staging)
        self._lock = threading.Lock()
        self._runs = False
        self._lost = LostDaemon()

    def begin(self) -> None:
        """Starts the thread: a segment was handed over, or will be to the next daemon. Never blocks."""
        with self._lock:
            if self._runs:
                return
            # Not a daemon thread: the process would exit while it uses the socket. It waits for the main thread.
            thread = threading.Thread(target=self._run, name="ckptd-listen", daemon=False)
            with contextlib.suppress(RuntimeError):  # no thread can be started: the save is handed over anyway
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
                    self._lost.check(staging, _open(staging))
                except Exception as error:  # noqa: BLE001 - for example no free descriptor; the next check may succeed
                    log.debug("ckptd: a look at the daemon failed: %s: %s", type(error).__name__, error)
            with self._lock:
                waiting = _open(staging)
                if not waiting or not main.is_alive():
                    self._runs = False
                    return
            late = time.monotonic() >= waiting[0].began + _LATE_S and not self._lost.is_awaited
            pause = _LATE_PAUSE_S if late else _PAUSE_S
            del staging, waiting


def _open(staging: Staging | None) -> list[SaveRecord]:
    """Saves that have not ended, the oldest first; else the newest, if it is only in this memory."""
    if staging is None or staging.closed:
        return []
    book = staging.link.book
    newest = book.newest
    return book.open or ([newest] if newest is not None and newest.known_end is End.KEPT else [])
