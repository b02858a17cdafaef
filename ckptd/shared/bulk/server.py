"""Serves byte ranges of sealed slots and parity to the daemons of other nodes: a thread that accepts, one for each."""

import hmac
import logging
import socket
import threading
import time
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol

from ckptd.shared.base.errors import CkptdError, PeerError, ProtocolError
from ckptd.shared.base.log_line import line
from ckptd.shared.bulk import marks, sockets, wire
from ckptd.shared.format.integrity import XXH3, Integrity

log = logging.getLogger("ckptd")
_HELLO_TIMEOUT_S: Final = 5.0  # from the connection to its last byte
_IDLE_TIMEOUT_S: Final = 120.0  # between two asks
_SEND_TIMEOUT_S: Final = 60.0  # longer than a client's patience with the slowest of its servers
_MAX_STRANGERS: Final = 32
_MAX_PER_LINK: Final = 32
_PAUSE_S: Final = 0.1  # when there is no descriptor or thread left
_TOLD_S: Final = 60.0  # how long that is reported, and how often it is logged
_MAX_UNREAD: Final = 8  # asks' worth of bytes, after a refusal


class Served(Protocol):
    """Bytes that may be asked for, open as long as somebody holds it."""

    @property
    def nbytes(self) -> int:
        """How many there are."""

    def view(self, offset: int, nbytes: int) -> memoryview:
        """The bytes, unchecked."""

    def check(self, offset: int, nbytes: int) -> None:
        """Compares the blocks that they are of with their digests, each at most once. Raises DamagedError."""

    def still(self) -> bool:
        """Whether it is what it was when it was opened."""


Open = Callable[[str, wire.Ask, int], Served]  # link, ask, rank or PARITY; raises PeerError when it is not for it
Secret = Callable[[str], bytes | None]


class _Guest(NamedTuple):
    """An authenticated client of a link, and the marks of both directions."""

    link: str
    asks: marks.Marks
    frames: marks.Marks


class BulkServer:
    """Listens from start to close. secret_of is called from threads: the secret of a link, None for a stranger.

    ended is too: the last connection of the link is over, after whatever was asked for over it; no other begins
    meanwhile, so it must be quick. integrity: of all that come; with a key every ask and every frame has a MAC.
    unused_s: closes itself unless use is called by then, in seconds after the last connection or the start.
    """

    def __init__(  # noqa: PLR0913 - keyword-only
        self,
        open_served: Open,
        secret_of: Secret,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        ended: Callable[[str], None] = lambda _link: None,
        integrity: Integrity = XXH3,
        unused_s: float | None = None,
    ) -> None:
        self._integrity = integrity
        self._open = open_served
        self._ended = ended
        self._secret_of = secret_of
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=64)
        # Inherited by what is accepted; after the connection it would be too late for the window's scale.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, sockets.BUFFER_NBYTES)
        self.host, self.port = self._socket.getsockname()[:2]
        self._socket.settimeout(unused_s)  # of accept alone: what it returns blocks
        self._used = unused_s is None
        self._lock = threading.Lock()
        self._strangers: dict[socket.socket, None] = {}  # the oldest first
        self._peers: dict[str, set[socket.socket]] = {}
        self._counters: dict[str, tuple[bytes, wire.Counters]] = {}
        self._closed = False
        self._trouble = ("", float("-inf"))  # what kept it from serving somebody, and when
        self._thread = threading.Thread(target=self._accept, name="bulk-accept", daemon=True)

    def start(self) -> None:
        """Begins to accept."""
        self._thread.start()

    def use(self) -> bool:
        """It stays open until close. False if it is closed."""
        with self._lock:
            self._used = True
            return not self._closed

    def close(self) -> None:
        """Ends every connection. Does not wait for their threads."""
        with self._lock:
            self._closed = True
            connections = [*self._strangers, *(c for peers in self._peers.values() for c in peers)]
        sockets.close_both_ways(self._socket)  # wakes accept
        self._socket.close()
        for connection in connections:
            sockets.close_both_ways(connection)

    def _accept(self) -> None:
        while True:
            try:
                connection, address = self._socket.accept()
            except OSError as error:
                if self._closed:
                    return
                if isinstance(error, TimeoutError):
                    self._close_unused()
                    continue
                self._tell(f"a connection could not be accepted: {error}")
                time.sleep(_PAUSE_S)
                continue
            with self._lock:
                if len(self._strangers) >= _MAX_STRANGERS:  # a real client has sent its greeting by now
                    oldest = next(iter(self._strangers))
                    del self._strangers[oldest]
                    sockets.close_both_ways(oldest)
                self._strangers[connection] = None
            try:
                threading.Thread(target=self._serve, args=(connection, address), name="bulk", daemon=True).start()
            except RuntimeError as error:
                with self._lock:
                    self._strangers.pop(connection, None)
                self._tell(f"no thread for a connection: {error}")
                connection.close()
                time.sleep(_PAUSE_S)

    def _close_unused(self) -> None:
        with self._lock:
            unused = not self._used and not self._closed
            self._closed = self._closed or unused
        if unused:
            log.warning(line("bulk port closed", port=self.port, problem="no read used it in time"))
            self.close()

    def _tell(self, problem: str) -> None:
        now = time.monotonic()
        if now >= self._trouble[1] + _TOLD_S or problem != self._trouble[0]:
            log.warning(line("bulk", problem=problem))
        self._trouble = problem, now

    def problem(self) -> str:
        """What keeps it from serving, empty when nothing did in the last minute. From any thread."""
        problem, when = self._trouble
        if time.monotonic() >= when + _TOLD_S:
            problem = ""
        return f"other nodes may be unable to fetch bytes here: {problem}" if problem else ""

    def _serve(self, connection: socket.socket, address: tuple[str, ...]) -> None:
        link = None
        try:
            sockets.prepare(connection, _HELLO_TIMEOUT_S, _HELLO_TIMEOUT_S)
            guest = self._greet(connection)
            link = guest.link
            sockets.patience(connection, _IDLE_TIMEOUT_S, _SEND_TIMEOUT_S)
            while self._answer(connection, guest):
                pass
        except (OSError, CkptdError) as error:
            level = logging.INFO if link is not None else logging.DEBUG  # anybody may come, and the log is memory
            log.log(level, line("bulk connection ended", link=link or "none", address=address[0], error=error))
        finally:
            with self._lock:
                self._strangers.pop(connection, None)
                others = self._peers.get(link or "", set())
                others.discard(connection)
                if link is not None and not others:
                    self._ended(link)
            connection.close()

    # --- the handshake

    def _greet(self, connection: socket.socket) -> _Guest:
        """The client that proved to know the secret of a link."""
        magic, padded, counter, proof = wire.HELLO.unpack(_hear_hello(connection))
        link = padded.rstrip(b"\0").decode("ascii", "replace")
        integrity = self._integrity
        if magic != wire.magic_of(integrity) and magic in {wire.MAGIC, wire.MAGIC_KEYED}:
            raise PeerError(f"a hello of a node with other integrity settings: this one has {integrity.label}")
        secret = self._secret_of(link) if magic == wire.magic_of(integrity) else None
        if secret is None or not hmac.compare_digest(proof, wire.proof(secret, link, counter, b"c", integrity)):
            raise PeerError("a hello of an unknown version or link, or a wrong secret or key")
        with self._lock:
            self._forget_former()
            known, counters = self._counters.get(link, (b"", None))
            if counters is None or known != secret:
                counters = wire.Counters()
                self._counters[link] = secret, counters
            if not counters.take(counter):
                raise PeerError(f"a hello of {link} that was used before")
            peers = self._peers.setdefault(link, set())
            if len(peers) >= _MAX_PER_LINK:
                raise PeerError(f"{link} has {len(peers)} connections already")
            self._strangers.pop(connection, None)
            peers.add(connection)
        sockets.send(connection, wire.proof(secret, link, counter, b"s", integrity))
        return _Guest(link, *(marks.marks_of(integrity, secret, link, counter, side) for side in (b"c", b"s")))

    def _forget_former(self) -> None:
        """Links that are over: a counter of theirs is worth nothing without the secret."""
        for link in [link for link in self._counters if self._secret_of(link) is None]:
            del self._counters[link]
            for connection in self._peers.pop(link, ()):
                sockets.close_both_ways(connection)

    # --- asks

    def _answer(self, connection: socket.socket, guest: _Guest) -> bool:
        """Answers one ask; False at the end of the stream."""
        head = memoryview(bytearray(wire.LENGTH.size))
        got = sockets.receive(connection, head)
        if got < len(head):
            return False
        (nbytes,) = wire.LENGTH.unpack(head)
        try:
            if nbytes > wire.MAX_ASK_NBYTES:
                raise ProtocolError(f"an ask of {nbytes} bytes, at most {wire.MAX_ASK_NBYTES} are taken")
            body = memoryview(bytearray(nbytes))
            mark = memoryview(bytearray(wire.MARK_NBYTES if self._integrity.keyed else 0))
            if sockets.receive(connection, body, mark) < nbytes + len(mark):
                return False
            if not hmac.compare_digest(mark, marks.mark(guest.asks, marks.ASK, body)):
                raise ProtocolError("an ask that is not from that node")
            self._send(connection, guest, wire.decode_ask(bytes(body)))
        except CkptdError as error:
            text = error.message.encode()[: wire.MAX_FAIL_NBYTES]
            sockets.send(
                connection, wire.FRAME.pack(wire.FAIL, len(text), marks.mark(guest.frames, wire.FAIL, text)), text
            )
            _hear_out(connection)
            raise
        return True

    def _send(self, connection: socket.socket, guest: _Guest, ask: wire.Ask) -> None:
        opened: dict[int, Served] = {}
        for rank, offset, nbytes, checked in map(_fields, ask.ranges):
            served = opened.get(rank)
            if served is None:
                served = opened[rank] = self._open(guest.link, ask, rank)
            if offset + nbytes > served.nbytes:
                raise ProtocolError(f"bytes {offset} to {offset + nbytes} of {served.nbytes}")
            view = served.view(offset, nbytes)
            if checked:
                served.check(offset, nbytes)
            mark = marks.mark(guest.frames, wire.DATA, view, checked=checked)
            sockets.send(connection, wire.FRAME.pack(wire.DATA, nbytes, mark), view)
        gone = [rank for rank, served in opened.items() if not served.still()]
        if gone:
            raise PeerError(f"{ask.save} of {'the parity' if gone[0] == wire.PARITY else f'rank {gone[0]}'} was freed")
        sockets.send(connection, wire.FRAME.pack(wire.DONE, 0, marks.mark(guest.frames, wire.DONE)))


def _hear_hello(connection: socket.socket) -> bytearray:
    """All of it by one deadline, however it trickles in. Raises PeerError, OSError."""
    said, got, deadline = bytearray(wire.HELLO.size), 0, time.monotonic() + _HELLO_TIMEOUT_S
    while got < len(said):
        left = deadline - time.monotonic()
        if left <= 0:
            raise PeerError("its hello took too long")
        sockets.patience(connection, max(left, 0.01), _HELLO_TIMEOUT_S)
        nbytes = connection.recv_into(memoryview(said)[got:])
        if not nbytes:
            raise PeerError("it hung up before its hello")
        got += nbytes
    return said


def _hear_out(connection: socket.socket) -> None:
    """Lets the other side read what was sent: a close while asks wait unread would take it back."""
    connection.shutdown(socket.SHUT_WR)
    sockets.patience(connection, _HELLO_TIMEOUT_S, _HELLO_TIMEOUT_S)
    waste = memoryview(bytearray(wire.MAX_ASK_NBYTES))
    for _ in range(_MAX_UNREAD):
        if sockets.receive(connection, waste) < len(waste):
            break


def _fields(asked: wire.Range) -> tuple[int, int, int, bool]:
    return asked.rank, asked.offset, asked.nbytes, asked.checked
