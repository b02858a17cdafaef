"""XXH3-128 over blocks of 16 MiB: the one digest of slots, files and records."""

from collections.abc import Iterator

import xxhash

BLOCK_NBYTES = 16 << 20
DIGEST_NBYTES = 16
KIND = "xxh3-128/16MiB"


def digest(data: bytes | bytearray | memoryview) -> bytes:
    """XXH3-128 of data, 16 bytes, big-endian. Releases the GIL while it reads large buffers."""
    return xxhash.xxh3_128_digest(data)


class Digest:
    """The same digest of a block that comes in parts."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()

    def update(self, part: memoryview) -> None:
        """Takes in the next part. Releases the GIL for large ones."""
        self._hash.update(part)

    def value(self) -> bytes:
        """What digest gives for all parts so far, end to end."""
        return self._hash.digest()


def block_count(nbytes: int) -> int:
    """Blocks that cover nbytes; the last one may be short. 0 for 0."""
    return -(-nbytes // BLOCK_NBYTES)


def blocks(nbytes: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of each block of a file of nbytes."""
    for start in range(0, nbytes, BLOCK_NBYTES):
        yield start, min(start + BLOCK_NBYTES, nbytes)
