"""Ranks of one node read a checkpoint on the store together: each block once, into memory that all of them see.

They meet at a file in the arena that is gone from its directory once all have it open. Each tells which blocks it
wants; from that every one knows, without another word, which blocks several want and who reads each. A block is read
and checked by one rank into one of a few buffers, and copied out by all who want it. A rank that fails, dies or dawdles
costs the others some patience: they read the rest by themselves.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from ckptd.mapping import Mapping
from ckptd.protocol.digest import BLOCK_NBYTES, digest
from ckptd.protocol.ids import SaveId
from ckptd.protocol.places import board_name
from ckptd.protocol.slot import align_up

_MEET_S: Final = 5.0  # how long the others are waited for in the beginning
_PATIENCE_S: Final = 20.0  # and for a block, or a buffer, later
_PAUSES_S: Final = (0.0002, 0.002)
_SPARE_BUFFERS: Final = 2  # beyond one for each rank
_LINE: Final = 64  # bytes of a counter: no two in one cache line


class Buffer(NamedTuple):
    """Memory for one block, whole pages."""

    address: int
    view: memoryview


class SharedBlock(NamedTuple):
    """A block that several ranks of the node want. number: in the order in which they are read."""

    block: int
    number: int
    mine: bool  # to read


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where ranks meet. readers: the ranks of this node that were sent to read the save from the store."""

    directory: str  # of the job in the arena
    session: str
    save: SaveId
    readers: tuple[int, ...]
    rank: int

    def board(self, wanted: Collection[int], total: int) -> "Board | None":
        """The board, when all have come; None: read alone. wanted: of the checkpoint's total blocks. Blocks."""
        if len(self.readers) < 2 or self.rank not in self.readers or not wanted:  # noqa: PLR2004 - two are company
            return None
        names = f"{self.session} {self.save.text} {self.readers} {total}"
        path = os.path.join(self.directory, board_name(digest(names.encode()).hex()[:16]))
        shape = _Shape(len(self.readers), total)
        try:
            mapping = _open(path, shape)
        except OSError:  # no memory, say
            return None
        board = Board(mapping, shape, self.readers.index(self.rank))
        met = board.meet(wanted)
        with contextlib.suppress(FileNotFoundError):  # the first who knows that all are there
            os.unlink(path)
        return board if met else None


class _Shape(NamedTuple):
    members: int
    total: int

    @property
    def bitmap_nbytes(self) -> int:
        return align_up(-(-self.total // 8), _LINE)

    @property
    def area_nbytes(self) -> int:
        """A counter for who has come, one for how far it is, and what it wants."""
        return 2 * _LINE + self.bitmap_nbytes

    @property
    def buffers(self) -> int:
        return self.members + _SPARE_BUFFERS

    @property
    def ready_offset(self) -> int:
        return self.members * self.area_nbytes

    @property
    def buffers_offset(self) -> int:
        return align_up(self.ready_offset + self.buffers * _LINE, 2 << 20)

    @property
    def nbytes(self) -> int:
        return self.buffers_offset + self.buffers * BLOCK_NBYTES


def _open(path: str, shape: _Shape) -> Mapping:
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


def _mapped(path: str, shape: _Shape) -> Mapping:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        if os.fstat(fd).st_size != shape.nbytes:
            raise FileNotFoundError(path)
        return Mapping(fd, shape.nbytes)
    finally:
        os.close(fd)


class Board:
    """One rank's view of the board."""

    def __init__(self, mapping: Mapping, shape: _Shape, index: int) -> None:
        self._mapping, self._shape, self._index = mapping, shape, index
        self._words = mapping.view[: shape.buffers_offset].cast("Q")
        self._given_up = threading.Event()
        self.shared: list[SharedBlock] = []

    # --- counters, each in a line of its own

    def _come(self, member: int) -> int:
        return member * self._shape.area_nbytes // 8

    def _done(self, member: int) -> int:
        return self._come(member) + _LINE // 8

    def _ready(self, number: int) -> int:
        return (self._shape.ready_offset + number % self._shape.buffers * _LINE) // 8

    def _bitmap(self, member: int) -> memoryview:
        start = member * self._shape.area_nbytes + 2 * _LINE
        return self._mapping.view[start : start + self._shape.bitmap_nbytes]

    # --- the beginning

    def meet(self, wanted: Collection[int]) -> bool:
        """Tells what this rank wants and hears the others; False when not all of them came."""
        bits = self._bitmap(self._index)
        for block in wanted:
            bits[block // 8] |= 1 << block % 8
        self._words[self._come(self._index)] = 1
        members = range(self._shape.members)
        if not self._wait(lambda: all(self._words[self._come(m)] for m in members), _MEET_S):
            return False
        self.shared = self._dealt([bytes(self._bitmap(member)) for member in members])
        return True

    def _dealt(self, bitmaps: Sequence[bytes]) -> list[SharedBlock]:
        """Blocks that more than one want, each to the member that has the fewest to read so far. The same on all."""
        load = [0] * len(bitmaps)
        found: list[SharedBlock] = []
        number = 0
        for block in range(self._shape.total):
            who = [m for m, bits in enumerate(bitmaps) if bits[block // 8] >> block % 8 & 1]
            if len(who) > 1:
                reader = min(who, key=lambda m: (load[m], m))
                load[reader] += 1
                if self._index in who:
                    found.append(SharedBlock(block, number, reader == self._index))
                number += 1
        return found

    # --- blocks

    def fill(self, one: SharedBlock, read: Callable[[Buffer], None]) -> None:
        """Has read fill a buffer with a block that is this rank's to read. Blocks until one is free. For threads.

        What read raises is told to the others as a block that they must read themselves.
        """
        members = range(self._shape.members)
        limit = one.number - self._shape.buffers
        if not self._wait(lambda: all(self._words[self._done(m)] > limit for m in members), _PATIENCE_S):
            return
        failed = 1
        try:
            read(self._buffer(one.number))
            failed = 0
        finally:
            self._words[self._ready(one.number)] = (one.number + 1) << 1 | failed

    def take(self, one: SharedBlock) -> Buffer | None:
        """The block, checked by whoever read it, until released; None: read it yourself. Blocks."""
        self._words[self._done(self._index)] = one.number  # what lies before it is taken, or not wanted here
        word = self._ready(one.number)
        if not self._wait(lambda: self._words[word] >> 1 > one.number, _PATIENCE_S):
            return None
        return None if self._words[word] & 1 else self._buffer(one.number)

    def release(self, one: SharedBlock) -> None:
        """This rank has what it wants of this block and of all before it."""
        self._words[self._done(self._index)] = one.number + 1

    def leave(self) -> None:
        """This rank wants nothing more, and keeps nobody waiting for it."""
        self._given_up.set()
        self._words[self._done(self._index)] = (1 << 63) - 1

    def _buffer(self, number: int) -> Buffer:
        start = self._shape.buffers_offset + number % self._shape.buffers * BLOCK_NBYTES
        return Buffer(self._mapping.address + start, self._mapping.view[start : start + BLOCK_NBYTES])

    def _wait(self, there: Callable[[], bool], patience_s: float) -> bool:
        deadline, pause = time.monotonic() + patience_s, _PAUSES_S[0]
        while not there():
            if self._given_up.is_set() or time.monotonic() >= deadline:
                self._given_up.set()  # from here on, alone
                return False
            time.sleep(pause)
            pause = min(2 * pause, _PAUSES_S[1])
        return True
