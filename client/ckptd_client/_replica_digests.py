"""Digests of all bytes that this rank holds as others do, each byte read once, where it lies.

The host's memory is hashed by threads that leave the GIL alone. Devices sum theirs up by themselves, in the order of
the caller's stream, and send 8 bytes for each 8 MiB: nothing waits for them until the digest is asked for.
"""

import ctypes
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
import xxhash

from ckptd.protocol.shares import ON_DEVICES, PART_NBYTES, SUM_NBYTES, WHOLE
from ckptd_client._checksums import BLOCK_NBYTES, block_sums, blocks_of
from ckptd_client._copy_engines import CopyEngine, divided, flat_bytes

_THREADS = 4  # more than one, or two, are not faster than memory
_THREADED_NBYTES = 32 << 20  # less is done before threads have begun
_Bytes = memoryview | ctypes.Array[ctypes.c_char]


class Digest(NamedTuple):
    """content: as in a Share. parts: one digest of PART_NBYTES for each run of tensors, end to end."""

    content: bytes
    parts: bytes


class WholeDigest:
    """Of these tensors, in their order. Made where the tensors are what is saved; take must come before they change.

    runs: how many tensors each part has. Refers to the tensors until take has returned; shapes decide how they are
    divided, so ranks that hold the same get the same digest, if their tensors lie on devices of the same kind.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], runs: Sequence[int]) -> None:
        self._tensors, self._runs = list(tensors), runs
        self._sums: list[bytes] = []  # of each tensor
        self._there: list[Callable[[], None]] = []

    def take(self) -> None:
        """Reads all bytes of the host, and has devices begin to read theirs. Blocks for the host's. Idempotent."""
        tensors, self._tensors = self._tensors, []
        if not tensors:
            return
        self._sums = [b""] * len(tensors)
        on_devices = divided(tensors)
        for engine, positions in on_devices.items():
            self._there.append(self._summed(engine, positions, [tensors[i] for i in positions]))
        far = {i for positions in on_devices.values() for i in positions}
        near = [i for i in range(len(tensors)) if i not in far]
        for i, found in zip(near, _hashed([tensors[i] for i in near]), strict=True):
            self._sums[i] = found
        self._kind = _kind(far)

    def digest(self) -> Digest:
        """Takes it if that was not done. Blocks until devices have sent their sums."""
        self.take()
        while self._there:
            self._there[-1]()
            self._there.pop()
        found, parts, at = xxhash.xxh3_128(), b"", 0
        for count in self._runs:
            part = xxhash.xxh3_64(b"".join(self._sums[at : at + count])).digest()
            at += count
            parts += part[:PART_NBYTES]
            found.update(part)
        return Digest(self._kind + found.digest()[: SUM_NBYTES - 1], parts)

    def _summed(
        self, engine: CopyEngine, positions: Sequence[int], tensors: Sequence[torch.Tensor]
    ) -> Callable[[], None]:
        """Has a device sum up these tensors now; what it returns waits for the sums and puts them into their places."""
        with torch.no_grad():
            sums, counts = block_sums(tensors)
            place = engine.scratch(sums.nbytes).view(torch.int64)
            place.copy_(sums, non_blocking=True)
        mark = engine.now()

        def put() -> None:
            mark.wait()
            at = 0
            for i, count in zip(positions, counts, strict=True):
                self._sums[i] = place[at : at + count].numpy().tobytes()
                at += count

        return put


def _kind(on_devices: set[int]) -> bytes:
    """Which bytes were looked at, and who did: sums of devices are no hashes, so like is compared with like only."""
    if not on_devices:
        return WHOLE
    return bytes([ON_DEVICES | xxhash.xxh3_64(repr(sorted(on_devices)).encode()).digest()[0] & 0x7F])


# --- the host


def _hashed(tensors: Sequence[torch.Tensor]) -> Iterator[bytes]:
    """A digest for each tensor, of those of its blocks. xxhash lets go of the GIL."""
    with torch.no_grad():
        blocks = [_blocks_of_host(tensor) for tensor in tensors]
    flat = [block for of_one in blocks for block in of_one]
    threads = min(_THREADS, torch.get_num_threads())
    if threads > 1 and sum(map(len, flat)) >= _THREADED_NBYTES:
        with ThreadPoolExecutor(threads, thread_name_prefix="ckptd-digest") as pool:
            found = iter([digest for part in pool.map(_hash, _shared_out(flat, threads)) for digest in part])
    else:
        found = iter(_hash(flat))
    return (b"".join(next(found) for _ in of_one) for of_one in blocks)


def _shared_out(blocks: list[_Bytes], threads: int) -> list[list[_Bytes]]:
    """About as many bytes for each thread."""
    ends = list(accumulate(map(len, blocks)))
    cuts = [bisect_left(ends, ends[-1] * i // threads) for i in range(1, threads)]
    return [blocks[first:stop] for first, stop in pairwise([0, *cuts, len(blocks)])]


def _hash(blocks: Sequence[_Bytes]) -> list[bytes]:
    return [xxhash.xxh3_64(block).digest() for block in blocks]


def _blocks_of_host(tensor: torch.Tensor) -> list[_Bytes]:
    """Its bytes, where they lie if they lie in order. Each keeps its memory, but for those: the caller keeps them."""
    if not (tensor.is_cpu and tensor.is_contiguous()) or tensor.is_conj() or tensor.is_neg():
        return [flat_bytes(block.cpu()).numpy().data for block in blocks_of(tensor)]
    address, nbytes = tensor.data_ptr(), tensor.numel() * tensor.itemsize
    if nbytes <= BLOCK_NBYTES:
        return [(ctypes.c_char * nbytes).from_address(address)]
    starts = range(0, nbytes, BLOCK_NBYTES)
    return [(ctypes.c_char * min(BLOCK_NBYTES, nbytes - at)).from_address(address + at) for at in starts]
