"""Requests without a wait for their answers: a thread sends them in order, each again until the daemon answers."""

import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import zmq

from ckptd.shared.base.errors import CkptdError, UsageError
from ckptd.shared.files import locks
from ckptd.shared.format import arena_paths
from ckptd.shared.protocol.messages import Request

log = logging.getLogger("ckptd_client")
_ANSWER_S: Final = 3.0  # without an answer after this, it warns and sends the request again
_PAUSE_S: Final = 0.5
Make = Callable[[int], Request]
Ask = Callable[[Make, float | None], Any]  # waits for the answer; seconds at most


class _Request(NamedTuple):
    what: str  # for the warning that no answer came
    make: Make
    then: Callable[[Any], None]  # receives the answer


class RequestQueue:
    """The requests of one client. The thread ends when all are answered, on close, or when the main thread ends."""

    def __init__(self, ask: Ask, arena: str) -> None:
        self._ask = ask
        self._arena = arena
        self._lock = threading.Lock()
        self._due: deque[_Request] = deque()
        self._runs = self._silent = False

    @property
    def busy(self) -> bool:
        """Whether a request is not answered yet."""
        return bool(self._due)

    def send(self, what: str, make: Make, then: Callable[[Any], None] = lambda _: None) -> None:
        """Queues a request. what: its name for warnings. then: receives the answer. Never blocks."""
        with self._lock:
            self._due.append(_Request(what, make, then))
            if not self._runs:
                self._runs = True
                # Not a daemon thread: the process would exit while it uses the socket.
                threading.Thread(target=self._run, name="ckptd-preemption", daemon=False).start()

    def close(self) -> None:
        """Drops all requests. Never blocks."""
        with self._lock:
            self._due.clear()

    def _run(self) -> None:
        main = threading.main_thread()
        while True:
            with self._lock:
                if not self._due or not main.is_alive():
                    self._due.clear()
                    self._runs = False
                    return
                request = self._due[0]
            if self._is_over(request):
                with self._lock:
                    if self._due and self._due[0] is request:
                        self._due.popleft()
            else:
                main.join(_PAUSE_S)

    def _is_over(self, request: _Request) -> bool:
        """Whether the request was answered, or never can be."""
        try:
            request.then(self._ask(request.make, _ANSWER_S))
        except UsageError:  # closed, or refused for good
            return True
        except (CkptdError, zmq.ZMQError) as error:
            if not self._silent and self.busy:
                self._silent = True
                log.warning("ckptd: %s", self._no_answer(request.what, error))
            return False
        if self._silent:
            self._silent = False
            log.warning("ckptd: %s: the daemon of this node has it now", request.what)
        return True

    def _no_answer(self, what: str, error: Exception) -> str:
        text = f"{what}: the daemon of this node does not answer, so no rank hears of it: {error}\n  It is sent again"
        try:
            pid = locks.holder(os.path.join(self._arena, arena_paths.LOCK))
        except OSError:
            pid = None
        if not pid:
            return f"{text} to the next daemon; until then preempted() is False, and SIGKILL ends this process"
        return f"{text} until it answers. What hangs ends by `kill -KILL {pid}`: the next daemon has all that is staged"
