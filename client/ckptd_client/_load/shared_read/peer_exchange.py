"""Nodes that read the same checkpoint send each other blocks: one of them reads each block from the store.

The first rank of a node opens a peer exchange for the time of a read: a server of the daemons' bulk protocol. The nodes
form a tree. Each sends its parent which blocks its subtree wants, and receives which of them come from which nodes,
and which it sends to which (plan.py), with the addresses. Then each sends blocks in their order as soon as it has
them, whether from the store or from another node. A node whose source fails reads the store in its place, and sends on.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np

from ckptd.shared.base.errors import CkptdError, PeerError
from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.bulk import wire
from ckptd.shared.bulk.client import Address, Connection
from ckptd.shared.bulk.server import BulkServer, Served
from ckptd.shared.bulk.sockets import Cancel
from ckptd.shared.format.integrity import XXH3, Integrity
from ckptd.shared.protocol.read_tree import ExchangeAddress, Place
from ckptd_client._load.reader import Buffer
from ckptd_client._load.shared_read.node_group import NodeGroup, Plan
from ckptd_client._load.shared_read.plan import Edges, Orders, Summary, column_of, join
from ckptd_client._load.shared_read.schedule import Blocks, SharedBlock

log = logging.getLogger("ckptd_client")
NODES_JOIN_S: Final = 10.0  # for the leaves of the tree
LEVEL_S: Final = 2.0  # more for each level above
_AGAIN_S: Final = 0.2  # until a parent that did not answer is asked again
_ORDERS = wire.PARITY  # in place of an image's rank: a subtree's summary goes up, and its orders come down
_CHILD: Final = ".child"  # after the number of the node, in the name of a link to its parent; others get blocks
_LENGTH_NBYTES: Final = 8  # before the orders
Fill = Callable[[SharedBlock, Buffer], None]  # reads a block from the store into a buffer, and checks it
Check = Callable[[int, memoryview], None]  # a block's number and bytes; raises DamagedError


class PeerExchange:
    """A server for the job's other nodes in one read, open until close. host: this node's address for them.

    Raises OSError.
    """

    def __init__(self, host: str, job: JobKey, integrity: Integrity = XXH3) -> None:
        secret = os.urandom(32)
        self._job, self._secret, self._integrity = job, secret, integrity
        self._changed = threading.Condition()  # of what follows
        self._place: Place | None = None  # once this node meets the others
        self._total = 0  # blocks
        self._summaries: dict[int, Summary] = {}  # by the first node of the subtree
        self._orders: Orders | None = None
        self._group: NodeGroup | None = None  # once the schedule is known
        self._blocks: Blocks | None = None
        self._going: dict[int, dict[int, SharedBlock]] = {}  # blocks for each node
        self._closed = False
        self._server = BulkServer(self._open, lambda _link: secret, host=host, ended=self._ended, integrity=integrity)
        self.address = ExchangeAddress(host, self._server.port, secret)
        self._server.start()

    def close(self) -> None:
        """Ends every connection and releases the node group."""
        self._server.close()
        self.refuse()
        with self._changed:
            self._group, self._going = None, {}

    def refuse(self) -> None:
        """Refuses requests of other nodes at once."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # --- the server's threads

    def _open(self, link: str, ask: wire.Ask, rank: int) -> Served:
        if ask.job != self._job:
            raise PeerError(f"job {ask.job.job!r} is not the one that is loaded here")
        number = link.removesuffix(_CHILD)
        if not number.isdecimal() or (rank == _ORDERS) != (number != link):
            raise PeerError(f"{link!r} is no link of a node for this")
        node = int(number)
        if rank == _ORDERS:
            return _Bytes(self._orders_for(node, ask.said))
        self._await(lambda: self._group is not None, NODES_JOIN_S)
        with self._changed:
            group, blocks = self._group, self._blocks
            if group is None or blocks is None:
                raise PeerError("nothing is read together here")
            if node not in self._going:
                self._going[node] = {one.block: one for one in group.going(node)}
        return _Image(group, blocks, self._going[node], node, rank)

    def _await(self, ready: Callable[[], bool], seconds: float) -> None:
        """Blocks until it is ready. Raises PeerError when it does not become so in time."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or ready(), seconds)
            if self._closed or not ready():
                raise PeerError("nothing is read together here")

    def _orders_for(self, node: int, said: bytes) -> bytes:
        """The orders for a child's subtree. said: its summary; empty where it was sent before."""
        self._await(lambda: self._place is not None, NODES_JOIN_S)
        assert self._place is not None  # noqa: S101 - waited for
        subtree = next((one for level in self._place.levels for one in level if one.start == node), None)
        if subtree is None:
            raise PeerError(f"node {node} is no child of node {self._place.number}")
        if said:
            try:
                summary = Summary.unpack(said, self._total, subtree)
            except (ValueError, msgspec.DecodeError) as error:
                raise PeerError(f"a summary of another read: {error}") from None
            with self._changed:
                if self._orders is None:
                    self._summaries[node] = summary
                    self._changed.notify_all()
        self._await(lambda: self._orders is not None, _patience(self._place))
        assert self._orders is not None  # noqa: S101 - waited for
        if node not in self._summaries:
            raise PeerError("the plan was made without this node, which came late")
        found = self._orders.pack_for(subtree)
        return len(found).to_bytes(_LENGTH_NBYTES, "little") + found

    def _ended(self, link: str) -> None:
        with self._changed:
            group = self._group
        if group is not None and link.isdecimal():
            group.leave_for(int(link))

    # --- this rank

    def meet(
        self, place: Place, parent: ExchangeAddress | None, wants: bytes, blocks: Blocks, save: SaveId
    ) -> tuple[Plan, Mapping[int, ExchangeAddress]]:
        """Agrees with the subtree below and the parent above. wants: bitmap of this node's blocks.

        Returns the plan of this node, and the addresses of the nodes that send to it. Blocks for a bounded time.
        """
        sizes = np.array(blocks.lengths, np.int32)
        column, addresses, edges = column_of(place.number, wants, blocks.total), {place.number: self.address}, []
        began = time.monotonic()
        with self._changed:
            self._place, self._total = place, blocks.total
            self._changed.notify_all()
        for height, subtrees in enumerate(place.levels):
            came = self._summaries_of(subtrees, began + NODES_JOIN_S + height * LEVEL_S)
            addresses |= {node: address for one in came for node, address in one.addresses.items()}
            column, between = join([column, *(one.column for one in came)], sizes)
            edges.append(between)
        above = Orders(Edges.none(), {})
        if parent is not None:
            above = self._ask_parent(place, parent, Summary(column, addresses), save)
        orders = Orders(Edges.of([above.edges, *edges]), above.addresses | addresses)
        with self._changed:
            self._orders = orders
            self._changed.notify_all()
        number = place.number
        return Plan(orders.edges.by_source(number), orders.edges.by_target(number)), orders.addresses

    def _summaries_of(self, subtrees: Sequence[range], deadline: float) -> list[Summary]:
        firsts = [one.start for one in subtrees]
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or self._summaries.keys() >= set(firsts), max(0.0, deadline - time.monotonic())
            )
            missing = [node for node in firsts if node not in self._summaries]
            if missing:
                log.info("ckptd: nodes %s of this read do not answer: those below them read without this one", missing)
            return [self._summaries[node] for node in firsts if node in self._summaries]

    def _ask_parent(self, place: Place, parent: ExchangeAddress, summary: Summary, save: SaveId) -> Orders:
        """The orders of the parent; none if it does not answer: then this subtree reads by itself."""
        patience = _patience(place)
        deadline = time.monotonic() + patience
        cancel, address = Cancel(), Address(parent.host, parent.port, f"{place.number}{_CHILD}", parent.secret)
        said, told = summary.pack(), f"{parent.host}:{parent.port}"
        while True:
            try:
                connection = Connection(
                    told, address, cancel, timeout_s=patience, steady=False, integrity=self._integrity
                )
                with contextlib.closing(connection):
                    length = bytearray(_LENGTH_NBYTES)
                    ranges = [wire.Range(_ORDERS, 0, _LENGTH_NBYTES, checked=True)]
                    connection.ask(self._job, save, 0, ranges, said=said)
                    connection.receive(memoryview(length))
                    raw = bytearray(int.from_bytes(length, "little"))
                    parts = [
                        wire.Range(
                            _ORDERS, _LENGTH_NBYTES + at, min(wire.MAX_FRAME_NBYTES, len(raw) - at), checked=True
                        )
                        for at in range(0, len(raw), wire.MAX_FRAME_NBYTES)
                    ]
                    connection.ask(self._job, save, 0, parts)
                    for part in parts:
                        start = part.offset - _LENGTH_NBYTES
                        connection.receive(memoryview(raw)[start : start + part.nbytes])
                    return Orders.unpack(bytes(raw), len(summary.column))
            except (CkptdError, OSError, ValueError, msgspec.DecodeError) as error:
                if time.monotonic() + _AGAIN_S >= deadline or not _may_come_back(error):
                    log.info("ckptd: %s: this node and those below it read without the others", error)
                    return Orders(Edges.none(), {})
                time.sleep(_AGAIN_S)

    def serve(self, group: NodeGroup, blocks: Blocks) -> None:
        """Sends other nodes what the plan says."""
        with self._changed:
            self._group, self._blocks = group, blocks
            self._changed.notify_all()


def _patience(place: Place) -> float:
    """For the orders of a parent: a level more up than down."""
    return NODES_JOIN_S + 2 * LEVEL_S * (1 + place.height)


def _may_come_back(error: Exception) -> bool:
    """Whether it was only too busy to take the connection."""
    return isinstance(error, PeerError) and "hung up at the hello" in str(error)


@dataclass(frozen=True, slots=True)
class _Bytes:
    raw: bytes

    @property
    def nbytes(self) -> int:
        return len(self.raw)

    def view(self, offset: int, nbytes: int) -> memoryview:
        return memoryview(self.raw)[offset : offset + nbytes]

    def check(self, offset: int, nbytes: int) -> None:
        pass

    def still(self) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class _Image:
    """Another node's blocks of an image: whole blocks in order, each once this node has it."""

    group: NodeGroup
    blocks: Blocks
    due: Mapping[int, SharedBlock]
    node: int
    rank: int

    @property
    def nbytes(self) -> int:
        return self.blocks.image_nbytes(self.rank)

    def view(self, offset: int, nbytes: int) -> memoryview:
        one = self.due.get(self.blocks.at(self.rank, offset))
        buffer = self.group.take_for(self.node, one) if one is not None else None
        if buffer is None:
            raise PeerError(f"byte {offset} of rank {self.rank} could not be read")
        return buffer.view[:nbytes]

    def check(self, offset: int, nbytes: int) -> None:
        """Does nothing: the receiver compares the block with its digest."""

    def still(self) -> bool:
        self.group.sent(self.node, max(one.number for one in self.due.values()))
        return True


class Senders:
    """Connections of this node's first rank to the nodes that send to it. A failure of theirs is never raised."""

    def __init__(
        self, job: JobKey, save: SaveId, number: int, addresses: Mapping[int, ExchangeAddress], integrity: Integrity
    ) -> None:
        self._job, self._save, self._number, self._integrity = job, save, number, integrity
        self._addresses = addresses
        self._cancel = Cancel()

    @contextlib.contextmanager
    def receiving(self, group: NodeGroup, blocks: Blocks, check: Check, fill: Fill) -> Iterator[None]:
        """Runs threads that fill buffers with the blocks that other nodes send; waits for them at the end.

        fill: for a block that does not come.
        """
        coming = group.coming
        with ThreadPoolExecutor(max(1, len(coming)), thread_name_prefix="ckptd-fetch") as pool:
            for node, some in coming.items():
                pool.submit(self._receive_from, node, some, group, blocks, check, fill)
            yield

    def _receive_from(  # noqa: PLR0913, PLR0917
        self, node: int, coming: Sequence[SharedBlock], group: NodeGroup, blocks: Blocks, check: Check, fill: Fill
    ) -> None:
        with contextlib.ExitStack() as stack:
            source = _Sender(self._job, self._save, coming, blocks)
            try:
                address = self._addresses[node]
                connection = Connection(
                    f"{address.host}:{address.port}",
                    Address(address.host, address.port, str(self._number), address.secret),
                    self._cancel,
                    steady=False,
                    integrity=self._integrity,
                )
                stack.callback(connection.close)
                source.begin(connection)
            except (CkptdError, OSError, KeyError) as error:
                source.lost = error

            def into(one: SharedBlock, buffer: Buffer) -> None:
                if not source.receive(one, buffer, check):
                    fill(one, buffer)

            for one in coming:
                with contextlib.suppress(CkptdError, OSError):
                    group.fill(one, lambda buffer, one=one: into(one, buffer))  # type: ignore[misc]
                source.passed(one)
            if source.lost is not None and not self._cancel.cancelled:
                log.info("ckptd: %s: this node reads the rest by itself", source.lost)

    def close(self) -> None:
        """Ends the connections: each node learns that this one wants nothing more from it."""
        self._cancel.cancel()


class _Sender:
    """One node's blocks, received in order until it fails."""

    def __init__(self, job: JobKey, save: SaveId, coming: Sequence[SharedBlock], blocks: Blocks) -> None:
        self._job, self._save, self._coming, self._blocks = job, save, coming, blocks
        self._connection: Connection | None = None
        self._received = -1  # number of the last block
        self.lost: Exception | None = None

    def begin(self, connection: Connection) -> None:
        """Asks for all of them."""
        blocks, self._connection = self._blocks, connection
        ranges = [
            wire.Range(blocks.place(one.block)[0], blocks.offset(one.block), blocks.nbytes(one.block), checked=False)
            for one in self._coming
        ]
        connection.ask(self._job, self._save, 0, ranges)

    def passed(self, one: SharedBlock) -> None:
        """The block was received, or there was no buffer for it in time: then what comes next is unknown."""
        if self._received != one.number and self.lost is None:
            self.lost = PeerError("no buffer became free in time for what another node sends")

    def receive(self, one: SharedBlock, buffer: Buffer, check: Check) -> bool:
        """Whether the block has come, and is sound."""
        self._received = one.number
        if self.lost is not None or self._connection is None:
            return False
        view = buffer.view[: self._blocks.nbytes(one.block)]
        try:
            self._connection.receive(view)
        except (CkptdError, OSError) as error:
            self.lost = error
            return False
        try:
            check(one.block, view)
        except CkptdError as error:
            log.info("ckptd: %s", error)
            return False
        return True
