"""The connection to the daemon: requests with deadlines, and pushes. Not thread-safe."""

import errno
import os
import socket
import time
import weakref
from collections.abc import Callable

import zmq
from zmq.utils.monitor import recv_monitor_message

from ckptd.shared.base.errors import ConnectError, WaitTimeoutError, of_code
from ckptd.shared.files import locks
from ckptd.shared.format import arena_paths
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
from ckptd_client._local.processes import process_of

Push = SlotGranted | SlotsRefused | Progress | Notice
_TURN_S = 0.1  # between two checks of a wait whether a more urgent caller wants the connection
_DETACHED = "detached"  # the code of a refusal: this daemon does not know this rank
_LOST = zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED


class ChannelLostError(ConnectError):
    """The daemon ended; it may or may not have carried out the request."""

    code = "lost"


class PreemptedError(Exception):
    """A more urgent caller wants the connection; the daemon may or may not have carried out the request."""


def _stay() -> None:
    """Gives way to no other caller."""


class Channel:
    """A connection to one daemon process. Once that ends, ``lost`` stays true: create a new Channel."""

    def __init__(self, socket_path: str, on_push: Callable[[Push], None], give_way: Callable[[], None] = _stay) -> None:
        """give_way: called ten times a second during a wait; it may raise to end the wait."""
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
        # Also if it is dropped without close: ZeroMQ's context would wait for ever for an open socket.
        self._finalizer = weakref.finalize(self, _close, self._socket, self._monitor, self._context, os.getpid())
        self._seq = 0
        self._answers: dict[int, Reply] = {}
        self.connected = False
        self.lost = False

    def open(self, deadline: float) -> bool:
        """Waits until a daemon listens, or until deadline (time.monotonic). Whether one listens."""
        while not self.connected and not self.lost and self._turn(deadline):
            pass
        return self.connected

    def request(self, make: Callable[[int], Request], deadline: float | None, limit: str = "") -> Reply:
        """Sends make(seq) and waits for its answer. deadline None: waits until the daemon ends.

        limit: the setting with the deadline, for the error; empty: the caller's own timeout. Raises the error of a
        refusal, ChannelLostError if the daemon ends, WaitTimeoutError at the deadline.
        """
        self._seq += 1
        seq, began = self._seq, time.monotonic()
        self._answers.clear()  # late answers to earlier requests
        if self.lost:
            raise ChannelLostError(f"the daemon behind {self._path} ended")
        self._socket.send(encode(make(seq)))
        while seq not in self._answers:
            if not self._turn(deadline) or (deadline is not None and time.monotonic() > deadline + _TURN_S):
                raise silent_daemon(os.path.dirname(self._path), time.monotonic() - began, limit)
            if self.lost and seq not in self._answers:
                raise ChannelLostError(f"the daemon behind {self._path} ended")
        answer = self._answers.pop(seq)
        if isinstance(answer, Refused) and answer.code == _DETACHED:
            # The daemon ended between two calls, and the socket has connected to the next one by itself.
            self.lost = True
            raise ChannelLostError(f"the daemon behind {self._path} is another one now")
        if isinstance(answer, Refused):
            raise of_code(answer.code, answer.message, answer.hint)
        return answer

    def pump(self, deadline: float) -> bool:
        """Waits for pushes and delivers them. Returns after a push or the end of the daemon, False at the deadline."""
        return not self.lost and self._turn(deadline)

    def _turn(self, deadline: float | None) -> bool:
        """Waits once and handles all that arrived. False if nothing arrived until the deadline."""
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
            self._on_monitor_event()
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
                for push in reply.known:  # at once: later pushes are newer
                    self._on_push(push)
            # 0: the daemon could not decode the request; there is one request at a time
            self._answers[reply.reply_to or self._seq] = reply

    def _on_monitor_event(self) -> None:
        event = recv_monitor_message(self._monitor)["event"]
        if event == zmq.EVENT_CONNECTED:
            self.connected = True
        elif event & _LOST:
            self._receive()  # its last messages
            self.lost = True

    def close(self) -> None:
        """Closes the connection without waiting for queued messages."""
        self._finalizer()


def channel_listens(socket_path: str) -> bool:
    """Whether a daemon has the socket, not whether it answers. Takes microseconds, never blocks."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        return probe.connect_ex(socket_path) in (0, errno.EAGAIN)


def _close(
    channel: zmq.Socket[bytes], monitor: zmq.Socket[bytes], context: zmq.Context[zmq.Socket[bytes]], pid: int
) -> None:
    """Closes the connection, but not in a forked child."""
    if os.getpid() != pid:
        return
    channel.disable_monitor()
    monitor.close(0)
    channel.close(0)
    context.term()


def silent_daemon(arena: str, waited_s: float, limit: str) -> WaitTimeoutError:
    """The error of a request without an answer. limit: the setting with the timeout; empty: the caller's timeout."""
    daemon = process_of(locks.holder(os.path.join(arena, arena_paths.LOCK)))
    within = (
        f"did not answer in the last {waited_s:.3g} s of {limit}"
        if limit
        else f"did not answer within {waited_s:.3g} s"
    )
    text = f"the daemon behind {os.path.join(arena, arena_paths.SOCKET)}"
    if daemon is None:  # in another pid namespace
        return WaitTimeoutError(f"{text} {within}", hint=f"see what it does: ckptd status --arena {arena}")
    go_on = f"kill -CONT {daemon.pid}" if daemon.is_stopped else f"its log: tail {arena}/{arena_paths.LOG}"
    hint = f"{go_on}; or kill -KILL {daemon.pid}: what is staged outlives it, and the next daemon has it"
    return WaitTimeoutError(f"{text} (pid {daemon.pid}, {daemon.condition}) {within}", hint=hint)
