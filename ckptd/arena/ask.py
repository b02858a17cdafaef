"""The command line's line to a running daemon: one question, one answer, always a deadline.

Unlike the client library it attaches to no job, so it may come and go as it likes. Every failure is a ConnectError that
says which part is missing and what to type next.
"""

import os
import stat
import time
from typing import Any, Self, TypeVar

import msgspec
import zmq

from ckptd import __version__
from ckptd.shared.base.decoding import MALFORMED
from ckptd.shared.base.errors import CkptdError, ConnectError, ProtocolError, of_code
from ckptd.shared.base.ids import JobKey
from ckptd.shared.files import locks
from ckptd.shared.format import arena_paths
from ckptd.shared.protocol.messages import (
    MAX_MESSAGE_NBYTES,
    AskDrain,
    AskForget,
    AskStatus,
    AskStop,
    Done,
    Forgotten,
    Refused,
    Reply,
    Request,
    StatusReply,
    decode_reply,
    encode,
)
from ckptd.shared.protocol.status import SCHEMA, Status
from ckptd.system.config import default_arena

_MAX_STATUS_NBYTES = 64 * MAX_MESSAGE_NBYTES  # a status grows with the ranks of a node, a request does not
_LOOK_MS = 500

R = TypeVar("R", StatusReply, Done, Forgotten)


def ask_status(arena: str, timeout_s: float) -> Status:
    """The full status of the daemon that holds arena. Raises ConnectError."""
    with Daemon(arena, timeout_s) as daemon:
        return daemon.status()


class NoDaemonError(ConnectError):
    """No daemon runs in the arena, or there is no arena."""


class Daemon:
    """A connection to one daemon. Owns its ZeroMQ context; close it, or use ``with``.

    A daemon that restarts meanwhile is found again: a question that went down with the old one is asked again. All of
    them may be: each says what shall be, not what shall be done once more.
    """

    def __init__(self, arena: str, timeout_s: float = 5.0) -> None:
        self.arena = arena
        self.timeout_s = timeout_s
        self._seq = 0
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.immediate = True  # nothing is queued for a daemon that is not there
        self._socket.maxmsgsize = _MAX_STATUS_NBYTES
        self._losses = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._connect(os.path.join(arena, arena_paths.SOCKET))

    def _connect(self, path: str) -> None:
        try:
            self._socket.connect(f"ipc://{path}")
        except zmq.ZMQError as error:
            self.close()
            hint = f"a socket's path has at most {zmq.IPC_PATH_MAX_LEN} bytes: choose a shorter arena"
            raise ConnectError(f"cannot connect to {path}: {error}", hint=hint) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Never blocks."""
        self._socket.disable_monitor()
        self._losses.close(0)
        self._socket.close()
        self._context.term()

    def status(self, *, nodes: bool = False) -> Status:
        """The daemon's present status; nodes: with reports from its jobs' other nodes. Raises ConnectError.

        Nodes that do not answer cost up to a second, and stand in ``silent`` of their job.
        """
        reply = self._ask(AskStatus(seq=self._next_seq(), nodes=nodes), StatusReply)
        if reply.status.schema != SCHEMA:
            raise _other_version(reply.status.version)
        return reply.status

    def drain(self, job: JobKey, *, preempt: bool = False) -> None:
        """Has the newest staged checkpoint of job drained; returns when that is taken over, not when it is done.

        preempt: and has the ranks that ask ``client.preempted`` save at one step.
        """
        self._ask(AskDrain(seq=self._next_seq(), job=job, preempt=preempt), Done)

    def stop(self, *, wait: bool) -> Status:
        """Has the daemon end as SIGTERM does; its present status or, with wait, its last one. Raises ConnectError."""
        return self._ask(AskStop(seq=self._next_seq(), wait=wait), StatusReply).status

    def forget(self, job: JobKey, *, force: bool) -> Forgotten:
        """Has the job's memory given back; returns when it is. Raises CkptdError with the reason when it is refused."""
        return self._ask(AskForget(seq=self._next_seq(), job=job, force=force), Forgotten)

    def _next_seq(self) -> int:
        self._seq += 1
        return self._seq

    def _ask(self, request: Request, kind: type[R]) -> R:
        require_daemon(self.arena)  # a dead daemon is an error at once, not after the timeout of a slow one
        deadline_s = time.monotonic() + self.timeout_s
        self._say(request, deadline_s)
        while (left_ms := _ms_until(deadline_s)) or self._socket.poll(0, zmq.POLLIN):
            if self._socket.poll(min(left_ms, _LOOK_MS), zmq.POLLIN):
                reply = _decode(self._socket.recv())
                # The answer to a question that timed out before may arrive during this one.
                if getattr(reply, "reply_to", None) != request.seq:
                    continue
                if isinstance(reply, kind):
                    return reply
                if isinstance(reply, Refused):
                    raise of_code(reply.code, reply.message, reply.hint)
                raise ProtocolError(f"the daemon answered with {type(reply).__name__}")
            require_daemon(self.arena)  # an answer that takes long may have lost its daemon
            if self._lost():
                self._say(request, deadline_s)
        raise self._no_answer()

    def _say(self, request: Request, deadline_s: float) -> None:
        while not self._socket.poll(min(_ms_until(deadline_s), _LOOK_MS), zmq.POLLOUT):
            if not _ms_until(deadline_s):
                raise self._no_answer()
            require_daemon(self.arena)
        self._socket.send(encode(request))

    def _lost(self) -> bool:
        """Whether a connection ended since the last look, and what was under way on it with it."""
        lost = False
        while self._losses.poll(0):
            self._losses.recv_multipart()
            lost = True
        return lost

    def _no_answer(self) -> CkptdError:
        """Why nobody answered, as far as can be seen from here."""
        pid = require_daemon(self.arena)
        who = f"the daemon (pid {pid})" if pid > 0 else "the daemon"
        if not os.path.exists(os.path.join(self.arena, arena_paths.SOCKET)):
            message = f"{who} holds {self.arena} but has no socket there after {self.timeout_s:g} s"
        else:
            message = f"{who} of {self.arena} did not answer in {self.timeout_s:g} s"
        log = os.path.join(self.arena, arena_paths.LOG)
        return ConnectError(message, hint=f"it may be starting, stopped or busy: see {log}, or give a longer --timeout")


def require_daemon(arena: str) -> int:
    """Pid of the daemon that holds arena, 0 if it is outside our pid namespace. Raises NoDaemonError, ConnectError.

    Only asks for the lock: taking it to see whether it is free could turn away a daemon that starts at this moment.
    """
    start = f"start one with ckptd run --arena {arena}, or name another arena with --arena or CKPTD_ARENA"
    try:
        found = os.stat(arena)
    except OSError:
        found = None
    if found is None or not stat.S_ISDIR(found.st_mode):
        own = default_arena()
        hint = f"--arena or CKPTD_ARENA names another one; ckptd run starts a daemon in {own} where neither does"
        raise NoDaemonError(f"no daemon: there is no arena at {arena}", hint=start if arena == own else hint)
    if os.geteuid() not in (0, found.st_uid):  # somebody may have made one in this user's name
        raise _of_somebody_else(arena)
    try:
        pid = locks.holder(os.path.join(arena, arena_paths.LOCK))
    except PermissionError as error:
        raise _of_somebody_else(arena) from error
    except OSError as error:
        raise ConnectError(f"cannot look at the lock of {arena}: {error.strerror}") from None
    if pid is not None:
        return pid
    if os.path.exists(os.path.join(arena, arena_paths.SOCKET)):
        message = f"no daemon: {arena} has a socket, and its process is gone"
        raise NoDaemonError(message, hint=f"ckptd run --arena {arena} takes over what is staged there")
    raise NoDaemonError(f"no daemon: {arena} is there, but no daemon runs in it", hint=start)


def _of_somebody_else(arena: str) -> ConnectError:
    hint = "each user has a daemon of their own: run this as the user who started it"
    return ConnectError(f"the arena {arena} belongs to somebody else", hint=hint)


def _ms_until(deadline_s: float) -> int:
    return max(0, int((deadline_s - time.monotonic()) * 1000))


def _decode(frame: bytes) -> Reply:
    try:
        return decode_reply(frame)
    except ProtocolError as error:
        version = _version_within(frame)
        raise (_other_version(version) if version else error) from error


def _version_within(frame: bytes) -> str | None:
    """The version in a status that is not of our shape, None if there is none to be found."""
    try:
        raw: Any = msgspec.msgpack.decode(frame)
        return str(raw["status"]["version"])
    except (*MALFORMED, KeyError, TypeError, ValueError):
        return None


def _other_version(version: str) -> ConnectError:
    message = f"the daemon is version {version}, this command is {__version__}"
    return ConnectError(message, hint="use the daemon's environment, or restart the daemon: what is staged stays")
