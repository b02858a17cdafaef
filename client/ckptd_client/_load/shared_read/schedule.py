"""Which blocks several ranks want that read a checkpoint together, and who reads each. Pure: all come to the same.

The ranks of a node are its members. Each node knows of its own members what each wants, and of other nodes what they
want as a whole. A block that several nodes want is read by one of these; the others get it from there.
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
        """How many there are."""
        return self._bases[-1]

    def number(self, rank: int, index: int) -> int:
        """Of a block of a rank's image."""
        return self._bases[rank] + index

    def place(self, block: int) -> tuple[int, int]:
        """The rank of the image, and which block of it."""
        rank = bisect_right(self._bases, block) - 1
        return rank, block - self._bases[rank]

    def at(self, rank: int, offset: int) -> int:
        """The block that holds a byte of a rank's image."""
        return self.number(rank, offset // BLOCK_NBYTES)

    def offset(self, block: int) -> int:
        """Of its first byte in its image."""
        return self.place(block)[1] * BLOCK_NBYTES

    def image_nbytes(self, rank: int) -> int:
        """Of a rank's image; 0 when there is none."""
        return self._sizes[rank] if rank < len(self._sizes) else 0

    def nbytes(self, block: int) -> int:
        """Less than a whole block at the end of an image only."""
        rank, index = self.place(block)
        return min(BLOCK_NBYTES, self._sizes[rank] - index * BLOCK_NBYTES)


class SharedBlock(NamedTuple):
    """A block that several want, as a node deals it."""

    block: int
    number: int  # in the order in which this node shares them
    reader: int  # the member that fills its buffer here
    node: int  # the node that reads it from the store
    wanted: tuple[int, ...]  # the members that want it


def deal(
    members: Sequence[bytes], others: Sequence[bytes | None], own: int, nbytes: Callable[[int], int]
) -> list[SharedBlock]:
    """The blocks that this node shares, in the order in which they are read.

    members: what each member wants; others: what each node wants (entry own is not looked at; None: it does not take
    part). Bit b of byte b // 8 stands for block b. What comes from another node is filled by member 0. nbytes: of a
    block; who has the fewest to read so far reads the next.
    """
    nodes = [bits or bytes(len(members[0])) for bits in others]
    nodes[own] = union(members)
    far = _twice(nodes)
    read_by_node, read_by_member = [0] * len(nodes), [0] * len(members)
    found: list[SharedBlock] = []
    for block in _blocks_in(union([far, _twice(members)])):
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
    """What deal takes, of blocks below total."""
    bits = bytearray(-(-total // 8))
    for block in blocks:
        bits[block // 8] |= 1 << block % 8
    return bytes(bits)


def union(wants: Sequence[bytes]) -> bytes:
    """What any of them wants. All are of one length."""
    found = 0
    for bits in wants:
        found |= int.from_bytes(bits, "little")
    return found.to_bytes(len(wants[0]), "little")


def _twice(wants: Sequence[bytes]) -> bytes:
    """What two of them want at least."""
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
