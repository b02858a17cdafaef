"""CRC-32 of stretches of a file that is read in blocks, in any order: of each block's piece, put together at the end.

What zlib calls crc32_combine, which Python does not have: a CRC is a polynomial over GF(2), and to append n bytes is to
multiply it by x to the power of 8n, modulo the CRC's own.
"""

import threading
import zlib
from collections.abc import Sequence
from typing import NamedTuple

from ckptd.shared.base.errors import DamagedError
from ckptd.shared.format.digest import BLOCK_NBYTES

_MODULUS = 0xEDB88320
_ONE, _X8 = 1 << 31, 1 << 23  # the lowest power comes in the highest bit


class Stretch(NamedTuple):
    """Bytes of a file, and their CRC."""

    name: str
    start: int
    nbytes: int
    crc: int


class Crcs:
    """The stretches of one file, while its blocks come by. May be called from several threads."""

    def __init__(self, path: str, stretches: Sequence[Stretch]) -> None:
        self._path = path
        self._pieces: list[tuple[Stretch, dict[int, int]]] = [(stretch, {}) for stretch in stretches]
        self._lock = threading.Lock()

    def see(self, index: int, block: memoryview) -> None:
        """A block of the file."""
        base = index * BLOCK_NBYTES
        for stretch, pieces in self._pieces:
            first, stop = max(stretch.start, base), min(stretch.start + stretch.nbytes, base + len(block))
            if first < stop:
                with block[first - base : stop - base] as piece:
                    crc = zlib.crc32(piece)
                with self._lock:
                    pieces[index] = crc

    def check(self) -> None:
        """Raises DamagedError for a stretch that came by whole and has another CRC. One that did not is not checked."""
        for stretch, pieces in self._pieces:
            found = _joined(stretch, pieces)
            if found is not None and found != stretch.crc:
                raise DamagedError(
                    f"{self._path}: {stretch.name} (bytes {stretch.start} to {stretch.start + stretch.nbytes - 1}): "
                    "CRC-32 does not match, the bytes are damaged",
                    hint="take another checkpoint, or copy the file again from where it was written",
                )


def _joined(stretch: Stretch, pieces: dict[int, int]) -> int | None:
    """The CRC of all pieces, None when some are missing."""
    stop = stretch.start + stretch.nbytes
    crc = 0
    for index in range(stretch.start // BLOCK_NBYTES, -(-stop // BLOCK_NBYTES)):
        if index not in pieces:
            return None
        begin, end = max(stretch.start, index * BLOCK_NBYTES), min(stop, (index + 1) * BLOCK_NBYTES)
        crc = combined(crc, pieces[index], end - begin)
    return crc


def combined(first: int, second: int, nbytes: int) -> int:
    """CRC of two pieces end to end, from theirs. nbytes: of the second."""
    power, square = _ONE, _X8
    while nbytes:
        if nbytes & 1:
            power = _product(power, square)
        square = _product(square, square)
        nbytes >>= 1
    return _product(power, first) ^ second


def _product(one: int, other: int) -> int:
    """Of polynomials, modulo the CRC's."""
    product = 0
    for bit in range(31, -1, -1):
        if one >> bit & 1:
            product ^= other
        other = other >> 1 ^ (_MODULUS if other & 1 else 0)
    return product
