"""The connection to the daemon: requests with deadlines, pushes as they come. Never used by two threads at once."""

import errno
import os
import socket
import time
import weakref
from collections.abc import Callable

import zmq
from zmq.utils.monitor import recv_monitor_message

from ckptd.shared.base import errors
from ckptd.shared.base.errors import CkptdError, ConnectError
from ckptd.shared.protocol.messages import (
    Attached,
    Notice,
    Progress,
    Refused,
    Reply,
    Request,
    SlotGranted,
    SlotsRefused,
    decode_reply,
    encode,
)
from ckptd_client._daemon.silence import silent_daemon

Push = SlotGranted | SlotsRefused | Progress | Notice
_TURN_S = 0.1  # a wait looks so often whether somebody with less time wants the connection
_STRANGER = "detached"  # the code of a refusal: this daemon has not seen us attach
_LOST = zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED
_KINDS: dict[str, type[CkptdError]] = {  # of kinds with one code the one that has it for its own
    kind.code: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, CkptdError) and "code" in vars(kind)
}


class ChannelLostError(ConnectError):
    """The daemon is gone; what was asked may or may not have been done."""

    code = "lost"


class PreemptedError(Exception):
    """Somebody with less time wants the connection; what was asked may or may not have been done."""


def _stay() -> None:
    """Nobody else wants the connection."""


class Channel:
    """One connection to one life of a daemon. When that ends, ``lost`` is true for ever: make a new Channel."""

    def __init__(self, socket_path: str, on_push: Callable[[Push], None], give_way: Callable[[], None] = _stay) -> None:
        """give_way is called ten times a second during any wait, and may raise to end it."""
        self._path = socket_path
        self._on_push = on_push
        self._give_way = give_way
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 20)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_CONNECTED | _LOST)
        self._socket.connect(f"ipc://{socket_path}")
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        # Also when it is only dropped: ZeroMQ's context would wait for ever for a socket that nobody closes.
        self._finalizer = weakref.finalize(self, _close, self._socket, self._monitor, self._context, os.getpid())
        self._seq = 0
        self._answers: dict[int, Reply] = {}
        self.connected = False
        self.lost = False

    def open(self, deadline: float) -> bool:
        """Waits until a daemon listens, at most to deadline (time.monotonic). Whether one does."""
        while not self.connected and not self.lost and self._turn(deadline):
            pass
        return self.connected

    def request(self, make: Callable[[int], Request], deadline: float | None, limit: str = "") -> Reply:
        """Sends make(seq) and waits for its answer. deadline None waits as long as the daemon lives.

        limit: the setting that the deadline comes from, for the error; empty: a caller's own patience.
        Raises the error a refusal stands for, ChannelLostError when the daemon ends, WaitTimeoutError at the deadline.
        """
        self._seq += 1
        seq, began = self._seq, time.monotonic()
        self._answers.clear()  # late ones, to requests that nobody waits for any more
        if self.lost:
            raise ChannelLostError(f"the daemon behind {self._path} ended")
        self._socket.send(encode(make(seq)))
        while seq not in self._answers:
            if not self._turn(deadline) or (deadline is not None and time.monotonic() > deadline + _TURN_S):
                raise silent_daemon(os.path.dirname(self._path), time.monotonic() - began, limit)
            if self.lost and seq not in self._answers:
                raise ChannelLostError(f"the daemon behind {self._path} ended")
        answer = self._answers.pop(seq)
        if isinstance(answer, Refused) and answer.code == _STRANGER:
            # The daemon ended while nobody listened here, and the socket has found the next one by itself.
            self.lost = True
            raise ChannelLostError(f"the daemon behind {self._path} is another one now")
        if isinstance(answer, Refused):
            raise _KINDS.get(answer.code, CkptdError)(answer.message, hint=answer.hint)
        return answer

    def pump(self, deadline: float) -> bool:
        """Delivers pushes; returns when one came or the daemon was lost, False at the deadline."""
        return not self.lost and self._turn(deadline)

    def _turn(self, deadline: float | None) -> bool:
        """One wait and everything that came. False when the deadline passed with nothing."""
        while True:
            left = _TURN_S if deadline is None else max(0.0, deadline - time.monotonic())
            ready = dict(self._poller.poll(int(min(left, _TURN_S) * 1000)))
            if ready:
                break
            self._give_way()
            if left < _TURN_S and deadline is not None:
                break
        if self._socket in ready:
            self._receive()
        if self._monitor in ready:
            self._hear()
        return bool(ready)

    def _receive(self) -> None:
        while True:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            reply = decode_reply(frame)
            if isinstance(reply, Push):
                self._on_push(reply)
                continue
            if isinstance(reply, Attached):
                for news in reply.known:  # now: the pushes behind it are younger
                    self._on_push(news)
            # 0: the daemon could not even read the request, of which there is one at a time
            self._answers[reply.reply_to or self._seq] = reply

    def _hear(self) -> None:
        event = recv_monitor_message(self._monitor)["event"]
        if event == zmq.EVENT_CONNECTED:
            self.connected = True
        elif event & _LOST:
            self._receive()  # what it said last
            self.lost = True

    def close(self) -> None:
        """Drops the connection; nothing queued is waited for."""
        self._finalizer()


def channel_listens(socket_path: str) -> bool:
    """Whether a daemon has the socket, which costs microseconds to know: not whether it answers. Never blocks."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        return probe.connect_ex(socket_path) in (0, errno.EAGAIN)


def _close(
    channel: zmq.Socket[bytes], monitor: zmq.Socket[bytes], context: zmq.Context[zmq.Socket[bytes]], pid: int
) -> None:
    """A forked child leaves its parent's connection alone."""
    if os.getpid() != pid:
        return
    channel.disable_monitor()
    monitor.close(0)
    channel.close(0)
    context.term()
