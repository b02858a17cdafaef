"""Handlers of SIGTERM and SIGUSR1: they record the signal for listeners, then call the previous handler.

The handlers belong to the process, not to a client: the last listener that closes restores the previous ones. A handler
without listeners has the effect of the previous one, so no signal is lost: that happens in a forked child, and after
clients were dropped, or closed in another thread.
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
    """Receives signals from its construction to close."""

    def __init__(self) -> None:
        self.received = ""  # the first signal
        self._pid = os.getpid()
        _LISTENERS.add(self)
        if threading.current_thread() is threading.main_thread():
            for number in NOTICES:
                _install(number)
        self.not_received = [number.name for number in NOTICES if not isinstance(signal.getsignal(number), _Handler)]
        """Names of signals that it does not receive: this is not the main thread, or C code handles them."""

    @property
    def is_here(self) -> bool:
        """Whether this process created it, not a forked child."""
        return os.getpid() == self._pid

    def close(self) -> None:
        """Restores the previous handlers after the last listener, unless others were installed since."""
        _LISTENERS.discard(self)
        if not _listeners() and threading.current_thread() is threading.main_thread():
            for number in NOTICES:
                _take_back(number)


_LISTENERS: Final[weakref.WeakSet[Listener]] = weakref.WeakSet()  # without those of dropped clients


def _listeners() -> list[Listener]:
    return [listener for listener in list(_LISTENERS) if listener.is_here]


class _Handler:
    """The handler of one signal. It may stay in the chain of a handler that a user installed over it."""

    def __init__(self, before: _Before) -> None:
        self.before = before

    def __call__(self, number: int, frame: FrameType | None) -> None:
        listeners = _listeners()
        for listener in listeners:
            listener.received = listener.received or signal.Signals(number).name
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
    """Whether C code such as faulthandler.register handles it: Python could not restore that handler."""
    if callable(before):
        return False
    try:
        with open("/proc/self/status", "rb") as file:
            caught = next(int(line.split()[1], 16) for line in file if line.startswith(b"SigCgt:"))
    except (OSError, StopIteration, ValueError):
        return False
    return bool(caught >> (number - 1) & 1)


# Between a fork and the first Python line in the child, Python would record a signal and then forget it. So both
# signals are blocked until the child has restored the previous handlers.
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
