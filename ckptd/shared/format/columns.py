"""Whole numbers in columns, each as wide as its largest number needs, and squeezed together. Pure."""

import sys
import zlib
from array import array
from collections.abc import Iterable, Sequence

import msgspec

from ckptd.shared.base.errors import DamagedError

_CODES = {1: "B", 2: "H", 4: "I", 8: "Q"}
_MAX = 1 << 62
_LEAST_NBYTES = 1 << 20  # that anything may swell to
_MAX_RATIO = 64  # beyond that: a few bytes must not claim memory without end
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[bytes])


def column(numbers: Sequence[int]) -> bytes:
    """Numbers from 0 to 2^62-1: the width of one, then all, little-endian. Raises OverflowError."""
    largest = max(numbers, default=0)
    width = next(width for width in (1, 2, 4, 8) if largest < 1 << (8 * width))
    found = array(_CODES[width], numbers)
    if sys.byteorder == "big":
        found.byteswap()
    return bytes([width]) + found.tobytes()


def numbers_in(data: bytes, count: int, where: str) -> Sequence[int]:
    """The numbers of a column that must have count of them. Raises DamagedError."""
    width = data[0] if data else 0
    if width not in _CODES or len(data) != 1 + count * width:
        raise DamagedError(f"{where}: layout: a column of {len(data)} bytes, not of {count} numbers")
    found = array(_CODES[width])
    found.frombytes(data[1:])
    if sys.byteorder == "big":
        found.byteswap()
    if width == 8 and max(found, default=0) >= _MAX:  # noqa: PLR2004 - the widest
        raise DamagedError(f"{where}: layout: a number beyond 2^62")
    return found


def signed(numbers: Iterable[int]) -> list[int]:
    """Numbers of either sign as such without: 0, -1, 1, -2 become 0, 1, 2, 3."""
    return [2 * number if number >= 0 else -2 * number - 1 for number in numbers]


def unsigned(numbers: Iterable[int]) -> list[int]:
    """The other way round."""
    return [number >> 1 if not number & 1 else -(number >> 1) - 1 for number in numbers]


def squeezed(parts: Sequence[bytes]) -> bytes:
    """Parts as one, deflated."""
    raw = _encoder.encode(parts)
    data = zlib.compress(raw, 6)
    return data if len(raw) <= most_nbytes(data) else zlib.compress(raw, 0)


def most_nbytes(data: bytes) -> int:
    """What deflated data may swell to at most."""
    return _LEAST_NBYTES + _MAX_RATIO * len(data)


def swollen(data: bytes, where: str) -> bytes:
    """Deflated data as it was. Raises DamagedError for what is none, or claims too much memory."""
    machine = zlib.decompressobj()
    try:
        found = machine.decompress(data, most_nbytes(data))
    except zlib.error as error:
        raise DamagedError(f"{where}: layout is not readable: {error}") from error
    if not machine.eof or machine.unused_data:
        raise DamagedError(f"{where}: layout is not readable: it does not end where it should")
    return found


def parts_in(data: bytes, count: int, where: str) -> list[bytes]:
    """The parts that were squeezed, which must be so many. Raises DamagedError."""
    try:
        parts = _decoder.decode(swollen(data, where))
    except (msgspec.DecodeError, RecursionError) as error:
        raise DamagedError(f"{where}: layout is not readable: {error}") from error
    if len(parts) != count:
        raise DamagedError(f"{where}: layout: {len(parts)} columns, not {count}")
    return parts
