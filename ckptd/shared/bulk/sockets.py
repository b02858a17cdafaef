"""Blocking sockets with deadlines in the kernel: a peer that stops answering costs a thread its patience, no more."""

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Final

from ckptd.shared.base.errors import PeerError

# Less than the kernel would take by itself: bytes that wait in a queue are cold when they are read.
BUFFER_NBYTES: Final = 512 << 10
_TIMEVAL = struct.Struct("@ll")


class Cancel:
    """Breaks off what threads do: every socket that was watched ends at once. May be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self.cancelled = False
        self.final = False  # nothing is to be kept for a next time

    def cancel(self, *, final: bool = False) -> None:
        """From here on check raises."""
        with self._lock:
            self.final = self.final or final
            self.cancelled = True
            sockets = list(self._sockets)
        for watched in sockets:
            close_both_ways(watched)

    def check(self) -> None:
        """Raises PeerError when it was cancelled."""
        if self.cancelled:
            raise PeerError("cancelled")

    @contextlib.contextmanager
    def limited(self, seconds: float) -> Iterator[None]:
        """Cancels itself when the block takes longer."""
        timer = threading.Timer(max(0.0, seconds), self.cancel)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    @contextlib.contextmanager
    def watching(self, watched: socket.socket) -> Iterator[None]:
        """The socket's calls end when it is cancelled. Raises PeerError when it was already."""
        with self._lock:
            self._sockets.add(watched)
        try:
            self.check()
            yield
        finally:
            with self._lock:
                self._sockets.discard(watched)


def prepare(connection: socket.socket, receive_s: float, send_s: float) -> None:
    """Buffers and deadlines, each for one call without progress."""
    connection.settimeout(None)  # a timeout of Python's would make every call two, and MSG_WAITALL none
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    patience(connection, receive_s, send_s)


def patience(connection: socket.socket, receive_s: float, send_s: float) -> None:
    """Sets the deadlines of each receiving and sending call."""
    for option, seconds in ((socket.SO_RCVTIMEO, receive_s), (socket.SO_SNDTIMEO, send_s)):
        connection.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(int(seconds), int(seconds % 1 * 1e6)))


def wake_at(connection: socket.socket, nbytes: int) -> None:
    """A receiving call sleeps until so many bytes are there, or the stream ends."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)


def receive(connection: socket.socket, *views: memoryview) -> int:
    """Fills the views one after the other; fewer bytes than they hold only at the end of the stream.

    Raises BlockingIOError at the deadline, OSError.
    """
    done, left = 0, [view for view in views if len(view)]
    while left:
        nbytes = connection.recvmsg_into(left, 0, socket.MSG_WAITALL)[0]
        if not nbytes:
            break
        done += nbytes
        left = _after(left, nbytes)
    return done


def send(connection: socket.socket, *views: memoryview | bytes) -> None:
    """Sends all. Raises BlockingIOError at the deadline, OSError."""
    total, done = sum(map(len, views)), connection.sendmsg(views)
    if done == total:  # nearly always
        return
    left = _after([memoryview(view) for view in views if len(view)], done)
    while left:
        left = _after(left, connection.sendmsg(left))


def _after(views: list[memoryview], nbytes: int) -> list[memoryview]:
    """What is left of the views behind so many bytes."""
    while views and nbytes >= len(views[0]):
        nbytes -= len(views[0])
        views = views[1:]
    return [views[0][nbytes:], *views[1:]] if views else []


def close_both_ways(connection: socket.socket) -> None:
    """Wakes threads that block in a call on it. The socket stays open."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
