"""The members of a set of ranks in few bytes: any slice of a mesh is some 10 of them, whatever its size. Pure.

A block is a first rank and, for each dimension from the innermost on, a count and a step. A set is its blocks in order
of their first ranks, each number in groups of 7 bits. Equal sets have equal bytes, so they are compared as bytes.
"""

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ckptd.shared.base.ids import MAX_RANKS

MAX_MEMBERS_NBYTES = 768  # of all sets of a rank: its seal is a page
NOBODY = b""
_LEAST = 2  # ranks in a dimension
_MORE = 0x80
_KEPT = 1024  # sets


class _Block(NamedTuple):
    first: int
    dims: tuple[tuple[int, int], ...] = ()  # count and step, from the innermost on

    @property
    def size(self) -> int:
        found = 1
        for count, _ in self.dims:
            found *= count
        return found

    @property
    def last(self) -> int:
        return self.first + sum((count - 1) * step for count, step in self.dims)


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


def _numbers(members: bytes) -> Iterator[int]:
    number = shift = 0
    for byte in members:
        number |= (byte & 0x7F) << shift
        shift += 7
        if not byte & _MORE:
            yield number
            number = shift = 0
        elif number >= MAX_RANKS or shift > MAX_RANKS.bit_length():
            raise ValueError("a number beyond all ranks")
    if shift:
        raise ValueError("members that end within a number")


@functools.lru_cache(_KEPT)
def _blocks_in(members: bytes) -> tuple[_Block, ...]:
    numbers, blocks, before, total = _numbers(members), list[_Block](), 0, 0
    for delta in numbers:
        dims = [(next(numbers, 0), next(numbers, 0)) for _ in range(min(next(numbers, 0), MAX_RANKS.bit_length()))]
        block = _Block(before + delta, tuple(dims))
        if any(count < _LEAST or step < 1 for count, step in dims) or block.last >= MAX_RANKS:
            raise ValueError("members that are no ranks of a job")
        total += block.size
        if total > MAX_RANKS:
            raise ValueError(f"members that are more than {MAX_RANKS} ranks")
        blocks.append(block)
        before = block.first
    return tuple(blocks)


def check_members(members: bytes) -> None:
    """Raises ValueError for bytes that are no set. Makes no list of its ranks: a few bytes name a million."""
    _blocks_in(members)


def count_of(members: bytes) -> int:
    """The number of members."""
    return sum(block.size for block in _blocks_in(members))


@functools.lru_cache(_KEPT)
def ranks_in(members: bytes) -> tuple[int, ...]:
    """The members, ascending: as many as count_of says. Raises ValueError for bytes that are no set."""
    return tuple(sorted(rank for block in _blocks_in(members) for rank in _ranks_of(block)))


def _ranks_of(block: _Block) -> Iterable[int]:
    found = [block.first]
    for count, step in block.dims:
        found = [rank + number * step for number in range(count) for rank in found]
    return found
