"""The ROUTER socket that ranks and the command line talk to: frames in, checked messages out."""

import contextlib
import os
from dataclasses import dataclass

import zmq

from ckptd.shared.base.errors import ProtocolError
from ckptd.shared.protocol.messages import MAX_MESSAGE_NBYTES, Refused, Reply, Request, decode_request, encode


@dataclass(frozen=True, slots=True)
class Incoming:
    """A request and its sender; identity is ZeroMQ's, good for this connection only."""

    identity: bytes
    request: Request


class RankSocket:
    """Owns the socket file. Nothing here blocks: a peer that does not read loses messages, never the daemon's time."""

    def __init__(self, path: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_NBYTES)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 0)
        if os.path.exists(path):
            os.unlink(path)  # a dead daemon's; the arena's lock says that no live one uses it
        self._socket.bind(f"ipc://{path}")
        os.chmod(path, 0o600)
        self.refused = 0

    @property
    def pollable(self) -> zmq.Socket[bytes]:
        """For a zmq.Poller."""
        return self._socket

    def receive(self, most: int = 256) -> list[Incoming]:
        """Requests that wait, at most so many. What is no request is refused and counted."""
        incoming: list[Incoming] = []
        for _ in range(most):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            if len(frames) != 2:  # noqa: PLR2004 - identity and one message
                self.refused += 1
                continue
            try:
                incoming.append(Incoming(frames[0], decode_request(frames[1])))
            except ProtocolError as error:
                self.refused += 1
                self.send(frames[0], Refused(reply_to=0, code=error.code, message=error.message, hint=error.hint))
        return incoming

    def send(self, identity: bytes, message: Reply) -> None:
        """Queues a message; one to a peer that left or does not read is dropped."""
        with contextlib.suppress(zmq.ZMQError):
            self._socket.send_multipart([identity, encode(message)], zmq.NOBLOCK)

    def close(self, *, linger_s: float = 0.0) -> None:
        """Closes the socket; ZeroMQ removes its file. Blocks up to linger_s for last words that are not sent yet."""
        self._socket.close(int(linger_s * 1000))
        self._context.term()
