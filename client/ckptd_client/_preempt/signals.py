"""SIGTERM and SIGUSR1: noted for whoever listens in this process, then given to the handler that was there before.

The handlers are of the process, not of a client: the last client that stops listening takes them back. One that is
reached when nobody listens does what would have happened without it, so none can swallow a signal: it is that of a
forked child, or of clients that were dropped, or closed in another thread.
"""

import os
import signal
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

NOTICES: Final = (signal.SIGTERM, signal.SIGUSR1)
_Before = Callable[[int, FrameType | None], Any] | int


class Listener:
    """One listener, from its first moment to close."""

    def __init__(self) -> None:
        self.heard = ""  # the first signal
        self._pid = os.getpid()
        _LISTENERS.add(self)
        if threading.current_thread() is threading.main_thread():
            for number in NOTICES:
                _install(number)
        self.unheard = [number.name for number in NOTICES if not isinstance(signal.getsignal(number), _Handler)]
        """Signals that are not heard: this is not the main thread, or what is no Python handles them."""

    @property
    def is_here(self) -> bool:
        """Whether this process listens; a forked child does not."""
        return os.getpid() == self._pid

    def close(self) -> None:
        """The handlers that were there before, with the last listener, unless others were installed since."""
        _LISTENERS.discard(self)
        if not _listeners() and threading.current_thread() is threading.main_thread():
            for number in NOTICES:
                _take_back(number)


_LISTENERS: Final[weakref.WeakSet[Listener]] = weakref.WeakSet()  # that of a client which was dropped listens no more


def _listeners() -> list[Listener]:
    return [listener for listener in list(_LISTENERS) if listener.is_here]


class _Handler:
    """Of one signal. It may live on as a link in the chain of a handler that a user installed over it."""

    def __init__(self, before: _Before) -> None:
        self.before = before

    def __call__(self, number: int, frame: FrameType | None) -> None:
        listeners = _listeners()
        for listener in listeners:
            listener.heard = listener.heard or signal.Signals(number).name
        if callable(self.before):
            self.before(number, frame)
        elif not listeners and signal.getsignal(number) is self:
            _take_back(number)
            os.kill(os.getpid(), number)


def _install(number: int) -> None:
    before = signal.getsignal(number)
    if before is not None and not isinstance(before, _Handler) and not _is_anothers(number, before):
        signal.signal(number, _Handler(before))


def _take_back(number: int) -> None:
    while isinstance(handler := signal.getsignal(number), _Handler):
        signal.signal(number, handler.before)


def _is_anothers(number: int, before: _Before) -> bool:
    """Whether what is no Python handles it, such as faulthandler.register: nothing could put that back."""
    if callable(before):
        return False
    try:
        with open("/proc/self/status", "rb") as file:
            caught = next(int(line.split()[1], 16) for line in file if line.startswith(b"SigCgt:"))
    except (OSError, StopIteration, ValueError):
        return False
    return bool(caught >> (number - 1) & 1)


# A forked child is another process. Between the fork and its first line of Python a signal would be noted and then
# forgotten by Python, so both are held back until the handlers that were there before are in place.
_HELD: Final = threading.local()


def _before_fork() -> None:
    _HELD.mask = signal.pthread_sigmask(signal.SIG_BLOCK, NOTICES if _LISTENERS else ())


def _after_fork() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _HELD.mask)


def _in_child() -> None:
    for number in NOTICES:
        _take_back(number)
    _after_fork()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)
