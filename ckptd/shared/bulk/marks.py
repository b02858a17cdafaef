"""Marks in a frame's header, and behind a request, that prove its sender. No socket.

Without a key: XXH3 with a seed of the connection, of frames whose bytes are checked at once. It finds what the wire
damaged, and no attacker. With one: a MAC of every ask and every frame, by BLAKE3 with a key of this connection
and direction, over a number that counts them, their kind and length, and all their bytes. What is altered, injected,
played again, left out, or put in another order has another number, key or byte, and is refused.

TLS with a pre-shared key would do the same and hide the bytes, but Python has it from 3.13 on only; and what stands
between two daemons is a link with a secret of both already (decisions/0033).
"""

import hmac
import struct
from typing import Final, Protocol

import xxhash

from ckptd.shared.bulk import wire
from ckptd.shared.format.integrity import Hasher, Integrity, Keyed

_NUMBERED: Final = struct.Struct("<Q4sI")  # number, kind, length
ASK: Final = b"ASK "


class Marks(Protocol):
    """Of one direction of one connection, in the order in which they are made or checked."""

    def begin(self, kind: bytes, nbytes: int, *, checked: bool = True) -> Hasher | None:
        """Takes in the bytes of the next frame; None for one whose bytes are compared elsewhere."""


def mark(marks: Marks, kind: bytes, data: memoryview | bytes = b"", *, checked: bool = True) -> bytes:
    """The mark for the header of the next frame."""
    running = marks.begin(kind, len(data), checked=checked)
    if running is None:
        return b""
    running.update(memoryview(data))
    return running.value()


def is_right(found: bytes, running: Hasher | None) -> bool:
    """Whether the bytes that running has taken in are those that the mark was made of."""
    return running is None or hmac.compare_digest(found, running.value())


class _Seeded:
    def __init__(self, seed: int) -> None:
        self._seed = seed

    def begin(self, kind: bytes, nbytes: int, *, checked: bool = True) -> Hasher | None:
        """Only of data that are checked at once."""
        del nbytes
        return Hasher(xxhash.xxh3_128(seed=self._seed)) if checked and kind == wire.DATA else None


class _Numbered:
    def __init__(self, keyed: Keyed) -> None:
        self._keyed = keyed
        self._number = 0

    def begin(self, kind: bytes, nbytes: int, *, checked: bool = True) -> Hasher | None:
        """Of everything."""
        del checked
        running = self._keyed.hasher()
        running.update(memoryview(_NUMBERED.pack(self._number, kind, nbytes)))
        self._number += 1
        return running


def marks_of(integrity: Integrity, secret: bytes, link: str, counter: int, side: bytes) -> Marks:
    """Of what the side (b"c" or b"s") of the connection sends. secret: of the link."""
    if integrity.keyed:
        return _Numbered(Keyed(wire.proof(secret, link, counter, b"key " + side, integrity)))
    return _Seeded(int.from_bytes(wire.proof(secret, link, counter, b"d", integrity)[:8], "little"))
