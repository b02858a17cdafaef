"""Why a daemon does not answer: what ZeroMQ reports of attempts to connect to it."""

import struct
from collections.abc import Callable

import zmq

_MOST = 64  # each costs two descriptors, when many nodes do not answer at once
_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_REPORTED = _REFUSED | zmq.EVENT_CONNECT_RETRIED | zmq.EVENT_HANDSHAKE_SUCCEEDED
_EVENT = struct.Struct("=hi")


class Watches:
    """Those of one context. Nothing here blocks."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        self._context = context
        self._count = 0

    def begin(self, made: "zmq.Socket[bytes]") -> "Watch | None":
        """Of a socket that connects; to be ended before that is closed.

        None: so many are watched as may be, or no descriptor is left.
        """
        if self._count >= _MOST:
            return None
        reader = _reports(self._context, made)
        if reader is None:
            return None
        self._count += 1
        return Watch(made, reader, self._ended)

    def _ended(self) -> None:
        self._count -= 1


class Watch:
    """Of one socket."""

    def __init__(self, made: "zmq.Socket[bytes]", reader: "zmq.Socket[bytes]", ended: Callable[[], None]) -> None:
        self._made = made
        self._reader = reader
        self._ended = ended
        self._refused = False

    def refused(self) -> bool:
        """Whether the other side has refused this one's key, or has another one itself, as far as is known."""
        while True:
            try:
                event, _ = _EVENT.unpack(self._reader.recv_multipart(zmq.NOBLOCK)[0])
            except (zmq.Again, struct.error):
                return self._refused
            if event & _REFUSED:
                self._refused = True
            elif event & zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._refused = False

    def end(self) -> None:
        """Nothing is reported any more."""
        self._made.monitor(None, 0)
        self._reader.close(0)
        self._ended()


def _reports(context: "zmq.Context[zmq.Socket[bytes]]", made: "zmq.Socket[bytes]") -> "zmq.Socket[bytes] | None":
    """The socket that receives what is reported.

    It is there before the first report, and has room for all: ZeroMQ's thread waits for both, with a lock that each
    other call on ``made`` needs.
    """
    name = f"inproc://reports-{made.FD}"
    try:
        reader = context.socket(zmq.PAIR)
    except zmq.ZMQError:
        return None
    try:
        reader.setsockopt(zmq.RCVHWM, 0)
        reader.connect(name)
        made.monitor(name, _REPORTED)
    except zmq.ZMQError:
        reader.close(0)
        return None
    return reader
