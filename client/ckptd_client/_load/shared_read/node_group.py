"""The node group: ranks of one node that read a checkpoint on the store together, each block once.

The ranks share a file in the arena; it has no name any more once all have opened it. Each rank announces which blocks
it wants. From that every rank computes, without a further message, which blocks several ranks want and which rank reads
each. That rank reads a block and checks it into one of a few shared buffers; all ranks that want the block copy it out.
When a rank fails, dies or is slow, the others wait a bounded time, then read the rest by themselves.

Other nodes that read the same checkpoint take part through the peer exchange of the first rank (peer_exchange.py): it
knows which blocks come from which nodes and go to which. All of them together are one more member of the group: its
position is that of the node that is furthest behind, which the first rank keeps.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from ckptd.shared.base.ids import SaveId
from ckptd.shared.files.mapping import Mapping as Memory
from ckptd.shared.format.arena_paths import read_group_name
from ckptd.shared.format.digest import BLOCK_NBYTES, digest
from ckptd.shared.format.slot import align_up
from ckptd_client._load.reader import Buffer
from ckptd_client._load.shared_read.schedule import Blocks, SharedBlock, bits_of, schedule, union

_JOIN_S: Final = 10.0  # wait for the other ranks at the beginning
_PLAN_S: Final = 60.0  # then for the plan of all nodes: longer than the first rank waits for other nodes
_PATIENCE_S: Final = 20.0  # later, for a block or a buffer
_NODE_PATIENCE_S: Final = 10.0  # for another node to take a block: shorter than the node's own ranks wait for this rank
_PAUSES_S: Final = (0.0002, 0.002)
_SPARE_BUFFERS: Final = 2  # more than one for each member
_MAX_BUFFERS: Final = 18
_LINE: Final = 64  # bytes of a counter: no two counters share a cache line
_JOINED: Final = 1
LEFT: Final = (1 << 63) - 1  # position of a member that wants nothing more
_GOOD, _FAILED, _LOST = 0, 1, 2  # outcome of a block; lost: a thread may still write to its buffer


@dataclass(frozen=True, slots=True)
class NodeReaders:
    """Names the node group of a save. readers: the ranks of this node that read the save from the store.

    read: names the read on all nodes that take part; empty: no other node does.
    """

    directory: str  # of the job in the arena
    session: str
    save: SaveId
    readers: tuple[int, ...]
    rank: int
    read: str = ""

    @property
    def is_shared(self) -> bool:
        """Whether this rank reads the save, and another rank or node reads it too."""
        return self.rank in self.readers and (len(self.readers) > 1 or bool(self.read))

    @property
    def is_leader(self) -> bool:
        """Whether this rank exchanges blocks with other nodes."""
        return bool(self.read) and self.readers[:1] == (self.rank,)

    def open(self, blocks: Blocks, mark: bytes) -> "NodeGroup | None":
        """The group for a checkpoint of these blocks; None: read alone. mark: distinguishes its bytes from others."""
        if not self.is_shared:
            return None
        names = f"{self.session} {self.save.text} {self.readers} {self.read} {blocks.total} {mark.hex()}"
        path = os.path.join(self.directory, read_group_name(digest(names.encode()).hex()[:16]))
        layout = _Layout(len(self.readers), bool(self.read), blocks.total)
        try:
            memory = _open(path, layout)
        except OSError:  # no memory, for example
            return None
        return NodeGroup(memory, layout, self, path, blocks)


@dataclass(frozen=True, slots=True)
class Plan:
    """What this node has from which nodes, and sends to which: numbers of blocks, by the number of the other node."""

    comes: Mapping[int, Sequence[int]] = field(default_factory=dict)
    goes: Mapping[int, Sequence[int]] = field(default_factory=dict)


class _Layout(NamedTuple):
    """The group's memory. Members: the ranks of this node, then, if there are any, the other nodes, as one."""

    ranks: int
    others: bool
    total: int

    @property
    def members(self) -> int:
        return self.ranks + self.others

    @property
    def bitmap_nbytes(self) -> int:
        return -(-self.total // 8)

    @property
    def area_nbytes(self) -> int:
        """Of one member: counters that it has joined, of its position, of what it lost; what it wants; what it has."""
        return 3 * _LINE + 2 * align_up(self.bitmap_nbytes, _LINE)

    @property
    def buffers(self) -> int:
        return _MAX_BUFFERS if self.others else min(self.members + _SPARE_BUFFERS, _MAX_BUFFERS)

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

    def __init__(self, memory: Memory, layout: _Layout, here: NodeReaders, path: str, blocks: Blocks) -> None:
        self._memory, self._layout, self._path, self._blocks = memory, layout, path, blocks
        self._index = here.readers.index(here.rank)
        self.is_leader = here.is_leader
        self._counters = memory.view[: layout.buffers_offset].cast("Q")
        self._given_up = threading.Event()
        self._schedule: list[SharedBlock] = []
        self._plan = Plan()
        self._targets: dict[int, int] = {}  # other nodes that get blocks from here, and their positions
        self._lock = threading.Lock()  # of the targets

    @property
    def shared(self) -> list[SharedBlock]:
        """Blocks that this rank and other members want, in the order in which ranks take them."""
        return [one for one in self._schedule if self._index in one.wanted]

    @property
    def own_reads(self) -> list[SharedBlock]:
        """Blocks that this rank reads from the store."""
        return [one for one in self._schedule if one.filler == self._index and not one.comes]

    @property
    def coming(self) -> dict[int, list[SharedBlock]]:
        """Blocks that other nodes send, by the node; at the first rank."""
        return {node: self._those(blocks) for node, blocks in self._plan.comes.items()}

    def going(self, node: int) -> list[SharedBlock]:
        """Blocks that another node gets from here; at the first rank."""
        return self._those(self._plan.goes.get(node, ()))

    def _those(self, blocks: Collection[int]) -> list[SharedBlock]:
        some = set(blocks)
        return [one for one in self._schedule if one.block in some]

    # --- indexes of counters, each in a cache line of its own

    def _joined(self, member: int) -> int:
        return member * self._layout.area_nbytes // 8

    def _position(self, member: int) -> int:
        return self._joined(member) + _LINE // 8

    def _ready(self, number: int) -> int:
        return (self._layout.ready_offset + number % self._layout.buffers * _LINE) // 8

    def _lost(self, member: int) -> int:
        return self._position(member) + _LINE // 8

    def _bitmap(self, member: int, *, second: bool = False) -> memoryview:
        start = member * self._layout.area_nbytes + 3 * _LINE
        start += align_up(self._layout.bitmap_nbytes, _LINE) if second else 0
        return self._memory.view[start : start + self._layout.bitmap_nbytes]

    # --- the beginning

    def join(self, wanted: Collection[int], meet_nodes: Callable[[bytes], Plan] | None = None) -> bool:
        """Announces what this rank wants and collects what the others want; False when a rank is missing. Blocks.

        meet_nodes: given by the first rank; takes the bitmap of what this node wants, returns the plan of all nodes.
        """
        layout, ranks = self._layout, range(self._layout.ranks)
        self._bitmap(self._index)[:] = bits_of(wanted, layout.total)
        self._counters[self._joined(self._index)] = _JOINED
        complete = self._wait(lambda: all(self._counters[self._joined(m)] for m in ranks), _JOIN_S)
        with contextlib.suppress(FileNotFoundError):  # the first rank that finds the group complete removes the name
            os.unlink(self._path)
        if not complete:
            return False
        wants = [bytes(self._bitmap(member)) for member in ranks]
        comes = goes = bytes(layout.bitmap_nbytes)
        if layout.others:
            if self.is_leader:
                self._share(meet_nodes(union(wants)) if meet_nodes is not None else Plan())
            if not self._wait(lambda: bool(self._counters[self._joined(layout.ranks)]), _PLAN_S):
                return False
            comes, goes = bytes(self._bitmap(layout.ranks)), bytes(self._bitmap(layout.ranks, second=True))
        self._schedule = schedule(wants, comes, goes, self._blocks.nbytes)
        if self.is_leader:
            self._begin_targets()
        return True

    def _share(self, plan: Plan) -> None:
        """Announces the plan to the ranks of this node."""
        self._plan, others, total = plan, self._layout.ranks, self._layout.total
        self._bitmap(others)[:] = bits_of((b for blocks in plan.comes.values() for b in blocks), total)
        self._bitmap(others, second=True)[:] = bits_of((b for blocks in plan.goes.values() for b in blocks), total)
        self._counters[self._joined(others)] = _JOINED

    def _begin_targets(self) -> None:
        firsts = {node: self.going(node) for node in self._plan.goes}
        with self._lock:
            self._targets = {node: blocks[0].number for node, blocks in firsts.items() if blocks}
            self._publish_targets()

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
        if self._pending(before) == [self._layout.ranks]:  # the wait for other nodes is bounded
            lost = self._lost(self._layout.ranks)
            self._counters[lost] = max(self._counters[lost], before + 1)
        free = self._wait(lambda: self._is_settled(before) and not self._pending(before), _NODE_PATIENCE_S)
        return free and self._outcome(before) != _LOST

    def _pending(self, number: int) -> list[int]:
        """Members that may still want the block."""
        found = [m for m in range(self._layout.ranks) if self._counters[self._position(m)] <= number]
        others = self._layout.ranks
        if (
            self._layout.others
            and self._counters[self._position(others)] <= number >= self._counters[self._lost(others)]
        ):
            found.append(others)
        return found

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
        """This rank wants nothing more, nor do other nodes through it; no member waits for them."""
        self._given_up.set()
        if self.is_leader:
            with self._lock:
                self._targets.clear()
                self._publish_targets()
        self.done()

    def done(self) -> None:
        """This rank has all it wants; it may still fill blocks that others want."""
        self._counters[self._position(self._index)] = LEFT

    # --- other nodes, at the first rank

    def take_for(self, node: int, one: SharedBlock) -> Buffer | None:
        """The same as take, for a block that is sent to another node. None: no such block, or it came too late."""
        if not self._advance(node, one.number):
            return None
        settled = self._wait(lambda: self._is_settled(one.number), _PATIENCE_S)
        return self._buffer(one.number) if settled and self._outcome(one.number) == _GOOD else None

    def sent(self, node: int, last: int) -> None:
        """A request of the node was answered; last: number of the last block that it gets from here."""
        with self._lock:
            over = self._targets.get(node, LEFT) >= last
        if over:
            self.leave_for(node)

    def leave_for(self, node: int) -> None:
        """The node wants nothing more."""
        self._advance(node, LEFT)

    def _advance(self, node: int, number: int) -> bool:
        """Sets the node's position; False if it has left, or others do not wait for it any more."""
        with self._lock:
            position = self._targets.get(node, LEFT)
            behind = position < self._counters[self._lost(self._layout.ranks)]
            self._targets[node] = LEFT if LEFT in {position, number} or behind else number
            self._publish_targets()
            return position != LEFT and not behind

    def _publish_targets(self) -> None:
        self._counters[self._position(self._layout.ranks)] = min(self._targets.values(), default=LEFT)

    def wait_for_nodes(self) -> None:
        """Blocks until no other node gets anything from here, or none advances for too long."""

        def positions() -> list[int]:
            with self._lock:
                return list(self._targets.values())

        while min(positions(), default=LEFT) != LEFT:
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
