"""Pieces from checked blocks to output files: hidden names, several in flight, whole pages past the page cache."""

import contextlib
import mmap
import os
import queue
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Literal

from ckptd.checkpoint.export import casts
from ckptd.checkpoint.export.plan import PIECE_NBYTES, FilePlan, Part, Piece, Target, batches
from ckptd.checkpoint.export.read import VerifiedReader
from ckptd.shared.format.digest import BLOCK_NBYTES
from ckptd.shared.format.dtypes import itemsize
from ckptd.shared.format.slot import PAGE, align_up
from ckptd.system.files import FileLayer, temp_name

THREADS = 4
_DIRECT_NBYTES = 256 << 10  # smaller writes go through the page cache
# Bytes and memoryview's code of the units that runs are copied in.
_UNITS: tuple[tuple[int, Literal["Q", "I", "H", "B"]], ...] = ((8, "Q"), (4, "I"), (2, "H"), (1, "B"))

_LONG_RUN = 64  # units; from here on copying run by run is faster than unit by unit, measured


class OutputFile:
    """A file under a hidden name beside its own, of its full size, written at any place by any thread."""

    def __init__(self, fs: FileLayer, directory: str, plan: FilePlan) -> None:
        self.path = os.path.join(directory, plan.name)
        self.temp = temp_name(self.path)
        self._fs = fs
        self._plan = plan
        self._fds: list[int] = []  # through the page cache; and past it, if the file system can

    def open(self) -> None:
        """Makes the hidden file, with its blobs."""
        self._fds.append(self._fs.open_write(self.temp, direct=False))
        self._fs.truncate(self._fds[0], self._plan.nbytes)
        with contextlib.suppress(OSError):
            self._fds.append(os.open(self.temp, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC | os.O_NOFOLLOW))
        for offset, blob in self._plan.blobs:
            self._fs.pwrite(self._fds[0], blob, offset)

    def write(self, data: memoryview, offset: int) -> None:
        """All of data at offset; large data must lie as far into a page of memory as offset does into one of the file.

        No page is written both ways: one that is whole in data has no other writer.
        """
        first, last = align_up(offset) - offset, (offset + len(data)) // PAGE * PAGE - offset
        if len(self._fds) == 1 or last - first < _DIRECT_NBYTES:
            first = last = len(data)
        for fd, start, stop in ((0, 0, first), (-1, first, last), (0, last, len(data))):
            if start < stop:
                with data[start:stop] as part:
                    self._fs.pwrite(self._fds[fd], part, offset + start)

    def sync(self) -> None:
        """Returns when all is on the disk."""
        self._fs.fsync(self._fds[0])

    def close(self) -> None:
        """The descriptors given back."""
        while self._fds:
            self._fs.close(self._fds.pop())

    def publish(self) -> None:
        """The file under its own name, in place of what was there."""
        self._fs.rename(self.temp, self.path)

    def discard(self) -> None:
        """The hidden file removed, if it is there."""
        self.close()
        with contextlib.suppress(FileNotFoundError):
            self._fs.unlink(self.temp)


class _Scratch:
    """Memory of one thread for pieces that cannot be written from the block they lie in."""

    def __init__(self) -> None:
        self._source = mmap.mmap(-1, PIECE_NBYTES + PAGE)
        self._cast: mmap.mmap | None = None

    def source(self, phase: int, nbytes: int) -> memoryview:
        """Room that begins phase bytes into a page."""
        return memoryview(self._source)[phase : phase + nbytes]

    def cast(self, phase: int, nbytes: int) -> memoryview:
        """A second scratch buffer of the same layout."""
        self._cast = self._cast or mmap.mmap(-1, PIECE_NBYTES + PAGE)
        return memoryview(self._cast)[phase : phase + nbytes]


def write_files(
    plans: Sequence[FilePlan], outputs: Sequence[OutputFile], reader: VerifiedReader, report: Callable[[int], None]
) -> None:
    """Fills the outputs of plans. report: called in this thread with the bytes written so far.

    Raises DamagedError for a source that does not match its digest; nothing of that block is written.
    """
    targets = [Target(tensor, i, start, dtype) for i, plan in enumerate(plans) for tensor, dtype, start in plan.targets]
    spare: queue.SimpleQueue[_Scratch] = queue.SimpleQueue()
    for _ in range(THREADS):
        spare.put(_Scratch())

    def work(batch: list[Piece], turn: int) -> int:
        scratch = spare.get()
        try:
            return sum(_copy(piece, turn, reader, outputs[piece.target.file], scratch) for piece in batch)
        finally:
            spare.put(scratch)

    pool = ThreadPoolExecutor(THREADS)
    done = 0
    try:
        for nbytes in _in_flight(pool, ((work, batch, i) for i, batch in enumerate(batches(targets)))):
            done += nbytes
            report(done)
    finally:
        pool.shutdown(cancel_futures=True)


def _in_flight(
    pool: ThreadPoolExecutor, calls: Iterator[tuple[Callable[[list[Piece], int], int], list[Piece], int]]
) -> Iterator[int]:
    """Results as they come, with a few calls waiting and never all."""
    pending: set[Future[int]] = set()
    for function, batch, turn in calls:
        pending.add(pool.submit(function, batch, turn))
        if len(pending) > THREADS:
            finished, pending = wait(pending, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in finished)
    yield from (future.result() for future in pending)


def _copy(piece: Piece, turn: int, reader: VerifiedReader, output: OutputFile, scratch: _Scratch) -> int:
    """Bytes written."""
    target = piece.target
    item, out_item = itemsize(target.tensor.dtype), itemsize(target.dtype)
    offset, out_nbytes = target.start + piece.start // item * out_item, piece.nbytes // item * out_item
    same = target.dtype == target.tensor.dtype
    if piece.others:
        with scratch.cast(offset % PAGE, out_nbytes) as result:
            _average(piece, reader, scratch, result)
            output.write(result, offset)
        return out_nbytes
    if same and _lies_as(piece, offset):
        for view in reader.read(piece.parts[0].file, piece.parts[0].start, piece.nbytes):
            output.write(view, offset)
        return out_nbytes
    phase = offset % PAGE
    with scratch.source(phase if same else 0, piece.nbytes) as source:
        if len(piece.parts) > 1:
            reader.ahead([(part.file, part.start) for part in piece.parts])
        for i in range(len(piece.parts)):
            _place(piece.parts[(i + turn) % len(piece.parts)], reader, source)  # each thread begins with another file
        if same:
            output.write(source, offset)
        else:
            with scratch.cast(phase, out_nbytes) as result:
                casts.cast(source, target.tensor.dtype, result, target.dtype)
                output.write(result, offset)
    return out_nbytes


def _average(piece: Piece, reader: VerifiedReader, scratch: _Scratch, into: memoryview) -> None:
    """The mean of the piece in all checkpoints, the oldest added first, in the target's dtype."""
    total = casts.Sum(piece.target.tensor.dtype)
    for parts in (*reversed(piece.others), piece.parts):
        with scratch.source(0, piece.nbytes) as source:
            for part in parts:
                _place(part, reader, source)
            total.add(source)
    total.mean(into, piece.target.dtype)


def _lies_as(piece: Piece, offset: int) -> bool:
    """Whether the piece is within one block, at the same offset in a page as in the output."""
    part = piece.parts[0]
    whole = part.run_nbytes == piece.nbytes and part.start % BLOCK_NBYTES + part.nbytes <= BLOCK_NBYTES
    return whole and part.start % PAGE == offset % PAGE


def _place(part: Part, reader: VerifiedReader, into: memoryview) -> None:
    """The part's runs where they belong in the piece."""
    if not part.loops:
        at = part.at
        for view in reader.read(part.file, part.start, part.nbytes):
            into[at : at + len(view)] = view
            at += len(view)
        return
    runs = b"".join(bytes(view) for view in reader.read(part.file, part.start, part.nbytes))
    scatter(part, memoryview(runs), into)


def scatter(part: Part, source: memoryview, into: memoryview) -> None:
    """Runs of source to their places: the innermost loop run by run, or all first units, all second ones, and so on."""
    count, stride = part.loops[-1]
    nbytes = count * part.run_nbytes
    unit, code = next(u for u in _UNITS if not (part.run_nbytes % u[0] or stride % u[0]))
    run, step = part.run_nbytes // unit, stride // unit
    for i, at in enumerate(_offsets(part.at, part.loops[:-1])):
        with (
            source[i * nbytes : (i + 1) * nbytes].cast(code) as runs,
            into[at : at + (count - 1) * stride + part.run_nbytes].cast(code) as room,
        ):
            if count <= run or run >= _LONG_RUN:
                for j in range(count):
                    room[j * step : j * step + run] = runs[j * run : (j + 1) * run]
            else:
                for j in range(run):
                    room[j::step] = runs[j::run]


def _offsets(at: int, loops: Sequence[tuple[int, int]]) -> Iterator[int]:
    if not loops:
        yield at
        return
    (count, stride), inner = loops[0], loops[1:]
    for i in range(count):
        yield from _offsets(at + i * stride, inner)
