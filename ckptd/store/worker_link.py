"""The daemon's end of one store worker: has it started, speaks to it without ever blocking, ends it."""

import os
import signal
import socket
import subprocess
import threading
from collections import deque
from collections.abc import Callable

from ckptd.shared.base.errors import CkptdError, ProtocolError
from ckptd.shared.files.child_process import command, environment
from ckptd.shared.format.integrity import XXH3, Integrity, Keyed
from ckptd.store.messages import (
    DAEMON,
    WORKER,
    FrameReader,
    Order,
    Reply,
    UseKey,
    decode_reply,
    encode_frame,
    hello_frame,
)
from ckptd.system.niceness import Niceness

_RECEIVE_NBYTES = 1 << 20
_AS_WE_ARE = Niceness()
Start = Callable[[Callable[[], None]], object]

# With vfork this whole process stands still until the worker's interpreter is read, which may hang with its mount.
# Documented: https://docs.python.org/3/library/subprocess.html#disabling-use-of-vfork-or-posix-spawn
subprocess._USE_VFORK = False  # type: ignore[misc]  # noqa: SLF001


def _popen(fd: int, niceness: Niceness, store: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command("ckptd.store.worker", str(fd), str(os.getpid()), *map(str, niceness), store),
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=[fd],
        close_fds=True,
    )


def _at_once(work: Callable[[], None]) -> None:
    work()


class WorkerDiedError(CkptdError):
    """The worker is gone, or not to be understood; what it had not answered is to be asked again of a new one."""

    code = "worker-died"


class StoreLink:
    """One worker process. Not for use by several threads.

    start carries the call out that starts the process, now (the default) or in a thread: that reads the interpreter
    from where it is installed, which may hang. The worker is killed when the thread that started it ends. What is sent
    before it runs waits in the socket. Owns the process and the socket; after kill(), or a WorkerDiedError, keep it
    until poll() says that the process is gone.
    """

    def __init__(
        self, store: str, *, niceness: Niceness = _AS_WE_ARE, start: Start = _at_once, integrity: Integrity = XXH3
    ) -> None:
        self.store = store
        self._sock, theirs = socket.socketpair()
        self._sock.setblocking(False)
        self._frames = FrameReader(decode_reply, theirs=WORKER, ours=DAEMON)
        self._outgoing = deque([memoryview(hello_frame())])
        self._settling = threading.Lock()  # of the next three, between this thread and the one that starts
        self._process: subprocess.Popen[bytes] | None = None
        self._problem = ""  # why it was not started
        self._unwanted = False
        if isinstance(integrity, Keyed):  # not on its command line, which everybody sees
            self.send(UseKey(integrity.key))
        start(lambda: self._start(theirs, niceness))

    def _start(self, theirs: socket.socket, niceness: Niceness) -> None:
        process, problem = None, ""
        try:
            if self._unwanted:
                problem = "it was not wanted any more"
            else:
                process = _popen(theirs.fileno(), niceness, self.store)
        except Exception as error:  # noqa: BLE001 - whatever it is, callers that wait for answers must learn it
            problem = str(error) or repr(error)
        finally:
            with self._settling:
                self._process, self._problem = process, problem
                if process is not None and self._unwanted:
                    process.kill()
            theirs.close()  # after that: a reader that finds the end of the worker in the socket finds its cause here

    @property
    def pid(self) -> int:
        """Process id of the worker, 0 while it is being started."""
        return self._process.pid if self._process is not None else 0

    def fileno(self) -> int:
        """Descriptor to poll; -1 after kill()."""
        return self._sock.fileno()

    @property
    def wants_write(self) -> bool:
        """Whether to poll for room to write, and call on_writable."""
        return bool(self._outgoing)

    def send(self, request: Order) -> None:
        """Queues the request and writes what can be written now. A dead worker shows in receive, not here."""
        self._outgoing.append(memoryview(encode_frame(request)))
        self.on_writable()

    def on_writable(self) -> None:
        """Writes as much of the queue as goes."""
        while self._outgoing:
            head = self._outgoing[0]
            try:
                sent = self._sock.send(head)
            except BlockingIOError:
                return
            except OSError:
                self._outgoing.clear()
                return
            if sent < len(head):
                self._outgoing[0] = head[sent:]
            else:
                self._outgoing.popleft()

    def receive(self) -> list[Reply]:
        """Replies that are complete by now, maybe none.

        Raises WorkerDiedError once all of a dead worker's are read, and for one of another version, which it names.
        """
        replies: list[Reply] = []
        while True:
            try:
                data = self._sock.recv(_RECEIVE_NBYTES)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                if replies:
                    break  # the next call finds the end again
                raise WorkerDiedError(f"the worker of store {self.store} died{self._cause()}")
            try:
                replies += self._frames.feed(data)
            except ProtocolError as error:
                raise WorkerDiedError(f"the worker of store {self.store}: {error.message}", hint=error.hint) from error
        return replies

    def _cause(self) -> str:
        if self._process is None:
            return f": it could not be started: {self._problem}"
        status = self._process.poll()
        if status is None:
            return ""
        return f" of signal {signal.Signals(-status).name}" if status < 0 else f" with exit status {status}"

    def kill(self) -> None:
        """Ends the worker without waiting: one that hangs in the file system goes when its call returns."""
        with self._settling:
            self._unwanted = True
            if self._process is not None:
                self._process.kill()
        self._sock.close()
        self._outgoing.clear()

    def poll(self) -> int | None:
        """Exit status once the process is gone and reaped, negative for a signal; None before. 127: it never was."""
        with self._settling:
            if self._process is not None:
                return self._process.poll()
            return 127 if self._problem else None
