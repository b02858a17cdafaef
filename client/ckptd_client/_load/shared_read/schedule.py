"""Which blocks several ranks want, and which rank reads each, in a cooperative read. Pure: all ranks compute the same.

The ranks of a node are its members. Each node knows what each of its own members wants, and what every other node wants
in all. One of the nodes that want a block reads it; the others receive it from there.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
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
    """A block that several members want, as one node schedules it."""

    block: int
    number: int  # in the order in which this node shares them
    reader: int  # the member that fills its buffer here
    node: int  # the node that reads it from the store
    wanted: tuple[int, ...]  # the members that want it


def schedule(
    members: Sequence[bytes], others: Sequence[bytes | None], own: int, nbytes: Callable[[int], int]
) -> list[SharedBlock]:
    """The blocks that this node shares, in the order in which its ranks read them.

    members: what each member wants; others: what each node wants (entry own is ignored; None: it does not take part).
    Bit b of byte b // 8 stands for block b. Member 0 fills the blocks that come from another node. nbytes: of a block;
    the node and the member with the fewest bytes so far read the next block.
    """
    nodes = [bits or bytes(len(members[0])) for bits in others]
    nodes[own] = union(members)
    far = _wanted_twice(nodes)
    read_by_node, read_by_member = [0] * len(nodes), [0] * len(members)
    found: list[SharedBlock] = []
    for block in _blocks_in(union([far, _wanted_twice(members)])):
        node = own
        if _has(far, block):
            node = min((n for n, bits in enumerate(nodes) if _has(bits, block)), key=lambda n: (read_by_node[n], n))
            read_by_node[node] += nbytes(block)
        wanted = tuple(m for m, bits in enumerate(members) if _has(bits, block))
        if wanted:
            reader = min(wanted, key=lambda m: (read_by_member[m], m)) if node == own else 0
            read_by_member[reader] += nbytes(block) if node == own else 0
            found.append(SharedBlock(block, len(found), reader, node, wanted))
    return found


def bits_of(blocks: Sequence[int] | set[int], total: int) -> bytes:
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
