"""Nodes that read the same checkpoint send each other blocks: one of them reads each block from the store.

The first rank of a node opens a peer exchange for the time of a read: a server of the daemons' bulk protocol. The nodes
form a tree. Each sends its parent which blocks its subtree wants, and receives which of them come from which nodes,
and which it sends to which (plan.py), with the addresses. Then each sends blocks in their order as soon as it has
them, whether from the store or from another node (senders.py). A node whose source fails reads the store in its place,
and sends on.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec
import numpy as np

from ckptd.shared.base.errors import PeerError
from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.bulk import wire
from ckptd.shared.bulk.server import BulkServer, Served
from ckptd.shared.format.integrity import XXH3, Integrity
from ckptd.shared.protocol.read_tree import ExchangeAddress, Place
from ckptd_client._load.shared_read.found import Found, merged, unpack
from ckptd_client._load.shared_read.node_group import NodeGroup
from ckptd_client._load.shared_read.parent import CHILD, LENGTH_NBYTES, Parent
from ckptd_client._load.shared_read.plan import Edges, Orders, Summary, column_of, join
from ckptd_client._load.shared_read.schedule import Blocks, SharedBlock

log = logging.getLogger("ckptd_client")
NODES_JOIN_S: Final = 10.0  # for the leaves of the tree
LEVEL_S: Final = 2.0  # more for each level above
_OF_CHILDREN: Final = (wire.SUMMARY, wire.ORDERS, wire.LEAVE)  # asked over links of children; others get blocks


class PeerExchange:
    """A server for the job's other nodes in one read, open until close. host: this node's address for them.

    unused_s: it closes itself if this node does not meet the others within about so many seconds.
    found: the checkpoint of save, as this node's ranks found it; nodes that found another get nothing.
    Raises OSError; RuntimeError if no thread can be started.
    """

    def __init__(  # noqa: PLR0913 - one is keyword-only
        self,
        host: str,
        job: JobKey,
        save: SaveId,
        found: Found,
        integrity: Integrity = XXH3,
        *,
        unused_s: float | None = None,
    ) -> None:
        secret = os.urandom(32)
        self._job, self.save, self._integrity = job, save, integrity
        self._found = found  # by this node's ranks
        self._changed = threading.Condition()  # of what follows
        self._place: Place | None = None  # once this node meets the others
        self._total = 0  # blocks
        self._parts: dict[int, bytearray] = {}  # of summaries, by the first node of the subtree
        self._summaries: dict[int, Summary] = {}  # the same, complete
        self._theirs: dict[int, list[Found]] = {}  # what ranks of these subtrees found
        self._asking: set[str] = set()  # children that have not hung up since they sent their summary
        self._left: dict[int, range] = {}  # subtrees that read without this node
        self._orders: Orders | None = None
        self._group: NodeGroup | None = None  # once the schedule is known
        self._blocks: Blocks | None = None
        self._pausing: set[str] = set()  # links that come back after their connection has ended
        self._closed = False
        self._server = BulkServer(
            self._open, lambda _link: secret, host=host, ended=self._ended, integrity=integrity, unused_s=unused_s
        )
        self.address = ExchangeAddress(host, self._server.port, secret)
        try:
            self._server.start()
        except BaseException:
            self._server.close()
            raise

    def close(self) -> None:
        """Ends every connection and releases the node group. Idempotent."""
        self._server.close()
        self.refuse()
        with self._changed:
            self._group = None

    def refuse(self) -> None:
        """Refuses requests of other nodes at once."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # --- the server's threads

    def _open(self, link: str, ask: wire.Ask, rank: int) -> Served:
        if ask.job != self._job:
            raise PeerError(f"job {ask.job.job!r} is not the one that is loaded here")
        number = link.removesuffix(CHILD)
        if not number.isdecimal() or (rank in _OF_CHILDREN) != (number != link):
            raise PeerError(f"{link!r} is no link of a node for this")
        node = int(number)
        if rank == wire.SUMMARY:
            return self._take_part(node, ask)
        if rank == wire.ORDERS:
            return _Bytes(self._orders_for(node, ask.said))
        if rank == wire.LEAVE:
            return self._let_leave(node)
        if (ask.save, ask.said) != (self.save, self._found.proof):
            raise PeerError(f"node {node} reads another checkpoint than this one, which reads {self.save}")
        if rank == wire.PAUSE:
            return self._pause(node, link, is_over=ask.ranges[0].offset == wire.OVER)
        self._await(lambda: self._group is not None, NODES_JOIN_S)
        with self._changed:
            group, blocks = self._group, self._blocks
            self._pausing.discard(link)
        if group is None or blocks is None:
            raise PeerError("nothing is read together here")
        return _Image(group, blocks, {one.block: one for one in group.going(node)}, node, rank)

    def _pause(self, node: int, link: str, *, is_over: bool) -> Served:
        """The connection ends, and the node still wants blocks; is_over: it wants nothing more."""
        with self._changed:
            group = self._group
            (self._pausing.discard if is_over else self._pausing.add)(link)
        if is_over and group is not None:
            group.leave_for([node])
        return _Bytes(b"", wire.OVER)

    def _await(self, ready: Callable[[], bool], seconds: float) -> None:
        """Blocks until it is ready. Raises PeerError when it does not become so in time."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or ready(), seconds)
            if self._closed or not ready():
                raise PeerError("nothing is read together here")

    def _subtree(self, node: int) -> range:
        """The nodes of a child's subtree."""
        self._await(lambda: self._place is not None, NODES_JOIN_S)
        assert self._place is not None  # noqa: S101 - waited for
        found = next((one for level in self._place.levels for one in level if one.start == node), None)
        if found is None:
            raise PeerError(f"node {node} is no child of node {self._place.number}")
        return found

    def _take_part(self, node: int, ask: wire.Ask) -> Served:
        """Takes the next part of a child's summary; the first takes the place of former ones."""
        subtree, offset = self._subtree(node), ask.ranges[0].offset
        said = ask.said if ask.save == self.save else b""  # of other blocks
        most = Summary.most_nbytes(self._total, len(subtree))
        with self._changed:
            self._asking.add(str(node))
            part = self._parts.setdefault(node, bytearray())
            del part[offset:]
            if ask.save == self.save and (offset != len(part) or offset + len(said) > most):
                raise PeerError(f"a summary of another read: byte {offset + len(said)} of at most {most}")
            part += said
        return _Bytes(b"", offset)

    def _orders_for(self, node: int, found: bytes) -> bytes:
        """The orders for a child's subtree, whose summary is complete. found: by the ranks there."""
        subtree = self._subtree(node)
        with self._changed:
            said = self._parts.pop(node, None)
        if said is not None:
            try:
                theirs = unpack(found)
                same = [one.mark for one in theirs] == [self._found.mark]
                summary = Summary.unpack(bytes(said), self._total, subtree) if same else Summary.nothing(self._total)
            except (ValueError, msgspec.DecodeError) as error:
                raise PeerError(f"a summary of another read: {error}") from None
            with self._changed:
                if self._orders is None:
                    self._summaries[node], self._theirs[node] = summary, theirs
                    self._changed.notify_all()
        assert self._place is not None  # noqa: S101 - waited for
        self._await(lambda: self._orders is not None, patience_s(self._place))
        assert self._orders is not None  # noqa: S101 - waited for
        if node not in self._summaries:
            raise PeerError("the plan was made without this node, which came late")
        packed = self._orders.pack_for(subtree)
        return len(packed).to_bytes(LENGTH_NBYTES, "little") + packed

    def _let_leave(self, node: int) -> Served:
        """A child's subtree reads by itself: this node waits for nothing of it and keeps nothing for it."""
        subtree = self._subtree(node)
        with self._changed:
            self._left[node] = subtree
            self._summaries.pop(node, None)
            self._changed.notify_all()
            group = self._group
        if group is not None:
            group.leave_for(subtree)
        return _Bytes(b"")

    def _ended(self, link: str) -> None:
        with self._changed:
            group = self._group if link not in self._pausing else None
            if link.endswith(CHILD):
                self._asking.discard(link.removesuffix(CHILD))
                self._changed.notify_all()
        if group is not None and link.isdecimal():
            group.broke_for(int(link))

    # --- this rank

    def use(self) -> bool:
        """The read begins: the port stays open until close. False if it closed itself."""
        return self._server.use()

    def meet(self, place: Place, parent: ExchangeAddress | None, wants: bytes, blocks: Blocks, found: Found) -> Orders:
        """Agrees with the subtree below and the parent above. wants: bitmap of this node's blocks.

        found: as given before, with the number of the read on which the ranks of this node agree.
        The orders have all edges of this node, and the addresses of the nodes that send to it. Blocks for patience_s at
        most, and a little more where the parent does not answer, or other nodes found another checkpoint.
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
        with self._changed:
            below = [one for theirs in self._theirs.values() for one in theirs]
        merge = merged([found, *below])
        above = Orders(Edges.none(), {})
        if parent is not None:
            asked = Parent(self._job, self.save, place, parent, self._integrity)
            above = asked.ask(Summary(column, addresses), merge, began + patience_s(place))
        merge = merged([*merge, *above.found])
        differ = len(merge) > 1
        orders = Orders(Edges.of([] if differ else [above.edges, *edges]), above.addresses | addresses, merge)
        with self._changed:
            self._orders = orders
            self._changed.notify_all()
            if differ:  # nothing keeps this node here; those below are to learn it too
                self._changed.wait_for(lambda: self._closed or not self._asking, LEVEL_S)
        return orders

    def _summaries_of(self, subtrees: Sequence[range], deadline: float) -> list[Summary]:
        firsts = [one.start for one in subtrees]
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or self._summaries.keys() | self._left.keys() >= set(firsts),
                max(0.0, deadline - time.monotonic()),
            )
            missing = [node for node in firsts if node not in self._summaries]
            if missing:
                log.info("ckptd: nodes %s of this read do not answer: those below them read without this one", missing)
            return [self._summaries[node] for node in firsts if node in self._summaries]

    def serve(self, group: NodeGroup, blocks: Blocks) -> None:
        """Sends other nodes what the plan says."""
        with self._changed:
            self._group, self._blocks = group, blocks
            left = [*self._left.values()]
            self._changed.notify_all()
        for subtree in left:  # after they came into the plan
            group.leave_for(subtree)


def patience_s(place: Place) -> float:
    """Of a node for the plan, from the moment at which it has its place: a level more up than down."""
    return NODES_JOIN_S + 2 * LEVEL_S * (1 + place.height)


@dataclass(frozen=True, slots=True)
class _Bytes:
    raw: bytes
    offset: int = 0  # of the first

    @property
    def nbytes(self) -> int:
        return self.offset + len(self.raw)

    def view(self, offset: int, nbytes: int) -> memoryview:
        start = offset - self.offset
        return memoryview(self.raw)[start : start + nbytes]

    def check(self, offset: int, nbytes: int) -> None:
        pass

    def still(self) -> bool:
        return True


@dataclass(slots=True)
class _Image:
    """Another node's blocks of an image: whole blocks in order, each once this node has it."""

    group: NodeGroup
    blocks: Blocks
    due: Mapping[int, SharedBlock]
    node: int
    rank: int
    last: SharedBlock | None = field(default=None)

    @property
    def nbytes(self) -> int:
        return self.blocks.image_nbytes(self.rank)

    def view(self, offset: int, nbytes: int) -> memoryview:
        one = self.last = self.due.get(self.blocks.at(self.rank, offset))
        buffer = self.group.take_for(self.node, one) if one is not None else None
        if buffer is None:
            raise PeerError(f"byte {offset} of rank {self.rank} could not be read")
        return buffer.view[:nbytes]

    def check(self, offset: int, nbytes: int) -> None:
        """Does nothing: the receiver compares the block with its digest."""

    def still(self) -> bool:
        if self.last is not None:
            self.group.sent(self.node, self.last)
        return True
