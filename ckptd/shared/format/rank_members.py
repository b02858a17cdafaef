"""The members of a set of ranks in few bytes: any slice of a mesh is some 10 of them, whatever its size. Pure.

A block is a first rank and, for each dimension from the innermost on, a count and a step. A set is its blocks in order
of their first ranks, each number in groups of 7 bits. Equal sets have equal bytes, so they are compared as bytes.
"""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

from ckptd.shared.base.ids import MAX_RANKS

MAX_MEMBERS_NBYTES = 768  # of all sets of a rank: its seal is a page
NOBODY = b""
_LEAST = 2  # ranks in a dimension
_MORE = 0x80
_BITS = MAX_RANKS.bit_length()
_KEPT = 16_384  # sets


class _Block(NamedTuple):
    first: int
    dims: tuple[tuple[int, int], ...] = ()  # count and step, from the innermost on


def members_of(ranks: Sequence[int]) -> bytes:
    """The set of these ranks, which ascend."""
    blocks = [_Block(rank) for rank in ranks]
    while len(joined := _joined(blocks)) < len(blocks):
        blocks = joined
    numbers: list[int] = []
    before = 0
    for block in blocks:
        numbers += [block.first - before, len(block.dims), *(number for dim in block.dims for number in dim)]
        before = block.first
    return b"".join(map(_packed, numbers))


def _joined(blocks: Sequence[_Block]) -> list[_Block]:
    """Blocks that are alike and equally far apart as one, each run as long as it goes."""
    found: list[_Block] = []
    at = 0
    while at < len(blocks):
        first = blocks[at]
        stop = at + 1
        if stop < len(blocks):
            step = blocks[stop].first - first.first
            while stop < len(blocks) and blocks[stop] == _Block(first.first + (stop - at) * step, first.dims):
                stop += 1
        found.append(first if stop == at + 1 else _Block(first.first, (*first.dims, (stop - at, step))))
        at = stop
    return found


def _packed(number: int) -> bytes:
    found = bytearray()
    while number >= _MORE:
        found.append(number & 0x7F | _MORE)
        number >>= 7
    found.append(number)
    return bytes(found)


def _numbers(members: bytes) -> list[int]:
    found = []
    number = shift = 0
    for byte in members:
        number |= (byte & 0x7F) << shift
        shift += 7
        if byte < _MORE:
            found.append(number)
            number = shift = 0
        elif shift >= _BITS:
            raise ValueError("a number beyond all ranks")
    if shift:
        raise ValueError("members that end within a number")
    return found


@functools.lru_cache(_KEPT)
def _blocks_in(members: bytes) -> tuple[_Block, ...]:
    numbers, blocks, first, total, at = _numbers(members), list[_Block](), 0, 0, 0
    while at < len(numbers):
        first += numbers[at]
        stop = at + 2 + 2 * sum(numbers[at + 1 : at + 2])
        dims = tuple(zip(numbers[at + 2 : stop : 2], numbers[at + 3 : stop : 2], strict=False))
        size, last = 1, first
        for count, step in dims:
            size *= count
            last += (count - 1) * step
            if count < _LEAST or step < 1:
                raise ValueError("members that are no ranks of a job")
        total += size
        if stop > len(numbers) or at + 1 == len(numbers) or last >= MAX_RANKS or total > MAX_RANKS:
            raise ValueError(f"members that are no ranks of a job, which has at most {MAX_RANKS}")
        blocks.append(_Block(first, dims))
        at = stop
    return tuple(blocks)


def check_members(members: bytes) -> None:
    """Raises ValueError for bytes that are no set. Makes no list of its ranks: a few bytes name a million."""
    _blocks_in(members)


def count_of(members: bytes) -> int:
    """The number of members."""
    return sum(math.prod(count for count, _ in dims) for _, dims in _blocks_in(members))


@functools.lru_cache(_KEPT)
def ranks_in(members: bytes) -> tuple[int, ...]:
    """The members, ascending: as many as count_of says. Raises ValueError for bytes that are no set."""
    found: list[int] = []
    for first, dims in _blocks_in(members):
        ranks = [first]
        for count, step in dims:
            ranks = [rank + number * step for number in range(count) for rank in ranks]
        found += ranks
    return tuple(sorted(found))
