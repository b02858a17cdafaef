"""A connection to another daemon's bulk server: asks go out ahead, frames come back in their order. Blocks."""

import hmac
import itertools
import socket
from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

from ckptd.shared.base.errors import DamagedError, PeerError
from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.bulk import marks, sockets, wire
from ckptd.shared.bulk.sockets import Cancel
from ckptd.shared.format.integrity import XXH3, Hasher, Integrity

TIMEOUT_S: Final = 20.0
# While more than this comes after what is received, the thread sleeps until so much is there: a wake for every packet
# is dear.
_SURE_NBYTES: Final = 2 << 20
_WAKE_NBYTES: Final = 192 << 10
_NAMES: Final = {wire.PARITY: "its parity", wire.SUMMARY: "a receipt", wire.ORDERS: "orders", wire.LEAVE: "a receipt"}
_counters = itertools.count(1)  # one for all links of this process: no two connections ever have the same


class TurnedAwayError(PeerError):
    """The other side hung up at the hello. It may take a connection a moment later."""


class Address(NamedTuple):
    """The address of a daemon's bulk server, from the control link."""

    host: str
    port: int
    link: str
    secret: bytes


class Connection:
    """To one node, for one thread. Every call ends within timeout_s without progress, or when cancel is cancelled.

    Raises PeerError that names the node when it does not answer, hangs up, or says why it cannot; DamagedError when a
    frame is not what was sent. After either the connection is worth nothing. integrity: as the server has it.
    steady: what is asked for is all there, and comes without a pause; then a thread sleeps until much of it has come.
    """

    def __init__(  # noqa: PLR0913 - keyword-only
        self, node: str, address: Address, cancel: Cancel, *, timeout_s: float = TIMEOUT_S, steady: bool = True,
        integrity: Integrity = XXH3,
    ) -> None:  # fmt: skip
        self.node = node
        self._integrity = integrity
        self._steady = steady
        self._cancel = cancel
        self._pending: deque[wire.Range | None] = deque()  # None: the end of an ask
        self._head = memoryview(bytearray(wire.FRAME.size))
        self._socket = socket.socket(socket.AF_INET6 if ":" in address.host else socket.AF_INET, socket.SOCK_STREAM)
        self._watch = cancel.watching(self._socket)
        self._running: tuple[Hasher | None, bytes] = (None, b"")  # of the frame that is received, and its mark
        self._left = 0  # bytes of the frame that is being received in parts
        self._coming = 0  # bytes that were asked for and not received
        self._seldom = False
        try:
            self._watch.__enter__()
        except BaseException:
            self._socket.close()
            raise
        try:
            self._open(address, timeout_s)
        except BaseException:
            self.close()
            raise

    def _open(self, address: Address, timeout_s: float) -> None:
        counter = next(_counters)
        welcome = memoryview(bytearray(wire.PROOF_NBYTES))
        expected = wire.proof(address.secret, address.link, counter, b"s", self._integrity)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, sockets.BUFFER_NBYTES)
            sockets.prepare(self._socket, timeout_s, timeout_s)
            self._connect(address)
            sockets.send(self._socket, wire.hello(address.secret, address.link, counter, self._integrity))
            if sockets.receive(self._socket, welcome) < len(welcome):
                raise self._gone(
                    "hung up at the hello: it does not know this link (any more), has no room for another connection, "
                    f"or other integrity settings than this one ({self._integrity.label})",
                    TurnedAwayError,
                )
        except ConnectionResetError:  # with this hello unread
            raise self._gone("reset the connection at the hello", TurnedAwayError) from None
        except OSError as error:
            raise self._failed(error) from None
        if not hmac.compare_digest(welcome, expected):
            raise self._gone("does not know the secret of this link")
        self._asks = marks.marks_of(self._integrity, address.secret, address.link, counter, b"c")
        self._frames = marks.marks_of(self._integrity, address.secret, address.link, counter, b"s")

    def _connect(self, address: Address) -> None:
        try:
            self._socket.connect((address.host, address.port))
        except OSError as error:
            where = f"{address.host} port {address.port}"
            text = f"{self._failed(error).message}: it serves bytes at {where}; is that port (bulk_port) let through?"
            raise PeerError("cancelled" if self._cancel.cancelled else text) from None

    def close(self) -> None:
        """Hangs up."""
        self._watch.__exit__(None, None, None)
        self._socket.close()

    def ask(self, job: JobKey, save: SaveId, epoch: int, ranges: Sequence[wire.Range], *, said: bytes = b"") -> None:
        """Sends for ranges. They must all be received, in order, before or after the next ask.

        A checked range takes one receive; any other as many as it likes, none of which goes beyond its end.
        """
        for start in range(0, len(ranges), wire.MAX_RANGES):
            part = list(ranges[start : start + wire.MAX_RANGES])
            try:
                body = wire.encode_ask(wire.Ask(job, save, epoch, part, said))
                sockets.send(self._socket, wire.LENGTH.pack(len(body)), body, marks.mark(self._asks, marks.ASK, body))
            except OSError as error:
                raise self._failed(error) from None
            self._pending.extend(part)
            self._coming += sum(asked.nbytes for asked in part)
            self._pending.append(None)

    def receive(self, into: memoryview) -> None:
        """The next bytes: a whole range, or the next part of one that is not checked."""
        self._coming -= len(into)
        self._wake_seldom(self._steady and self._coming > _SURE_NBYTES)
        if self._left:
            self._part(into)
        else:
            self._begin(into)
        if not self._left and self._pending[0] is None:
            self._pending.popleft()
            self._wake_seldom(False)
            self._frame(wire.DONE, memoryview(b""), 0)
            self._check_mark("the end of an answer")

    def _wake_seldom(self, seldom: bool) -> None:
        """Whether this thread is woken for much only: never while little may be all that still comes."""
        if self._seldom != seldom:
            self._seldom = seldom
            sockets.wake_at(self._socket, _WAKE_NBYTES if seldom else 1)

    def _begin(self, into: memoryview) -> None:
        """The next frame's head and first bytes, in one call."""
        asked = self._pending.popleft()
        if asked is None:
            raise AssertionError("nothing was asked for")
        self._frame(wire.DATA, into, asked.nbytes, checked=asked.checked)
        self._left = asked.nbytes - len(into)
        if asked.checked and self._left:
            raise DamagedError(
                f"node {self.node}: bytes of {_what(asked)} were asked for in parts, and are checked whole"
            )
        self._asked = asked
        if not self._left:
            self._check_mark(_what(asked))

    def _check_mark(self, what: str) -> None:
        running, found = self._running
        if not marks.is_right(found, running):
            raise DamagedError(f"node {self.node}: bytes of {what} were damaged on the wire, or are not from that node")

    def _part(self, into: memoryview) -> None:
        try:
            got = sockets.receive(self._socket, into)
        except OSError as error:
            raise self._failed(error) from None
        if got < len(into):
            raise self._gone("hung up")
        self._left -= len(into)
        if self._running[0] is not None:
            self._running[0].update(into)
        if not self._left:
            self._check_mark(_what(self._asked))

    def _frame(self, kind: bytes, into: memoryview, length: int, *, checked: bool = False) -> None:
        """Head of the next frame, which must be of the kind and length; into gets its first bytes."""
        try:
            got = sockets.receive(self._socket, self._head, into)
        except OSError as error:
            raise self._failed(error) from None
        size = len(self._head)
        found, nbytes, said = wire.FRAME.unpack(self._head) if got >= size else (b"", 0, b"")
        if found == wire.FAIL:
            raise self._refused(nbytes, into[: got - size], said)
        if got < size + len(into):
            raise self._gone("hung up")
        if (found, nbytes) != (kind, length):
            raise DamagedError(f"node {self.node}: a frame of {found!r} and {nbytes} bytes in place of {length}")
        running = self._frames.begin(kind, length, checked=checked)
        if running is not None:
            running.update(into)
        self._running = running, bytes(said)

    def _refused(self, nbytes: int, got: memoryview, mark: bytes) -> PeerError | DamagedError:
        """What the other side said. The first bytes of it are where data were expected."""
        text = bytearray(got[:nbytes])
        rest = memoryview(bytearray(max(0, min(nbytes, wire.MAX_FAIL_NBYTES) - len(text))))
        try:
            sockets.receive(self._socket, rest)
        except OSError as error:
            return self._failed(error)
        raw = bytes(text) + bytes(rest)
        running = self._frames.begin(wire.FAIL, len(raw))
        if running is not None:
            running.update(memoryview(raw))
        if not marks.is_right(mark, running):
            return DamagedError(f"node {self.node}: a refusal that is not from that node")
        said = raw.decode("utf-8", "replace")
        said = "".join(char if char.isprintable() else "?" for char in said)  # it goes into logs and onto terminals
        return PeerError(f"node {self.node}: {said}")

    def _gone(self, what: str, kind: type[PeerError] = PeerError) -> PeerError:
        return PeerError("cancelled") if self._cancel.cancelled else kind(f"node {self.node} {what}")

    def _failed(self, error: OSError) -> PeerError:
        if isinstance(error, BlockingIOError):
            return self._gone("does not answer")
        return self._gone(f"cannot be reached: {error.strerror or error}")


def _what(asked: wire.Range) -> str:
    return _NAMES.get(asked.rank, f"rank {asked.rank} at {asked.offset}")
