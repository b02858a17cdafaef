"""The shared memory of a node group: the layout of its file, its counters.

The counters come first; their place depends on the number of ranks alone. So a rank enters, and may decline, before it
knows the checkpoint's blocks. Then come what each member wants, and the buffers.
"""

import os
from typing import Final, NamedTuple

from ckptd.shared.files.mapping import Mapping as Memory
from ckptd.shared.format.digest import BLOCK_NBYTES
from ckptd.shared.format.slot import align_up

_LINE: Final = 64  # bytes of a counter: no two counters share a cache line
_COUNTERS: Final = 7  # of a member
_SPARE_BUFFERS: Final = 2  # more than one for each member
_MAX_BUFFERS: Final = 18
# States of a member, in this order. A rank declines in place of joining; it is gone after it joined.
ABSENT, ENTERED, JOINED, AGREED, GONE, DECLINED = range(6)
LEFT: Final = (1 << 63) - 1  # position of a member that wants nothing more


class Layout(NamedTuple):
    """Members: the ranks of this node, then, if there are any, the other nodes, as one. total: blocks.

    Methods give indexes of counters.
    """

    ranks: int
    others: bool
    total: int = 0

    @property
    def members(self) -> int:
        """How many there are."""
        return self.ranks + self.others

    @property
    def buffers(self) -> int:
        """How many there are, of a block each."""
        return _MAX_BUFFERS if self.others else min(self.members + _SPARE_BUFFERS, _MAX_BUFFERS)

    @property
    def counters_nbytes(self) -> int:
        """Bytes of all counters."""
        return (_COUNTERS * self.members + self.buffers) * _LINE

    @property
    def bitmap_nbytes(self) -> int:
        """Bytes of a bitmap of all blocks."""
        return -(-self.total // 8)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole file."""
        return self._buffers_offset + self.buffers * BLOCK_NBYTES

    def state(self, member: int) -> int:
        """ABSENT, ENTERED, JOINED, AGREED, GONE or DECLINED. Of the other nodes: JOINED with the plan, or DECLINED."""
        return self._counter(member, 0)

    def mark(self, member: int) -> int:
        """Of the checkpoint that the member reads; 0 before it has joined."""
        return self._counter(member, 1)

    def position(self, member: int) -> int:
        """The number of the first shared block that the member may still want."""
        return self._counter(member, 2)

    def lost(self, member: int) -> int:
        """Blocks of lower numbers are not kept for the member any more."""
        return self._counter(member, 3)

    def step(self, member: int) -> int:
        """Of the checkpoint that the member reads."""
        return self._counter(member, 4)

    def read(self, member: int) -> int:
        """The number of the read, as the member counts; of the other nodes: the rank that found another checkpoint."""
        return self._counter(member, 5)

    def agreed(self, member: int) -> int:
        """A digest of all that the member made its schedule from."""
        return self._counter(member, 6)

    def content(self, number: int) -> int:
        """The block whose bytes are in the buffer of a block, + 1."""
        return self.ready(number) + 1

    def ready(self, number: int) -> int:
        """The block that was last in the buffer of a block: its number + 1, times 4, and its outcome."""
        return (_COUNTERS * self.members + number % self.buffers) * _LINE // 8

    def bitmap(self, member: int, *, second: bool = False) -> slice:
        """What the member wants. Of the other nodes: what comes from them; the second: what goes to them."""
        start = self.counters_nbytes + (2 * member + second) * align_up(self.bitmap_nbytes, _LINE)
        return slice(start, start + self.bitmap_nbytes)

    def buffer(self, number: int) -> slice:
        """The buffer of a block."""
        start = self._buffers_offset + number % self.buffers * BLOCK_NBYTES
        return slice(start, start + BLOCK_NBYTES)

    def _counter(self, member: int, which: int) -> int:
        return (_COUNTERS * member + which) * _LINE // 8

    @property
    def _buffers_offset(self) -> int:
        return align_up(self.bitmap(self.members).start, 2 << 20)


def mapped(fd: int, nbytes: int) -> Memory:
    """The first bytes of the group's file, which becomes larger, zeros, where needed. Raises OSError."""
    if os.fstat(fd).st_size < nbytes:
        os.posix_fallocate(fd, 0, nbytes)  # else a full tmpfs would be SIGBUS later
    return Memory(fd, nbytes)
