"""What a node of the tree asks its parent: up goes what its subtree wants, down come the orders for it.

All of it ends by a deadline. A node that has no orders by then says that it leaves, and is the root of its own subtree.
"""

import contextlib
import logging
import time
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from ckptd.shared.base.errors import CkptdError, PeerError
from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.bulk import wire
from ckptd.shared.bulk.client import Address, Connection, TurnedAwayError
from ckptd.shared.bulk.sockets import Cancel
from ckptd.shared.format.integrity import Integrity
from ckptd.shared.protocol.read_tree import ExchangeAddress, Place
from ckptd_client._load.shared_read import found as found_by_ranks
from ckptd_client._load.shared_read.found import Found
from ckptd_client._load.shared_read.plan import Edges, Orders, Summary

log = logging.getLogger("ckptd_client")
CHILD: Final = ".child"  # after the number of the node, in the name of a link to its parent
LENGTH_NBYTES: Final = 8  # before the orders
_PART_NBYTES: Final = wire.MAX_ASK_NBYTES // 2  # of a summary, in one ask
_AGAIN_S: Final = 0.2  # until a parent that had no room for a connection is asked again
_LEAVE_S: Final = 2.0  # for a parent that may not answer at all


class Parent(NamedTuple):
    """A node's parent in the tree."""

    job: JobKey
    save: SaveId
    place: Place  # of the node that asks
    address: ExchangeAddress
    integrity: Integrity

    def ask(self, summary: Summary, found: Sequence[Found], until: float) -> Orders:
        """The orders for the subtree; none without an answer: then it reads by itself. until: time.monotonic().

        found: what ranks of the subtree found, as merged gives it.
        """
        cancel, seconds = Cancel(), until - time.monotonic()
        with cancel.limited(seconds):
            try:
                return self._ask(summary, found_by_ranks.pack(found), cancel)
            except (CkptdError, OSError, ValueError, msgspec.DecodeError) as error:
                why = f"{self._name} gave no orders in {seconds:.0f} s" if cancel.cancelled else str(error)
        log.warning("ckptd: %s: this node and those below it read the store without the others", why)
        self._leave()
        return Orders(Edges.none(), {})

    def _ask(self, summary: Summary, found: bytes, cancel: Cancel) -> Orders:
        with contextlib.closing(self._connect(cancel)) as connection:
            said, total = summary.pack(), len(summary.column)
            for at in range(0, len(said), _PART_NBYTES):
                self._say(connection, wire.SUMMARY, at, said[at : at + _PART_NBYTES])
            length = memoryview(bytearray(LENGTH_NBYTES))
            connection.ask(
                self.job, self.save, 0, [wire.Range(wire.ORDERS, 0, LENGTH_NBYTES, checked=True)], said=found
            )
            connection.receive(length)
            nbytes, most = int.from_bytes(length, "little"), Orders.most_nbytes(total, self.place.nodes)
            if nbytes > most:
                raise PeerError(
                    f"{self._name} has orders of {nbytes} bytes for {total} blocks, at most {most} are taken"
                )
            raw = memoryview(bytearray(nbytes))
            ranges = [
                wire.Range(wire.ORDERS, LENGTH_NBYTES + at, min(wire.MAX_FRAME_NBYTES, nbytes - at), checked=True)
                for at in range(0, nbytes, wire.MAX_FRAME_NBYTES)
            ]
            connection.ask(self.job, self.save, 0, ranges, said=found)
            for one in ranges:
                start = one.offset - LENGTH_NBYTES
                connection.receive(raw[start : start + one.nbytes])
            return Orders.unpack(bytes(raw), total, self.place.subtree)

    def _connect(self, cancel: Cancel, seconds: float = 60.0) -> Connection:
        """Tries until it is cancelled, as long as there is no room for the connection."""
        host, port, secret = self.address.host, self.address.port, self.address.secret
        address = Address(host, port, f"{self.place.number}{CHILD}", secret)
        while True:
            try:
                return Connection(
                    self._name, address, cancel, timeout_s=seconds, steady=False, integrity=self.integrity
                )
            except TurnedAwayError:
                time.sleep(_AGAIN_S)
                cancel.check()

    def _say(self, connection: Connection, what: int, offset: int = 0, said: bytes = b"") -> None:
        connection.ask(self.job, self.save, 0, [wire.Range(what, offset, 0, checked=False)], said=said)
        connection.receive(memoryview(b""))

    def _leave(self) -> None:
        """The parent waits for nothing of the subtree, and keeps no block for it."""
        cancel = Cancel()
        with (
            contextlib.suppress(CkptdError, OSError),
            cancel.limited(_LEAVE_S),
            contextlib.closing(self._connect(cancel, _LEAVE_S)) as connection,
        ):
            self._say(connection, wire.LEAVE)

    @property
    def _name(self) -> str:
        return f"{self.address.host}:{self.address.port}"
