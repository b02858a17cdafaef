"""A node's column: its segments end to end, and where in which slot each byte of it lies. Pure.

A segment is the slot's bytes before its seals that a digest vouches for. The padding between image and tail has none:
it counts as zeros, whatever lies there.
"""

from collections.abc import Iterator
from typing import NamedTuple

from ckptd.shared.format.digest import BLOCK_NBYTES
from ckptd.shared.format.slot import Seal
from ckptd.shared.protocol.parity_types import DataColumn

TAIL = -1  # the block number of all that follows the padding


class Span(NamedTuple):
    """Bytes of one block of one segment (or of its tail), and where in the range that was asked for they belong."""

    seal: Seal
    block: int
    offset: int  # in the slot
    nbytes: int
    at: int


def column_nbytes(column: DataColumn) -> int:
    """Bytes of the column, not padded to the longest."""
    return sum(seal.content_nbytes for seal in column.seals)


def start_of(column: DataColumn, rank: int) -> int:
    """Where in the column the rank's segment begins. Raises KeyError when it has none there."""
    start = 0
    for seal in column.seals:
        if seal.rank == rank:
            return start
        start += seal.content_nbytes
    raise KeyError(rank)


def spans(column: DataColumn, start: int, stop: int) -> Iterator[Span]:
    """What lies in column bytes start to stop, in order. What no span covers is zeros."""
    base = 0
    for seal in column.seals:
        first, last = max(start, base), min(stop, base + seal.content_nbytes)
        if first < last:
            for block, offset, nbytes in cuts(seal, first - base, last - base):
                yield Span(seal, block, offset, nbytes, base + offset - start)
        base += seal.content_nbytes


def cuts(seal: Seal, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """(block, offset, nbytes) of the parts of segment bytes start to stop that have a digest."""
    offset, end = start, min(stop, seal.image_nbytes)
    while offset < end:
        block = offset // BLOCK_NBYTES
        nbytes = min(end, (block + 1) * BLOCK_NBYTES) - offset
        yield block, offset, nbytes
        offset += nbytes
    offset = max(start, seal.table_offset)
    if offset < stop:
        yield TAIL, offset, stop - offset


def block_range(seal: Seal, block: int) -> tuple[int, int]:
    """Start and stop of a block in its slot."""
    if block == TAIL:
        return seal.table_offset, seal.content_nbytes
    return block * BLOCK_NBYTES, min((block + 1) * BLOCK_NBYTES, seal.image_nbytes)
