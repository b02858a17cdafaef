"""Where the bytes of segments and parity come from: another node's bulk server, or this node's own arena. Blocks."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from ckptd.arena.arena import Arena
from ckptd.parity.served import open_served
from ckptd.shared.base.errors import DamagedError, PeerError
from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.bulk import wire
from ckptd.shared.bulk.client import TIMEOUT_S, Address, Connection
from ckptd.shared.bulk.server import Served
from ckptd.shared.bulk.sockets import Cancel
from ckptd.shared.format.integrity import Integrity

AddressOf = Callable[[str], tuple[str, int, str, bytes] | None]  # what an Address is made of


class Source(Protocol):
    """Ranges asked for, received in that order. Raises PeerError or DamagedError that name the node."""

    node: str

    def ask(self, job: JobKey, save: SaveId, epoch: int, ranges: Sequence[wire.Range]) -> None:
        """Asks ahead."""

    def receive(self, into: memoryview) -> None:
        """The bytes of the next range, or the next part of one that is not checked."""

    def close(self) -> None:
        """Gives back what it holds."""


class Opener(Protocol):
    """Sources by node, and whether the work is broken off."""

    @property
    def cancel(self) -> Cancel:
        """Of the work."""

    @property
    def integrity(self) -> Integrity:
        """How the segments are proved."""

    def open(self, node: str) -> Source:
        """Raises PeerError when the node cannot be reached."""


class LocalSource:
    """This node's own slots and parity."""

    def __init__(self, node: str, arena: Arena) -> None:
        self.node = node
        self._arena = arena
        self._pending: deque[tuple[wire.Range, Served]] = deque()
        self._done = 0  # bytes of the first that is pending
        self._open: dict[tuple[SaveId, int, int], Served] = {}

    def ask(self, job: JobKey, save: SaveId, epoch: int, ranges: Sequence[wire.Range]) -> None:
        """Opens what they are of."""
        ask = wire.Ask(job, save, epoch, [])
        for asked in ranges:
            key = save, epoch, asked.rank
            if key not in self._open:
                self._open[key] = open_served(self._arena, ask, asked.rank)
            self._pending.append((asked, self._open[key]))

    def receive(self, into: memoryview) -> None:
        """Copies the bytes of the next range, or part of it."""
        asked, served = self._pending[0]
        offset = asked.offset + self._done
        self._done += len(into)
        if self._done == asked.nbytes:
            self._pending.popleft()
            self._done = 0
        if asked.checked:
            try:
                served.check(asked.offset, asked.nbytes)
            except DamagedError as error:
                raise DamagedError(f"node {self.node}: {error.message}") from None
        if asked.nbytes:
            into[:] = served.view(offset, len(into))
        if not served.still():
            raise PeerError(f"node {self.node}: what was being read is no longer there")

    def close(self) -> None:
        """Lets go of the memory."""
        self._open.clear()


class Sources:
    """Opens sources for one piece of work. Each belongs to one thread."""

    def __init__(
        self, own: str, arena: Arena, address_of: AddressOf, cancel: Cancel, *, timeout_s: float = TIMEOUT_S
    ) -> None:
        self.cancel = cancel
        self.integrity = arena.integrity
        self._own, self._arena, self._address_of, self._timeout_s = own, arena, address_of, timeout_s

    def open(self, node: str) -> Source:
        """Raises PeerError when the node cannot be reached."""
        if node == self._own:
            return LocalSource(node, self._arena)
        address = self._address_of(node)
        if address is None:
            raise PeerError(f"node {node} cannot be reached: no link to its daemon")
        return Connection(node, Address(*address), self.cancel, timeout_s=self._timeout_s, integrity=self.integrity)


def look(  # noqa: PLR0913, PLR0917 - what to look at
    sources: Opener, node: str, job: JobKey, save: SaveId | None, ranges: Sequence[wire.Range], epoch: int = 0
) -> None:
    """Has the node check its own copy of these bytes, ranges of length 0. Raises DamagedError with what it finds."""
    if save is None:
        return
    source = sources.open(node)
    try:
        source.ask(job, save, epoch, ranges)
        for _ in ranges:
            source.receive(memoryview(b""))
    except PeerError as error:
        raise DamagedError(error.message) from None
    finally:
        source.close()
