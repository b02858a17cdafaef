"""Which keys may connect: ZeroMQ asks for each handshake (ZAP, RFC 27), and is answered in the daemon's loop."""

from collections.abc import Callable
from typing import NamedTuple

import zmq
from zmq.utils import z85

_ENDPOINT = "inproc://zeromq.zap.01"
_KEPT = 16  # strangers that are remembered, the last
_WAITING = 1 << 14  # handshakes that are held, the last: a job's daemons may all come before its first rank does
_STRANGER_S = 60.0  # how long one that was refused is reported


class Stranger(NamedTuple):
    """Who came under a key that nobody had named by then."""

    address: str
    key: str


class Authenticator:
    """Owns the socket. One per ZeroMQ context; to be made before anything that it guards is bound.

    A key that is not known is not refused but held, until ZeroMQ ends the handshake for its age: at the start of a job
    one daemon learns of the other a moment before the other does, and a refusal would cost it seconds.
    """

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(_ENDPOINT)
        self._waiting: dict[str, list[list[bytes]]] = {}  # by key, how the replies begin; the last key last
        self._held = 0
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
            match frames:
                case [asker, b"", b"1.0", request, _, address, _, b"CURVE", raw]:
                    stranger = Stranger(address.decode("ascii", "replace"), z85.encode(raw).decode())
                    self._hold(stranger.key, [asker, b"", b"1.0", request])
                    if known(stranger.key):
                        self.admit(stranger.key)
                    else:
                        self._remember(stranger, now)
                case [asker, b"", _, request, *_]:
                    self._socket.send_multipart([asker, b"", b"1.0", request, b"400", b"CURVE only", b"", b""])

    def admit(self, key: str) -> None:
        """The key is known now: a daemon that came under it and still waits is let in."""
        for head in self._waiting.pop(key, []):
            self._held -= 1
            self._socket.send_multipart([*head, b"200", b"OK", key.encode(), b""])

    def _hold(self, key: str, head: list[bytes]) -> None:
        heads = self._waiting.pop(key, [])
        heads.append(head)
        self._waiting[key] = heads
        self._held += 1
        while self._held > _WAITING:
            self._held -= len(self._waiting.pop(next(iter(self._waiting))))

    def _remember(self, stranger: Stranger, now: float) -> None:
        self.strangers.pop(stranger, None)
        self.strangers[stranger] = now
        if len(self.strangers) > _KEPT:
            del self.strangers[next(iter(self.strangers))]

    def problems(self, known: Callable[[str], bool], now: float) -> list[str]:
        """Daemons that were refused lately and whose keys are not known since, a line each."""
        late = [who for who, when in self.strangers.items() if now - when < _STRANGER_S and not known(who.key)]
        return [
            f"a daemon at {who.address} with key {who.key} was refused: no job here names it; "
            "if it is of one of these jobs, its arena was lost or its key_file changed: reconnect the job"
            for who in late
        ]

    def close(self) -> None:
        """Gives the socket back."""
        self._socket.close()
