"""XXH3-128 over blocks of 16 MiB: the one digest of slots, files and records."""

from collections.abc import Iterator

import xxhash

BLOCK_NBYTES = 16 << 20
DIGEST_NBYTES = 16
KIND = "xxh3-128/16MiB"


def digest(data: bytes | bytearray | memoryview) -> bytes:
    """XXH3-128 of data, 16 bytes, big-endian. Releases the GIL while it reads large buffers."""
    return xxhash.xxh3_128_digest(data)


def block_count(nbytes: int) -> int:
    """Blocks that cover nbytes; the last one may be short. 0 for 0."""
    return -(-nbytes // BLOCK_NBYTES)


def blocks(nbytes: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of each block of a file of nbytes."""
    for start in range(0, nbytes, BLOCK_NBYTES):
        yield start, min(start + BLOCK_NBYTES, nbytes)
