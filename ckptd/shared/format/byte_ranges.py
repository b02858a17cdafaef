"""Ranges of bytes, start and stop each, as lists that ascend and do not touch. Pure."""

import bisect
from collections.abc import Iterable, Iterator
from struct import Struct

Ranges = list[tuple[int, int]]
_PAIR = Struct("<QQ")
RANGE_NBYTES = _PAIR.size


def merged(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """The same bytes in as few ranges as can be."""
    found: Ranges = []
    for start, stop in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        elif start < stop:
            found.append((start, stop))
    return found


def without(ranges: Ranges, there: Ranges) -> Ranges:
    """What of the ranges is not there."""
    stops = [stop for _, stop in there]
    out: Ranges = []
    for start, stop in ranges:
        at = start
        for index in range(bisect.bisect_right(stops, start), len(there)):
            first, last = there[index]
            if first >= stop:
                break
            if at < first:
                out.append((at, first))
            at = last
        if at < stop:
            out.append((at, stop))
    return out


def packed(ranges: Iterable[tuple[int, int]]) -> bytes:
    """RANGE_NBYTES of each: its start and its number of bytes, little-endian."""
    return b"".join(_PAIR.pack(start, stop - start) for start, stop in ranges)


def unpacked(data: bytes) -> Iterator[tuple[int, int]]:
    """The ranges in the bytes, whose number is a multiple of RANGE_NBYTES."""
    return ((start, start + nbytes) for start, nbytes in _PAIR.iter_unpack(data))
