"""Digests of all bytes of replicated tensors; each byte is read once, in place.

A digest covers values, shapes and dtypes. Strides may differ between ranks, so a tensor that is not contiguous is read
in the order of a contiguous one, a block at a time.
Threads hash the host's memory without the GIL: before the save returns, or, where it is write-protected, during
training. Devices compute checksums in the order of the caller's stream and send 8 bytes for each 8 MiB; only digest()
waits for them.
"""

import ctypes
import functools
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate, islice, pairwise
from typing import NamedTuple, TypeVar, cast

import torch
import xxhash

from ckptd.shared.format.boxes import boxes_of
from ckptd.shared.format.replica_attestations import ON_DEVICES, PART_NBYTES, SUM_NBYTES, WHOLE
from ckptd_client._local.checksums import BLOCK_NBYTES, block_sums
from ckptd_client._local.copy_engines import CopyEngine, by_engine
from ckptd_client._local.page_division import Cut, cuts
from ckptd_client._local.page_guard import Range, batches, copy, pieces
from ckptd_client._state.tensors import copyable

_THREADS = 4  # more are not faster than memory
_THREADED_NBYTES = 32 << 20  # less is hashed before threads have started
_B = TypeVar("_B", bound=Sized)


@dataclass(frozen=True, slots=True)
class StridedBytes:
    """Bytes first to stop of a tensor in contiguous order, both at boundaries of elements. Refers to the tensor.

    Its length is that of the range; it copies nothing until ``pieces`` is called.
    """

    tensor: torch.Tensor
    first: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.first

    def pieces(self, room: torch.Tensor) -> Iterator[memoryview]:
        """Copies the bytes into the host's memory, piece by piece, each over the one before. Blocks for the copies.

        room: memory of the caller, at least as large as the range, aligned for any dtype.
        """
        size = self.tensor.itemsize
        tensor = copyable(self.tensor.detach())
        for offsets, sizes in boxes_of(tuple(tensor.shape), self.first // size, self.stop // size):
            box = tensor[tuple(slice(at, at + n) for at, n in zip(offsets, sizes, strict=True))]
            place = room[: box.nbytes]
            place.view(box.dtype).view(box.shape).copy_(box)
            yield place.numpy().data


_Bytes = ctypes.Array[ctypes.c_char] | StridedBytes


class Digest(NamedTuple):
    """content: as in a Attestation. parts: a digest of PART_NBYTES bytes for each run of tensors."""

    content: bytes
    parts: bytes


class WholeDigest:
    """The digest of these tensors, in their order. Call take before they change.

    runs: the number of tensors in each part. Refers to the tensors until take and take_late have read all. Blocks
    depend on shapes alone, so ranks that hold equal values compute equal digests if their tensors are on devices of the
    same kind.
    """

    def __init__(self, names: Sequence[str], tensors: Sequence[torch.Tensor], runs: Sequence[int]) -> None:
        self._names, self._tensors, self._runs = names, list(tensors), runs
        self._sums: list[bytes] = []  # of each tensor
        self._pending: list[Callable[[], None]] = []
        self._late: list[_Late] = []

    @property
    def tensors(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Tensors that take is still to read, with their names."""
        return zip(self._names, self._tensors, strict=False)

    @property
    def late(self) -> list[tuple[str, Range]]:
        """Memory that take_late is still to read, with names of tensors."""
        return [(self._names[one.position], found) for one in self._late for found in one.ranges]

    def take(self, armed: Sequence[Range] = ()) -> None:
        """Reads the host's bytes and starts the devices' checksums. Blocks for the host's bytes. Idempotent.

        armed: ranges of the host's memory, in order of addresses, where every write is detected: take_late reads them.
        """
        tensors, self._tensors = self._tensors, []
        if not tensors:
            return
        self._sums = [b""] * len(tensors)
        on_devices = by_engine(tensors)
        for engine, positions in on_devices.items():
            self._pending.append(self._summed(engine, positions, [tensors[i] for i in positions]))
        far = {i for positions in on_devices.values() for i in positions}
        near = [i for i in range(len(tensors)) if i not in far]
        self._late = _defer(tensors, near, armed) if armed else []
        late = {one.position for one in self._late}
        near = [i for i in near if i not in late]
        for i, found in zip(near, _hashed([tensors[i] for i in near]), strict=True):
            self._sums[i] = found
        self._kind = _kind(far)

    def take_late(self) -> None:
        """Reads what take has left. Blocks. Raises OSError if memory is not mapped any more. Idempotent."""
        if not self._late:
            return
        late = [(one.position, block) for one in self._late for block in one.blocks]
        found: dict[int, list[bytes]] = {}
        for (index, _), sums in zip(late, _threaded(_hash_copied, [block for _, block in late]), strict=True):
            found.setdefault(index, []).append(sums)
        for index, sums_of_one in found.items():
            self._sums[index] = b"".join(sums_of_one)
        self._late = []

    def digest(self) -> Digest:
        """The digest. Takes what is not taken yet. Blocks until devices have sent their checksums."""
        self.take()
        self.take_late()
        while self._pending:
            self._pending[-1]()
            self._pending.pop()
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
        """Starts the checksums of tensors on a device; the call that it returns waits for them and stores them."""
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
    """The kind of digest: devices compute checksums, the host hashes, so only digests of one kind are compared."""
    if not on_devices:
        return WHOLE
    return bytes([ON_DEVICES | xxhash.xxh3_64(repr(sorted(on_devices)).encode()).digest()[0] & 0x7F])


# --- the host


def _hashed(tensors: Sequence[torch.Tensor]) -> Iterator[bytes]:
    """For each tensor the digests of its blocks. xxhash releases the GIL."""
    with torch.no_grad():
        blocks = [_blocks_of_host(tensor) for tensor in tensors]
    found = iter(_threaded(_hash, [block for of_one in blocks for block in of_one]))
    return (next(found) if len(of_one) == 1 else b"".join(islice(found, len(of_one))) for of_one in blocks)


def _threaded(hashed: Callable[[Sequence[_B]], list[bytes]], blocks: list[_B]) -> list[bytes]:
    """A digest for each block, computed by several threads if there is enough to hash."""
    threads = min(_THREADS, torch.get_num_threads())
    if threads > 1 and sum(map(len, blocks)) >= _THREADED_NBYTES:
        with ThreadPoolExecutor(threads, thread_name_prefix="ckptd-digest") as pool:
            return [digest for part in pool.map(hashed, _shared_out(blocks, threads)) for digest in part]
    return hashed(blocks)


def _shared_out(blocks: list[_B], threads: int) -> list[list[_B]]:
    """Divides blocks into lists of about equal bytes, one for each thread."""
    ends = list(accumulate(map(len, blocks)))
    stops = [bisect_left(ends, ends[-1] * i // threads) for i in range(1, threads)]
    return [blocks[first:stop] for first, stop in pairwise([0, *stops, len(blocks)])]


def _hash(blocks: Sequence[_Bytes]) -> list[bytes]:
    if StridedBytes not in {*map(type, blocks)}:  # the usual case, and there may be many blocks
        return list(map(xxhash.xxh3_64_digest, cast("Sequence[ctypes.Array[ctypes.c_char]]", blocks)))
    room = torch.empty(BLOCK_NBYTES, dtype=torch.uint8)
    return [_hash_of(b.pieces(room)) if isinstance(b, StridedBytes) else xxhash.xxh3_64_digest(b) for b in blocks]


def _hash_of(pieces: Iterable[memoryview]) -> bytes:
    found = xxhash.xxh3_64()
    for piece in pieces:
        found.update(piece)
    return found.digest()


def _is_contiguous(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _blocks_of_host(tensor: torch.Tensor) -> list[_Bytes]:
    """The tensor's bytes in blocks, equal on all ranks: addresses, valid while the caller keeps it, or StridedBytes."""
    nbytes = tensor.nbytes
    if not _is_contiguous(tensor):
        starts = range(0, max(1, nbytes), BLOCK_NBYTES)
        return [StridedBytes(tensor, at, min(at + BLOCK_NBYTES, nbytes)) for at in starts]
    address = tensor.data_ptr()
    if nbytes <= BLOCK_NBYTES:
        return [_array(nbytes).from_address(address)]
    starts = range(0, nbytes, BLOCK_NBYTES)
    return [_array(min(BLOCK_NBYTES, nbytes - at)).from_address(address + at) for at in starts]


@functools.lru_cache(maxsize=1024)  # to make one, even again, takes as long as to digest 5 kB
def _array(nbytes: int) -> type[ctypes.Array[ctypes.c_char]]:
    return ctypes.c_char * nbytes


# --- write-protected memory of the host


@dataclass(frozen=True, slots=True)
class _Block:
    """One block of a tensor, whose bytes are in several places."""

    sources: list[Range]

    def __len__(self) -> int:
        return sum(one.stop - one.start for one in self.sources)


class _Late(NamedTuple):
    """A tensor of which a part is read late. The part that is not protected was copied."""

    position: int
    ranges: list[Range]  # protected
    blocks: list[_Block]
    keep: list[torch.Tensor]  # memory of both


def _defer(tensors: Sequence[torch.Tensor], near: Sequence[int], armed: Sequence[Range]) -> list[_Late]:
    """The tensors that are in armed memory, wholly or in part; copies the other parts of them."""
    straight = [i for i in near if _is_contiguous(tensors[i])]
    spans = sorted(((i, _span(tensors[i])) for i in straight), key=lambda one: one[1])
    inside, outside = cuts(spans, armed)
    parts: dict[int, list[tuple[Cut, bool]]] = {cut.position: [] for cut in inside}
    for found, is_late in [(inside, True), (outside, False)]:
        for cut in found:
            if cut.position in parts:
                parts[cut.position].append((cut, is_late))
    return [_late(i, tensors[i], sorted(found)) for i, found in parts.items()]


def _late(position: int, tensor: torch.Tensor, parts: Sequence[tuple[Cut, bool]]) -> _Late:
    start = tensor.data_ptr()
    early = torch.empty(sum(cut.nbytes for cut, is_late in parts if not is_late), dtype=torch.uint8)
    at, sources, ranges, copied = early.data_ptr(), [], [], []
    for cut, is_late in parts:
        there = Range(start + cut.offset, start + cut.offset + cut.nbytes)
        if is_late:
            ranges.append(there)
            sources.append(there)
        else:
            copied.append((at, there.start, cut.nbytes))
            sources.append(Range(at, at + cut.nbytes))
            at += cut.nbytes
    for batch in batches(pieces(copied)):
        copy(batch)
    return _Late(position, ranges, list(_in_blocks(sources)), [early, tensor.detach()])


def _in_blocks(sources: Iterable[Range]) -> Iterator[_Block]:
    """Cuts the same bytes into blocks, as of a contiguous tensor."""
    block, nbytes = [], 0
    for one in sources:
        start = one.start
        while start < one.stop:
            stop = min(one.stop, start + BLOCK_NBYTES - nbytes)
            block.append(Range(start, stop))
            nbytes += stop - start
            start = stop
            if nbytes == BLOCK_NBYTES:
                yield _Block(block)
                block, nbytes = [], 0
    if block:
        yield _Block(block)


def _hash_copied(blocks: Sequence[_Block]) -> list[bytes]:
    """Copies the bytes first: a copy of unmapped memory raises, a read of it would end the process."""
    room = (ctypes.c_char * max(map(len, blocks), default=0))()
    at, found = ctypes.addressof(room), []
    for block in blocks:
        rows, to = [], at
        for one in block.sources:
            rows.append((to, one.start, one.stop - one.start))
            to += one.stop - one.start
        copy(pieces(rows))
        found.append(xxhash.xxh3_64_digest(memoryview(room)[: len(block)]))
    return found


def _span(tensor: torch.Tensor) -> Range:
    return Range(tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.itemsize)
