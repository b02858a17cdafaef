"""Which blocks a node's ranks share in a cooperative read, and which rank fills each. Pure: all compute the same.

The ranks of a node are its members. Each knows what each member wants, and what the plan of all nodes says of the node:
which blocks come from other nodes, and which go to some.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from ckptd.shared.format.digest import BLOCK_NBYTES, block_count


class Blocks:
    """The blocks of all images of a checkpoint, numbered one image after the other. sizes: bytes of each image."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self._bases = [0]
        for nbytes in sizes:
            self._bases.append(self._bases[-1] + block_count(nbytes))

    @property
    def lengths(self) -> list[int]:
        """Bytes of each block."""
        return [min(BLOCK_NBYTES, size - at * BLOCK_NBYTES) for size in self._sizes for at in range(block_count(size))]

    @property
    def total(self) -> int:
        """The number of blocks."""
        return self._bases[-1]

    def number(self, rank: int, index: int) -> int:
        """The number of a block of a rank's image."""
        return self._bases[rank] + index

    def place(self, block: int) -> tuple[int, int]:
        """The rank of the image, and the block's index in it."""
        rank = bisect_right(self._bases, block) - 1
        return rank, block - self._bases[rank]

    def at(self, rank: int, offset: int) -> int:
        """The number of the block that holds a byte of a rank's image."""
        return self.number(rank, offset // BLOCK_NBYTES)

    def offset(self, block: int) -> int:
        """The offset of the block in its image."""
        return self.place(block)[1] * BLOCK_NBYTES

    def image_nbytes(self, rank: int) -> int:
        """Bytes of a rank's image; 0 when there is none."""
        return self._sizes[rank] if rank < len(self._sizes) else 0

    def nbytes(self, block: int) -> int:
        """Bytes of the block: less than BLOCK_NBYTES at the end of an image only."""
        rank, index = self.place(block)
        return min(BLOCK_NBYTES, self._sizes[rank] - index * BLOCK_NBYTES)


class SharedBlock(NamedTuple):
    """A block that several members want, or that comes from or goes to another node."""

    block: int
    number: int  # in the order in which this node shares them
    filler: int  # the member that fills its buffer
    comes: bool  # from another node
    wanted: tuple[int, ...]  # the members that want it


def schedule(members: Sequence[bytes], comes: bytes, goes: bytes, nbytes: Callable[[int], int]) -> list[SharedBlock]:
    """The blocks that this node shares, in the order in which its ranks fill them, ascending as on all nodes.

    members: what each member wants; comes: blocks that other nodes send, goes: blocks that they get. Bit b of byte
    b // 8 stands for block b. Member 0 fills the blocks that come. nbytes: of a block; of the members that want a
    block, the one with the fewest bytes so far reads it.
    """
    read = [0] * len(members)
    found: list[SharedBlock] = []
    for block in _blocks_in(union([_wanted_twice(members), comes, goes])):
        wanted = tuple(m for m, bits in enumerate(members) if _has(bits, block))
        far = _has(comes, block)
        if wanted:
            filler = 0 if far else min(wanted, key=lambda m: (read[m], m))
            read[filler] += 0 if far else nbytes(block)
            found.append(SharedBlock(block, len(found), filler, far, wanted))
    return found


def bits_of(blocks: Iterable[int], total: int) -> bytes:
    """A bitmap of blocks below total."""
    bits = bytearray(-(-total // 8))
    for block in blocks:
        bits[block // 8] |= 1 << block % 8
    return bytes(bits)


def union(wants: Sequence[bytes]) -> bytes:
    """A bitmap of the blocks that any of them wants. All have one length."""
    found = 0
    for bits in wants:
        found |= int.from_bytes(bits, "little")
    return found.to_bytes(len(wants[0]), "little")


def _wanted_twice(wants: Sequence[bytes]) -> bytes:
    """A bitmap of the blocks that at least two of them want."""
    once = twice = 0
    for bits in wants:
        one = int.from_bytes(bits, "little")
        twice |= once & one
        once |= one
    return twice.to_bytes(len(wants[0]), "little")


def _has(bits: bytes, block: int) -> bool:
    return bool(bits[block // 8] >> block % 8 & 1)


def _blocks_in(bits: bytes) -> Iterator[int]:
    for at, byte in enumerate(bits):
        if byte:
            yield from (8 * at + bit for bit in range(8) if byte >> bit & 1)
