"""Ranks of one node read a checkpoint on the store together: each block once, into memory that all of them see.

They meet at a file in the arena that is gone from its directory once all have it open. Each tells which blocks it
wants; from that every one knows, without another word, which blocks several want and who reads each. A block is read
and checked by one rank into one of a few buffers, and copied out by all who want it. A rank that fails, dies or dawdles
costs the others some patience: they read the rest by themselves.

Other nodes that read the same checkpoint take part through the gate of the first rank (see peer_exchange.py): each has
a place at the board like a rank, which that rank keeps for it.
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
from ckptd.shared.format.arena_paths import board_name
from ckptd.shared.format.digest import BLOCK_NBYTES, digest
from ckptd.shared.format.slot import align_up
from ckptd_client._load.shared_read.schedule import Blocks, SharedBlock, bits_of, deal, union

_MEET_S: Final = 5.0  # how long the others are waited for in the beginning
NODES_MEET_S: Final = 10.0  # and other nodes, after that
_PATIENCE_S: Final = 20.0  # and for a block, or a buffer, later
_NODE_PATIENCE_S: Final = 10.0  # and for another node to take a block: less than its neighbours have with this rank
_PAUSES_S: Final = (0.0002, 0.002)
_SPARE_BUFFERS: Final = 2  # beyond one for each rank
_MAX_BUFFERS: Final = 18
_LINE: Final = 64  # bytes of a counter: no two in one cache line
_COME, _ABSENT = 1, 2
_LEFT: Final = (1 << 63) - 1  # of a counter: wants nothing more
_GOOD, _FAILED, _LOST = 0, 1, 2  # what became of a block; lost: nobody knows whether its buffer is still written to


class Buffer(NamedTuple):
    """Memory for one block, whole pages."""

    address: int
    view: memoryview


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where ranks meet. readers: the ranks of this node that were sent to read the save from the store.

    nodes: how many nodes read it together; node: which of them this one is.
    """

    directory: str  # of the job in the arena
    session: str
    save: SaveId
    readers: tuple[int, ...]
    rank: int
    nodes: int = 1
    node: int = 0

    @property
    def has_company(self) -> bool:
        """Whether this rank is sent to read, and not alone."""
        return self.rank in self.readers and (len(self.readers) > 1 or self.nodes > 1)

    def board(self, blocks: Blocks, mark: bytes) -> "Board | None":
        """The board, of a checkpoint of these blocks; None: read alone. mark: what tells its bytes from any other's."""
        if not self.has_company:
            return None
        names = f"{self.session} {self.save.text} {self.readers} {self.nodes} {blocks.total} {mark.hex()}"
        path = os.path.join(self.directory, board_name(digest(names.encode()).hex()[:16]))
        shape = _Shape(len(self.readers), self.nodes, blocks.total)
        try:
            memory = _open(path, shape)
        except OSError:  # no memory, say
            return None
        return Board(memory, shape, self, path, (blocks, mark))


class _Shape(NamedTuple):
    """members: ranks of this node first, then a place for each node, its own unused."""

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
        """A counter for who has come, one for how far it is, and what it wants."""
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


def _open(path: str, shape: _Shape) -> Memory:
    """The board that is there, or a new one, whole at once for whoever finds it. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        return _mapped(path, shape)
    own = f"{path}.{os.getpid()}-{threading.get_ident()}"
    fd = os.open(own, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, shape.nbytes)  # else a full tmpfs would be SIGBUS later
        with contextlib.suppress(FileExistsError):  # somebody was quicker
            os.link(own, path)
    finally:
        os.close(fd)
        os.unlink(own)
    return _mapped(path, shape)


def _mapped(path: str, shape: _Shape) -> Memory:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        if os.fstat(fd).st_size != shape.nbytes:
            raise FileNotFoundError(path)
        return Memory(fd, shape.nbytes)
    finally:
        os.close(fd)


class Board:
    """One rank's view of the board."""

    def __init__(self, memory: Memory, shape: _Shape, meeting: Meeting, path: str, of: tuple[Blocks, bytes]) -> None:
        self._memory, self._shape, self._path = memory, shape, path
        self._blocks, self._mark = of
        self._index, self._node = meeting.readers.index(meeting.rank), meeting.node
        self._words = memory.view[: shape.buffers_offset].cast("Q")
        self._given_up = threading.Event()
        self._dealt: list[SharedBlock] = []

    @property
    def first(self) -> bool:
        """Whether this rank speaks with other nodes."""
        return self._index == 0 and self._shape.nodes > 1

    @property
    def shared(self) -> list[SharedBlock]:
        """Blocks that this rank shares with others, in the order in which they are to be taken."""
        return [one for one in self._dealt if self._index in one.wanted]

    @property
    def mine(self) -> list[SharedBlock]:
        """Those of them that it reads from the store."""
        return [one for one in self._dealt if one.reader == self._index and one.node == self._node]

    @property
    def read_here(self) -> list[SharedBlock]:
        """Blocks that some rank of this node reads, for other nodes too."""
        return [one for one in self._dealt if one.node == self._node]

    def coming_from(self, node: int) -> list[SharedBlock]:
        """Blocks that another node reads, and some rank of this one wants."""
        return [one for one in self._dealt if one.node == node != self._node]

    # --- counters, each in a line of its own

    def _come(self, member: int) -> int:
        return member * self._shape.area_nbytes // 8

    def _done(self, member: int) -> int:
        return self._come(member) + _LINE // 8

    def _ready(self, number: int) -> int:
        return (self._shape.ready_offset + number % self._shape.buffers * _LINE) // 8

    def _bitmap(self, member: int) -> memoryview:
        start = member * self._shape.area_nbytes + 2 * _LINE
        return self._memory.view[start : start + self._shape.bitmap_nbytes]

    # --- the beginning

    def meet(self, wanted: Collection[int], ask_nodes: Callable[[bytes], Mapping[int, bytes]] | None = None) -> bool:
        """Tells what this rank wants and hears the others; False when not all of them came. Blocks.

        ask_nodes: of the first rank; is given what this node wants, returns it of those other nodes that answer.
        """
        shape, ranks = self._shape, range(self._shape.ranks)
        self._tell(self._index, bits_of(set(wanted), shape.total))
        met = self._wait(lambda: all(self._words[self._come(m)] for m in ranks), _MEET_S)
        with contextlib.suppress(FileNotFoundError):  # the first who knows that all are there
            os.unlink(self._path)
        if not met:
            return False
        wants = [bytes(self._bitmap(member)) for member in ranks]
        if self.first:
            self._keep_places(ask_nodes(union(wants)) if ask_nodes is not None else {})
        others = [node for node in range(shape.nodes) if node != self._node]
        if not self._wait(lambda: all(self._words[self._come(self._place(n))] for n in others), 2 * NODES_MEET_S):
            return False
        self._dealt = deal(wants, self._nodes_want(), self._node, self._blocks.nbytes)
        if self.first:
            self._see_off([node for node in others if not self.sent_to(node)])
        return True

    def _tell(self, member: int, bits: bytes, come: int = _COME) -> None:
        self._bitmap(member)[:] = bits
        self._words[self._come(member)] = come

    def _keep_places(self, answers: Mapping[int, bytes]) -> None:
        """Puts down for each other node what it wants, or that it is not with us."""
        nothing = bytes(self._shape.bitmap_nbytes)
        for node in range(self._shape.nodes):
            if node not in answers:
                self._words[self._done(self._place(node))] = _LEFT
            self._tell(self._place(node), answers.get(node, nothing), _COME if node in answers else _ABSENT)

    def _place(self, node: int) -> int:
        return self._shape.ranks + node

    def _nodes_want(self) -> list[bytes | None]:
        places = [self._place(node) for node in range(self._shape.nodes)]
        return [bytes(self._bitmap(m)) if self._words[self._come(m)] == _COME else None for m in places]

    @property
    def agreed(self) -> bytes:
        """What nodes must have alike to read together: a digest of what each wants."""
        wants = self._nodes_want()
        wants[self._node] = union([bytes(self._bitmap(member)) for member in range(self._shape.ranks)])
        return digest(self._mark + b"".join(b"-" if bits is None else b"+" + bits for bits in wants))

    # --- blocks

    def fill(self, one: SharedBlock, read: Callable[[Buffer], None]) -> None:
        """Has read fill a buffer with a block that is this rank's to fill. Blocks until one is free. For threads.

        What read raises is told to the others as a block that they must read themselves, and raised.
        """
        if not self._is_free(one.number - self._shape.buffers):
            self._tell_of(one.number, _LOST)
            return
        fate = _FAILED
        try:
            read(self._buffer(one.number))
            fate = _GOOD
        finally:
            self._tell_of(one.number, fate)

    def _is_free(self, before: int) -> bool:
        """Waits until nobody needs block number before, whose buffer it is, nor writes to it any more."""
        if self._wait(lambda: self._is_done_with(before) and not self._late(before), _NODE_PATIENCE_S):
            return self._fate(before) != _LOST
        late = self._late(before)
        if late and all(member >= self._shape.ranks for member in late):  # other nodes are not waited for for ever
            for member in late:
                self._words[self._done(member)] = _LEFT
        free = self._wait(lambda: self._is_done_with(before) and not self._late(before), _NODE_PATIENCE_S)
        return free and self._fate(before) != _LOST

    def _late(self, number: int) -> list[int]:
        """Members that may still want the block."""
        own = self._place(self._node)
        return [m for m in range(self._shape.members) if m != own and self._words[self._done(m)] <= number]

    def _is_done_with(self, number: int) -> bool:
        """Whether who fills the block has said what became of it."""
        return number < 0 or self._words[self._ready(number)] >> 2 == number + 1

    def _fate(self, number: int) -> int:
        return self._words[self._ready(number)] & 3 if number >= 0 else _GOOD

    def _tell_of(self, number: int, fate: int) -> None:
        word = self._ready(number)
        if self._words[word] >> 2 <= number + 1:  # else others went on without this one
            self._words[word] = (number + 1) << 2 | fate

    def take(self, one: SharedBlock) -> Buffer | None:
        """The block, checked by whoever read it, until released; None: read it yourself. Blocks."""
        self._words[self._done(self._index)] = one.number  # what lies before it is taken, or not wanted here
        if not self._wait(lambda: self._is_done_with(one.number), _PATIENCE_S):
            self._given_up.set()  # from here on, alone
            return None
        return self._buffer(one.number) if self._fate(one.number) == _GOOD else None

    def release(self, one: SharedBlock) -> None:
        """This rank has what it wants of this block and of all before it."""
        self._words[self._done(self._index)] = one.number + 1

    def leave(self) -> None:
        """This rank wants nothing more, and keeps nobody waiting for it."""
        self._given_up.set()
        self.done()

    def done(self) -> None:
        """This rank has all it wants; it may still fill what others want."""
        self._words[self._done(self._index)] = _LEFT

    # --- other nodes, whose places the first rank keeps

    def take_for(self, node: int, one: SharedBlock) -> Buffer | None:
        """As take, for another node that is sent the block. None: there is none, or the node was given up."""
        word = self._done(self._place(node))
        if self._words[word] == _LEFT:
            return None
        self._words[word] = one.number
        there = self._wait(lambda: self._is_done_with(one.number), _PATIENCE_S)
        return self._buffer(one.number) if there and self._fate(one.number) == _GOOD else None

    def sent_to(self, node: int) -> list[SharedBlock]:
        """Blocks that are read here and another node wants too."""
        bits = bytes(self._bitmap(self._place(node)))
        return [one for one in self.read_here if bits[one.block // 8] >> one.block % 8 & 1]

    def sent(self, node: int, last: int) -> None:
        """All that was asked for was sent; last: number of the last block that the node wants of here."""
        if self._words[self._done(self._place(node))] >= last:
            self.left(node)

    def left(self, node: int) -> None:
        """It wants nothing more."""
        self._see_off([node])

    def _see_off(self, nodes: Iterable[int]) -> None:
        for node in nodes:
            self._words[self._done(self._place(node))] = _LEFT

    def wait_for_nodes(self) -> None:
        """Blocks until no other node wants anything, or the first of them stands still for too long."""
        places = [self._place(node) for node in range(self._shape.nodes) if node != self._node]

        def standing() -> list[int]:
            return [self._words[self._done(place)] for place in places]

        while min(standing(), default=_LEFT) != _LEFT:
            before = standing()
            if not self._wait(lambda before=before: standing() != before, _PATIENCE_S):  # type: ignore[misc]
                return

    def _buffer(self, number: int) -> Buffer:
        start = self._shape.buffers_offset + number % self._shape.buffers * BLOCK_NBYTES
        return Buffer(self._memory.address + start, self._memory.view[start : start + BLOCK_NBYTES])

    def _wait(self, there: Callable[[], bool], patience_s: float) -> bool:
        deadline, pause = time.monotonic() + patience_s, _PAUSES_S[0]
        while not there():
            if self._given_up.is_set() or time.monotonic() >= deadline:
                return False
            time.sleep(pause)
            pause = min(2 * pause, _PAUSES_S[1])
        return True
