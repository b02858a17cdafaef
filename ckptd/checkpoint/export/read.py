"""Blocks of a checkpoint's files, each checked against its digest, if it has one, in the memory that is copied from.

Reads past the page cache where the file system allows it, and keeps the blocks used last, of a fixed number.
"""

import contextlib
import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

import msgspec

from ckptd.checkpoint.export.crc import Crcs, Stretch
from ckptd.shared.base.errors import DamagedError
from ckptd.shared.files.regular import open_direct
from ckptd.shared.format.digest import BLOCK_NBYTES, DIGEST_NBYTES
from ckptd.shared.format.layout import Extent
from ckptd.shared.format.slot import align_up
from ckptd.shared.format.stored_files import StoredFile, StoredFiles
from ckptd.shared.stores.directory import OpenedFile

AHEAD = 4  # blocks that are read before they are needed


class SourceFile(msgspec.Struct, frozen=True):
    """A file and what is known of it."""

    path: str
    nbytes: int
    digests: bytes | None  # 16 per block; None for a file of other programs, which nobody has digested
    # Its files by path, when it is several: end to end, each of whole pages but the last.
    parts: Sequence[Extent] = ()
    crcs: tuple[Stretch, ...] = ()  # what is known instead of digests, of parts of the file
    content: bytes = b""  # of what is no file at all: values made here, fewer bytes than a block
    stored: StoredFiles | None = None  # of which its files are, by name; None: they are by path


class _Block:
    """A buffer and what is in it. users: threads that hold it; it is reused only when none does."""

    def __init__(self, buffer: mmap.mmap) -> None:
        self.buffer = buffer
        self.users = 0
        self.filled: Future[int] = Future()  # bytes


class VerifiedReader:
    """Checked blocks of files, for several threads. A context: its own threads, which read ahead, end with it.

    capacity: blocks in memory, more than there are threads, its own too. Each holds one block at a time; so there is
    always one that can be reused.
    """

    def __init__(self, files: list[SourceFile], capacity: int) -> None:
        self._files = files
        self._capacity = capacity
        self._ahead = ThreadPoolExecutor(AHEAD)
        self._begun: dict[int, int] = {}  # by file, the furthest block that was read ahead
        self._crcs = [Crcs(file.path, file.crcs) for file in files]
        self._lock = threading.Lock()
        self._blocks: OrderedDict[tuple[int, int], _Block] = OrderedDict()  # used last comes last

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._ahead.shutdown(cancel_futures=True)

    def ahead(self, parts: Sequence[tuple[int, int]]) -> None:
        """Begins to read the blocks after those of these places (file, byte), if both fit in memory."""
        if 2 * len(parts) > self._capacity:
            return
        for file, start in parts:
            index = start // BLOCK_NBYTES + 1
            with self._lock:
                wanted = index * BLOCK_NBYTES < self._files[file].nbytes and index > self._begun.get(file, 0)
                self._begun[file] = max(index, self._begun.get(file, 0))
            if wanted:
                self._ahead.submit(self._warm, file, index)

    def check_crcs(self) -> None:
        """Raises DamagedError, naming file and part, for bytes read so far whose CRC says that they are others."""
        for crcs in self._crcs:
            crcs.check()

    def _warm(self, file: int, index: int) -> None:
        with contextlib.suppress(DamagedError, OSError), self._block(file, index):
            pass  # the thread that needs the block gets the error

    def read(self, file: int, start: int, nbytes: int) -> Iterator[memoryview]:
        """Bytes of a file, block by block; each view is valid until the next is asked for.

        Raises DamagedError, naming file and block, for what does not match its digest; OSError for what cannot be read.
        """
        stop = start + nbytes
        while start < stop:
            index, within = divmod(start, BLOCK_NBYTES)
            take = min(BLOCK_NBYTES - within, stop - start)
            with self._block(file, index) as block, block[within : within + take] as view:
                yield view
            start += take

    @contextlib.contextmanager
    def _block(self, file: int, index: int) -> Iterator[memoryview]:
        block, fill = self._claim((file, index))
        try:
            if fill:
                self._fill(block, file, index)
            nbytes = block.filled.result()
            with memoryview(block.buffer) as whole, whole[:nbytes] as view:
                yield view
        finally:
            with self._lock:
                block.users -= 1

    def _claim(self, key: tuple[int, int]) -> tuple[_Block, bool]:
        """The block, and whether the caller must fill it."""
        with self._lock:
            block = self._blocks.get(key)
            fill = block is None
            if block is None:
                block = self._blocks[key] = _Block(self._free_buffer())
            self._blocks.move_to_end(key)
            block.users += 1
            return block, fill

    def _free_buffer(self) -> mmap.mmap:
        if len(self._blocks) < self._capacity:
            return mmap.mmap(-1, BLOCK_NBYTES)
        oldest = next(key for key, block in self._blocks.items() if not block.users)
        return self._blocks.pop(oldest).buffer

    def _fill(self, block: _Block, file: int, index: int) -> None:
        source = self._files[file]
        nbytes = min(BLOCK_NBYTES, source.nbytes - index * BLOCK_NBYTES)
        try:
            _read_block(source, index * BLOCK_NBYTES, nbytes, block.buffer)
            _check(source, index, nbytes, block.buffer)
            with memoryview(block.buffer) as whole, whole[:nbytes] as view:
                self._crcs[file].see(index, view)
        except BaseException as error:
            block.filled.set_exception(error)
            raise
        block.filled.set_result(nbytes)


def _check(source: SourceFile, index: int, nbytes: int, buffer: mmap.mmap) -> None:
    if source.digests is None or source.stored is None:
        return
    start = index * BLOCK_NBYTES
    with memoryview(buffer) as whole, whole[:nbytes] as view:
        found = source.stored.integrity.digest(view)
    if found != source.digests[index * DIGEST_NBYTES : (index + 1) * DIGEST_NBYTES]:
        raise DamagedError(
            f"{source.path}: block {index} (bytes {start} to {start + nbytes - 1}): digest does not match, "
            "the bytes are damaged",
            hint=f"see what else is: ckptd verify {os.path.dirname(source.path)}",
        )


def _read_block(source: SourceFile, start: int, nbytes: int, into: mmap.mmap) -> None:
    if source.content:
        into[:nbytes] = source.content
        return
    with memoryview(into) as whole:
        for part in source.parts or (Extent(source.path, 0, source.nbytes),):
            first, stop = max(start, part.start), min(start + nbytes, part.start + part.nbytes)
            if first < stop:
                with whole[first - start : align_up(stop - start)] as view:
                    _read_range(source.stored, part, first - part.start, stop - first, view)


def _read_range(stored: StoredFiles | None, part: Extent, start: int, nbytes: int, into: memoryview) -> None:
    """Bytes of a file from start on, whole pages. into: nbytes rounded up to whole pages."""
    where = part.name if stored is None else stored.where(part.name)
    with contextlib.closing(_opened(stored, part.name)) as file:
        try:
            found = file.read(into, start, nbytes)
        except OSError as error:
            raise OSError(error.errno, error.strerror, where) from error
    if found < nbytes:
        raise DamagedError(f"{where}: ends at byte {start + found}, should have {part.nbytes}")


def _opened(stored: StoredFiles | None, name: str) -> StoredFile:
    # Files of other programs may be links.
    return OpenedFile(open_direct(name, follow=True)) if stored is None else stored.open(name)
