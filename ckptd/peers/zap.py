"""Which keys may connect: ZeroMQ asks for each handshake (ZAP, RFC 27), and is answered in the daemon's loop."""

from collections.abc import Callable
from typing import NamedTuple

import zmq
from zmq.utils import z85

_ENDPOINT = "inproc://zeromq.zap.01"
_KEPT = 16  # refused ones that are remembered, the last


class Stranger(NamedTuple):
    """Who was refused."""

    address: str
    key: str


class Authenticator:
    """Owns the socket. One per ZeroMQ context; to be made before anything that it guards is bound."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        self._socket = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(_ENDPOINT)
        self.strangers: dict[Stranger, float] = {}  # when they came last

    @property
    def pollable(self) -> zmq.Socket[bytes]:
        """For a zmq.Poller."""
        return self._socket

    def serve(self, known: Callable[[str], bool], now: float) -> None:
        """Answers what waits. Who is let in is named to the receiver of his messages by his key."""
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._socket.send_multipart(self._answer(frames, known, now))

    def _answer(self, frames: list[bytes], known: Callable[[str], bool], now: float) -> list[bytes]:
        match frames:
            case [b"1.0", request, _, address, _, b"CURVE", raw]:
                key = z85.encode(raw).decode()
                if known(key):
                    return [b"1.0", request, b"200", b"OK", key.encode(), b""]
                stranger = Stranger(address.decode("ascii", "replace"), key)
                self.strangers.pop(stranger, None)
                self.strangers[stranger] = now
                if len(self.strangers) > _KEPT:
                    del self.strangers[next(iter(self.strangers))]
                # "Not now": he tries again, and may be known by then. A 400 would be his last try.
                return [b"1.0", request, b"300", b"key not known", b"", b""]
            case [_, request, *_]:
                return [b"1.0", request, b"500", b"not understood", b"", b""]
            case _:
                return [b"1.0", b"", b"500", b"not understood", b"", b""]

    def close(self) -> None:
        """Gives the socket back."""
        self._socket.close()
