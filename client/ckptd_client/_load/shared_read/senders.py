"""What a node receives of the nodes that send to it: block by block, from several nodes at a time.

A node may send few of a node's blocks, and there may be as many that send as the job has nodes. So no thread belongs
to a node: a few threads take the blocks in the order in which the node shares them, and ask for one at a time, over
one connection to each node, of which some are kept open. A block that does not come is read from the store.
"""

import contextlib
import heapq
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple

from ckptd.shared.base.errors import CkptdError, PeerError
from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.bulk import wire
from ckptd.shared.bulk.client import Address, Connection
from ckptd.shared.bulk.sockets import Cancel
from ckptd.shared.format.integrity import Integrity
from ckptd.shared.protocol.read_tree import ExchangeAddress
from ckptd_client._load.reader import Buffer
from ckptd_client._load.shared_read.node_group import NodeGroup
from ckptd_client._load.shared_read.schedule import Blocks, SharedBlock

log = logging.getLogger("ckptd_client")
_STREAMS: Final = 8  # blocks that are received at a time
_MOST_OPEN: Final = 32  # connections on which no block is received
_BLOCK_S: Final = 15.0  # for a block, from the ask to its last byte: less than a rank waits for it
_TRIES: Final = 2  # of a block, each over a new connection
_DONE_S: Final = 2.0  # to say to nodes that this one wants nothing more
_MOST_FAILED: Final = 3  # blocks in a row, after which a node is asked no more
Fill = Callable[[SharedBlock, Buffer], None]  # reads a block from the store into a buffer, and checks it
Check = Callable[[int, memoryview], None]  # a block's number and bytes; raises DamagedError


class Read(NamedTuple):
    """What a node asks for. number: of the node; proof: of the checkpoint that it found."""

    job: JobKey
    save: SaveId
    number: int
    proof: bytes
    integrity: Integrity


class Senders:
    """The nodes that send blocks to this one. A failure of theirs is never raised."""

    def __init__(self, read: Read, addresses: Mapping[int, ExchangeAddress]) -> None:
        self._read, self._addresses = read, addresses
        self._lock = threading.Lock()  # of what follows
        self._idle: dict[int, _Sender] = {}  # with a connection; the one that was used last comes last
        self._failed: dict[int, int] = {}  # blocks in a row, by node
        self._paused: set[int] = set()  # nodes that received a pause: the end of a connection says no more to them
        self._cancels: set[Cancel] = set()  # of all connections
        self._closed = False

    @contextlib.contextmanager
    def receiving(self, group: NodeGroup, blocks: Blocks, check: Check, fill: Fill) -> Iterator[None]:
        """Runs threads that fill buffers with the blocks that other nodes send; waits for them at the end.

        fill: for a block that does not come.
        """
        turns = Turns(group.coming)
        with contextlib.ExitStack() as stack:
            stack.callback(self.close)
            pool = stack.enter_context(ThreadPoolExecutor(_STREAMS, thread_name_prefix="ckptd-fetch"))
            for _ in range(min(_STREAMS, turns.nodes)):
                pool.submit(self._receive, turns, group, blocks, check, fill)
            yield

    def close(self) -> None:
        """Ends the connections: each node learns that this one wants nothing more from it."""
        with self._lock:
            self._closed = True
            cancels, senders = [*self._cancels], [*self._idle.values()]
            paused = [*self._paused]
            self._idle.clear()
            self._paused.clear()
        for cancel in cancels:
            cancel.cancel()
        for sender in senders:
            sender.close()
        until = time.monotonic() + _DONE_S
        for node in paused:
            self._say_over(node, until)

    def _receive(self, turns: "Turns", group: NodeGroup, blocks: Blocks, check: Check, fill: Fill) -> None:
        while (turn := turns.take()) is not None:
            node, one, is_last = turn

            def read(buffer: Buffer, node: int = node, one: SharedBlock = one) -> None:
                if not self._has_sent(node, one, buffer.view[: blocks.nbytes(one.block)], blocks, check):
                    fill(one, buffer)

            try:
                with contextlib.suppress(CkptdError, OSError):
                    group.fill(one, read)
            finally:
                if is_last:  # the node need not wait for what else this one wants
                    self._end(node)
                turns.done(node)

    def _has_sent(self, node: int, one: SharedBlock, view: memoryview, blocks: Blocks, check: Check) -> bool:
        """Whether the block came from the node, and is sound."""
        if self._failed.get(node, 0) >= _MOST_FAILED:
            return False
        rank, index = blocks.place(one.block)
        asked = wire.Range(rank, blocks.offset(one.block), len(view), checked=False)
        for tries_left in reversed(range(_TRIES)):
            sender = self._take(node)
            try:
                sender.receive(asked, view)
            except (CkptdError, OSError, KeyError) as error:
                self._drop(sender)
                slow = sender.cancel.cancelled and not self._closed
                if tries_left and not slow and not self._closed:
                    continue
                with self._lock:
                    failed = self._failed[node] = _MOST_FAILED if slow else self._failed.get(node, 0) + 1
                why = f"node {node} did not send it in {_BLOCK_S:.0f} s" if slow else str(error)
                last = "; nor is any other of that node's blocks waited for" if failed == _MOST_FAILED else ""
                if not self._closed:
                    log.info("ckptd: block %d of rank %d is read from the store: %s%s", index, rank, why, last)
                return False
            self._failed.pop(node, None)
            self._put_back(sender)
            try:
                check(one.block, view)
            except CkptdError as error:
                log.info("ckptd: %s", error)
                return False
            return True
        return False

    def _take(self, node: int) -> "_Sender":
        with self._lock:
            sender = self._idle.pop(node, None)
            if sender is None:
                sender = _Sender(self._read, node, self._addresses.get(node))
                self._cancels.add(sender.cancel)
                if self._closed:
                    sender.cancel.cancel()
            return sender

    def _put_back(self, sender: "_Sender") -> None:
        with self._lock:
            oldest = None
            if not self._closed:
                self._idle[sender.node] = sender
                oldest = self._idle.pop(next(iter(self._idle))) if len(self._idle) > _MOST_OPEN else None
        if oldest is not None:
            self._pause(oldest)
        elif self._closed:
            self._drop(sender)

    def _pause(self, sender: "_Sender") -> None:
        with self._lock:
            self._paused.add(sender.node)
        sender.pause()
        self._drop(sender)

    def _end(self, node: int) -> None:
        """The node learns that this one wants nothing more of it."""
        with self._lock:
            sender, paused = self._idle.pop(node, None), node in self._paused
            self._paused.discard(node)
        if sender is not None:
            self._drop(sender)
        if paused:
            self._say_over(node, time.monotonic() + _DONE_S)

    def _say_over(self, node: int, until: float) -> None:
        """The node, which received a pause, waits for nothing of this one any more."""
        sender = _Sender(self._read, node, self._addresses.get(node))
        with sender.cancel.limited(until - time.monotonic()):
            sender.pause(is_over=True)
        sender.close()

    def _drop(self, sender: "_Sender") -> None:
        sender.close()
        with self._lock:
            self._cancels.discard(sender.cancel)


class Turns:
    """Which block is received next: the first of those from nodes of which no other block is being received.

    So a node's blocks are asked for in their order, and the first of all that are left is always being received.
    """

    def __init__(self, coming: Mapping[int, Sequence[SharedBlock]]) -> None:
        self._left = {node: deque(blocks) for node, blocks in coming.items()}
        self._heads: list[tuple[int, int, SharedBlock]] = []  # a heap: number, node, block
        self._busy = 0
        self._changed = threading.Condition()
        for node in self._left:
            self._push(node)
        self.nodes = len(self._heads)

    def _push(self, node: int) -> None:
        if self._left[node]:
            one = self._left[node].popleft()
            heapq.heappush(self._heads, (one.number, node, one))

    def take(self) -> tuple[int, SharedBlock, bool] | None:
        """The node, the block, whether it is its last; None: all are taken. Blocks while nodes with more are busy."""
        with self._changed:
            self._changed.wait_for(lambda: self._heads or not self._busy)
            if not self._heads:
                return None
            self._busy += 1
            _, node, one = heapq.heappop(self._heads)
            return node, one, not self._left[node]

    def done(self, node: int) -> None:
        """The block that was taken of the node is received, or never will be."""
        with self._changed:
            self._busy -= 1
            self._push(node)
            self._changed.notify_all()


class _Sender:
    """A node that sends, and the connection to it, for one thread at a time."""

    def __init__(self, read: Read, node: int, address: ExchangeAddress | None) -> None:
        self.node, self.cancel = node, Cancel()
        self._read, self._address = read, address
        self._connection: Connection | None = None

    def receive(self, asked: wire.Range, view: memoryview) -> None:
        """Asks for the range and receives it. Raises PeerError, DamagedError."""
        with self.cancel.limited(_BLOCK_S):
            connection = self.connect()
            connection.ask(self._read.job, self._read.save, 0, [asked], said=self._read.proof)
            connection.receive(view)

    def connect(self) -> Connection:
        """The connection, made where there is none. Raises PeerError."""
        if self._connection is None:
            found = self._address
            if found is None:
                raise PeerError(f"node {self.node} has no address")
            address = Address(found.host, found.port, str(self._read.number), found.secret)
            self._connection = Connection(
                f"{found.host}:{found.port}", address, self.cancel, timeout_s=_BLOCK_S, steady=False,
                integrity=self._read.integrity,
            )  # fmt: skip
        return self._connection

    def pause(self, *, is_over: bool = False) -> None:
        """Says that the end of the connection is not the end of what this node wants; or that it wants nothing more."""
        with contextlib.suppress(CkptdError, OSError):
            self.receive(wire.Range(wire.PAUSE, wire.OVER if is_over else 0, 0, checked=False), memoryview(b""))

    def close(self) -> None:
        """Ends the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
