"""The node group: ranks of one node that read a checkpoint on the store together, each block once.

The ranks share a file in the arena; it has no name any more once all have opened it. Each rank announces which blocks
it wants. From that every rank computes, without a further message, which blocks several ranks want and which rank reads
each. That rank reads a block and checks it into one of a few shared buffers; all ranks that want the block copy it out.
When a rank fails, dies or is slow, the others wait a bounded time, then read the rest by themselves.

Other nodes that read the same checkpoint take part through the peer exchange of the first rank (peer_exchange.py): each
is a member of the group like a rank, and the first rank keeps its counters.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from ckptd.shared.base.ids import SaveId
from ckptd.shared.files.mapping import Mapping as Memory
from ckptd.shared.format.arena_paths import read_group_name
from ckptd.shared.format.digest import BLOCK_NBYTES, digest
from ckptd.shared.format.slot import align_up
from ckptd_client._load.reader import Buffer
from ckptd_client._load.shared_read.schedule import Blocks, SharedBlock, bits_of, schedule, union

_JOIN_S: Final = 5.0  # wait for the other ranks at the beginning
NODES_JOIN_S: Final = 10.0  # then for the other nodes
_PATIENCE_S: Final = 20.0  # later, for a block or a buffer
_NODE_PATIENCE_S: Final = 10.0  # for another node to take a block: shorter than the node's own ranks wait for this rank
_PAUSES_S: Final = (0.0002, 0.002)
_SPARE_BUFFERS: Final = 2  # more than one for each member
_MAX_BUFFERS: Final = 18
_LINE: Final = 64  # bytes of a counter: no two counters share a cache line
_JOINED, _ABSENT = 1, 2
_LEFT: Final = (1 << 63) - 1  # position of a member that wants nothing more
_GOOD, _FAILED, _LOST = 0, 1, 2  # outcome of a block; lost: a thread may still write to its buffer


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Names the node group of a save. readers: the ranks of this node that read the save from the store.

    nodes: number of nodes that read it together; node: index of this node among them.
    """

    directory: str  # of the job in the arena
    session: str
    save: SaveId
    readers: tuple[int, ...]
    rank: int
    nodes: int = 1
    node: int = 0

    @property
    def is_shared(self) -> bool:
        """Whether this rank reads the save, and another rank or node reads it too."""
        return self.rank in self.readers and (len(self.readers) > 1 or self.nodes > 1)

    def open(self, blocks: Blocks, mark: bytes) -> "NodeGroup | None":
        """The group for a checkpoint of these blocks; None: read alone. mark: distinguishes its bytes from others."""
        if not self.is_shared:
            return None
        names = f"{self.session} {self.save.text} {self.readers} {self.nodes} {blocks.total} {mark.hex()}"
        path = os.path.join(self.directory, read_group_name(digest(names.encode()).hex()[:16]))
        layout = _Layout(len(self.readers), self.nodes, blocks.total)
        try:
            memory = _open(path, layout)
        except OSError:  # no memory, for example
            return None
        return NodeGroup(memory, layout, self, path, (blocks, mark))


class _Layout(NamedTuple):
    """The group's memory. Members: the ranks of this node, then every node; the entry of this node is unused."""

    ranks: int
    nodes: int
    total: int

    @property
    def members(self) -> int:
        return self.ranks + self.nodes

    @property
    def bitmap_nbytes(self) -> int:
        return -(-self.total // 8)

    @property
    def area_nbytes(self) -> int:
        """Of one member: a counter that it has joined, a counter of its position, the bitmap of what it wants."""
        return 2 * _LINE + align_up(self.bitmap_nbytes, _LINE)

    @property
    def buffers(self) -> int:
        return min(self.members + _SPARE_BUFFERS, _MAX_BUFFERS)

    @property
    def ready_offset(self) -> int:
        return self.members * self.area_nbytes

    @property
    def buffers_offset(self) -> int:
        return align_up(self.ready_offset + self.buffers * _LINE, 2 << 20)

    @property
    def nbytes(self) -> int:
        return self.buffers_offset + self.buffers * BLOCK_NBYTES


def _open(path: str, layout: _Layout) -> Memory:
    """Opens the group's memory, or creates it; it appears at its path complete. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        return _mapped(path, layout)
    own = f"{path}.{os.getpid()}-{threading.get_ident()}"
    fd = os.open(own, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, layout.nbytes)  # else a full tmpfs would be SIGBUS later
        with contextlib.suppress(FileExistsError):  # another rank was first
            os.link(own, path)
    finally:
        os.close(fd)
        os.unlink(own)
    return _mapped(path, layout)


def _mapped(path: str, layout: _Layout) -> Memory:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        if os.fstat(fd).st_size != layout.nbytes:
            raise FileNotFoundError(path)
        return Memory(fd, layout.nbytes)
    finally:
        os.close(fd)


class NodeGroup:
    """One rank's access to the group's shared memory."""

    def __init__(
        self, memory: Memory, layout: _Layout, rendezvous: Rendezvous, path: str, of: tuple[Blocks, bytes]
    ) -> None:
        self._memory, self._layout, self._path = memory, layout, path
        self._blocks, self._mark = of
        self._index, self._node = rendezvous.readers.index(rendezvous.rank), rendezvous.node
        self._counters = memory.view[: layout.buffers_offset].cast("Q")
        self._given_up = threading.Event()
        self._schedule: list[SharedBlock] = []

    @property
    def is_leader(self) -> bool:
        """Whether this rank exchanges blocks with other nodes."""
        return self._index == 0 and self._layout.nodes > 1

    @property
    def shared(self) -> list[SharedBlock]:
        """Blocks that this rank and other members want, in the order in which ranks take them."""
        return [one for one in self._schedule if self._index in one.wanted]

    @property
    def own_reads(self) -> list[SharedBlock]:
        """Blocks that this rank reads from the store."""
        return [one for one in self._schedule if one.reader == self._index and one.node == self._node]

    @property
    def node_reads(self) -> list[SharedBlock]:
        """Blocks that ranks of this node read from the store, also for other nodes."""
        return [one for one in self._schedule if one.node == self._node]

    def read_at(self, node: int) -> list[SharedBlock]:
        """Blocks that another node reads and ranks of this node want."""
        return [one for one in self._schedule if one.node == node != self._node]

    # --- indexes of counters, each in a cache line of its own

    def _joined(self, member: int) -> int:
        return member * self._layout.area_nbytes // 8

    def _position(self, member: int) -> int:
        return self._joined(member) + _LINE // 8

    def _ready(self, number: int) -> int:
        return (self._layout.ready_offset + number % self._layout.buffers * _LINE) // 8

    def _bitmap(self, member: int) -> memoryview:
        start = member * self._layout.area_nbytes + 2 * _LINE
        return self._memory.view[start : start + self._layout.bitmap_nbytes]

    # --- the beginning

    def join(self, wanted: Collection[int], ask_nodes: Callable[[bytes], Mapping[int, bytes]] | None = None) -> bool:
        """Announces what this rank wants and collects what the others want; False when a rank is missing. Blocks.

        ask_nodes: given by the first rank; takes what this node wants, returns what each node that answers wants.
        """
        layout, ranks = self._layout, range(self._layout.ranks)
        self._announce(self._index, bits_of(set(wanted), layout.total))
        complete = self._wait(lambda: all(self._counters[self._joined(m)] for m in ranks), _JOIN_S)
        with contextlib.suppress(FileNotFoundError):  # the first rank that finds the group complete removes the name
            os.unlink(self._path)
        if not complete:
            return False
        wants = [bytes(self._bitmap(member)) for member in ranks]
        if self.is_leader:
            self._record_nodes(ask_nodes(union(wants)) if ask_nodes is not None else {})
        others = [node for node in range(layout.nodes) if node != self._node]
        known = [self._joined(self._member_of(node)) for node in others]
        if not self._wait(lambda: all(self._counters[counter] for counter in known), 2 * NODES_JOIN_S):
            return False
        self._schedule = schedule(wants, self._wants_of_nodes(), self._node, self._blocks.nbytes)
        if self.is_leader:
            self._mark_left([node for node in others if not self.blocks_for_node(node)])
        return True

    def _announce(self, member: int, bits: bytes, joined: int = _JOINED) -> None:
        self._bitmap(member)[:] = bits
        self._counters[self._joined(member)] = joined

    def _record_nodes(self, answers: Mapping[int, bytes]) -> None:
        """Records for each other node what it wants, or that it does not take part."""
        nothing = bytes(self._layout.bitmap_nbytes)
        for node in range(self._layout.nodes):
            if node not in answers:
                self._mark_left([node])
            self._announce(self._member_of(node), answers.get(node, nothing), _JOINED if node in answers else _ABSENT)

    def _member_of(self, node: int) -> int:
        return self._layout.ranks + node

    def _wants_of_nodes(self) -> list[bytes | None]:
        members = [self._member_of(node) for node in range(self._layout.nodes)]
        return [bytes(self._bitmap(m)) if self._counters[self._joined(m)] == _JOINED else None for m in members]

    @property
    def wants_digest(self) -> bytes:
        """A digest of what each node wants: nodes exchange blocks only if theirs are equal."""
        wants = self._wants_of_nodes()
        wants[self._node] = union([bytes(self._bitmap(member)) for member in range(self._layout.ranks)])
        return digest(self._mark + b"".join(b"-" if bits is None else b"+" + bits for bits in wants))

    # --- blocks

    def fill(self, one: SharedBlock, read: Callable[[Buffer], None]) -> None:
        """Calls read with a buffer for a block that this rank fills. Blocks until one is free. For threads.

        If read raises, the other members learn that they must read the block themselves, and the error is raised.
        """
        if not self._is_free(one.number - self._layout.buffers):
            self._publish(one.number, _LOST)
            return
        outcome = _FAILED
        try:
            read(self._buffer(one.number))
            outcome = _GOOD
        finally:
            self._publish(one.number, outcome)

    def _is_free(self, before: int) -> bool:
        """Waits until no member needs block number before, the last user of the buffer, or writes to it."""
        if self._wait(lambda: self._is_settled(before) and not self._pending(before), _NODE_PATIENCE_S):
            return self._outcome(before) != _LOST
        late = self._pending(before)
        if late and all(member >= self._layout.ranks for member in late):  # the wait for other nodes is bounded
            for member in late:
                self._counters[self._position(member)] = _LEFT
        free = self._wait(lambda: self._is_settled(before) and not self._pending(before), _NODE_PATIENCE_S)
        return free and self._outcome(before) != _LOST

    def _pending(self, number: int) -> list[int]:
        """Members that may still want the block."""
        own = self._member_of(self._node)
        return [m for m in range(self._layout.members) if m != own and self._counters[self._position(m)] <= number]

    def _is_settled(self, number: int) -> bool:
        """Whether the rank that fills the block has published the outcome."""
        return number < 0 or self._counters[self._ready(number)] >> 2 == number + 1

    def _outcome(self, number: int) -> int:
        return self._counters[self._ready(number)] & 3 if number >= 0 else _GOOD

    def _publish(self, number: int, outcome: int) -> None:
        counter = self._ready(number)
        if self._counters[counter] >> 2 <= number + 1:  # else others went on without this one
            self._counters[counter] = (number + 1) << 2 | outcome

    def take(self, one: SharedBlock) -> Buffer | None:
        """The block, checked by the rank that read it, until released; None: read it yourself. Blocks."""
        self._counters[self._position(self._index)] = one.number  # earlier blocks are taken, or not wanted here
        if not self._wait(lambda: self._is_settled(one.number), _PATIENCE_S):
            self._given_up.set()  # from here on, alone
            return None
        return self._buffer(one.number) if self._outcome(one.number) == _GOOD else None

    def release(self, one: SharedBlock) -> None:
        """This rank has what it wants of this block and of all before it."""
        self._counters[self._position(self._index)] = one.number + 1

    def leave(self) -> None:
        """This rank wants nothing more; no member waits for it."""
        self._given_up.set()
        self.done()

    def done(self) -> None:
        """This rank has all it wants; it may still fill blocks that others want."""
        self._counters[self._position(self._index)] = _LEFT

    # --- other nodes, whose counters the first rank keeps

    def take_for(self, node: int, one: SharedBlock) -> Buffer | None:
        """The same as take, for a block that is sent to another node. None: no such block, or the node has left."""
        counter = self._position(self._member_of(node))
        if self._counters[counter] == _LEFT:
            return None
        self._counters[counter] = one.number
        settled = self._wait(lambda: self._is_settled(one.number), _PATIENCE_S)
        return self._buffer(one.number) if settled and self._outcome(one.number) == _GOOD else None

    def blocks_for_node(self, node: int) -> list[SharedBlock]:
        """Blocks that this node reads and another node wants too."""
        bits = bytes(self._bitmap(self._member_of(node)))
        return [one for one in self.node_reads if bits[one.block // 8] >> one.block % 8 & 1]

    def sent(self, node: int, last: int) -> None:
        """A request of the node was answered; last: number of the last block that the node wants from this one."""
        if self._counters[self._position(self._member_of(node))] >= last:
            self.leave_for(node)

    def leave_for(self, node: int) -> None:
        """The node wants nothing more."""
        self._mark_left([node])

    def _mark_left(self, nodes: Iterable[int]) -> None:
        for node in nodes:
            self._counters[self._position(self._member_of(node))] = _LEFT

    def wait_for_nodes(self) -> None:
        """Blocks until no other node wants anything, or none advances for too long."""
        members = [self._member_of(node) for node in range(self._layout.nodes) if node != self._node]

        def positions() -> list[int]:
            return [self._counters[self._position(member)] for member in members]

        while min(positions(), default=_LEFT) != _LEFT:
            before = positions()
            if not self._wait(lambda before=before: positions() != before, _PATIENCE_S):  # type: ignore[misc]
                return

    def _buffer(self, number: int) -> Buffer:
        start = self._layout.buffers_offset + number % self._layout.buffers * BLOCK_NBYTES
        return Buffer(self._memory.address + start, self._memory.view[start : start + BLOCK_NBYTES])

    def _wait(self, condition: Callable[[], bool], patience_s: float) -> bool:
        deadline, pause = time.monotonic() + patience_s, _PAUSES_S[0]
        while not condition():
            if self._given_up.is_set() or time.monotonic() >= deadline:
                return False
            time.sleep(pause)
            pause = min(2 * pause, _PAUSES_S[1])
        return True
