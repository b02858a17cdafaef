"""Reads a segment back: each block is checked against its digest before any of its bytes reach a tensor."""

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue

import torch

from ckptd.protocol.digest import BLOCK_NBYTES, DIGEST_NBYTES, block_count, digest
from ckptd.protocol.errors import DamagedError
from ckptd.protocol.ids import JobKey, SaveId
from ckptd.protocol.layout import Layout, Leaves, decode_layout, decode_leaves
from ckptd.protocol.manifest import (
    COMMITTED,
    MANIFEST,
    VOTES_DIR,
    FileRecord,
    Manifest,
    decode_committed,
    decode_manifest,
)
from ckptd.protocol.slot import PAGE, SEALS_NBYTES, Seal, SlotState, align_up, decode_seals

_STORE_READERS = 4  # reads in flight: what large O_DIRECT reads need to keep a device busy
_ARENA_READERS = 2  # at least; a copy out of memory gains nothing from more threads than torch has
_HUGE = getattr(mmap, "MADV_HUGEPAGE", 14)


@dataclass(frozen=True, slots=True)
class Piece:
    """A file that holds bytes of an image, from start on. start is whole pages, and nbytes too but for the last."""

    fd: int
    where: str
    start: int
    nbytes: int

    def read(self, view: memoryview, offset: int, nbytes: int) -> None:
        """Fills view, nbytes rounded up to pages, with the bytes from offset on. Raises DamagedError, OSError."""
        done = 0
        while done < nbytes:
            got = self._pread(view[done:], offset + done)
            got -= 0 if done + got >= nbytes else got % PAGE  # O_DIRECT wants whole pages
            if got == 0:
                raise DamagedError(f"{self.where}: ends at byte {offset + done}, it should have {self.nbytes}")
            done += got

    def _pread(self, view: memoryview, offset: int) -> int:
        try:
            return os.preadv(self.fd, [view], offset)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        # Some file systems take O_DIRECT at open and refuse it at the first read.
        fcntl.fcntl(self.fd, fcntl.F_SETFL, fcntl.fcntl(self.fd, fcntl.F_GETFL) & ~os.O_DIRECT)
        return os.preadv(self.fd, [view], offset)


@dataclass(frozen=True, slots=True)
class Source:
    """A rank's segment in a slot or on the store. Owns the descriptors of ``files``; close it with ``close``."""

    files: tuple["Piece", ...]  # of the image, in its order
    where: str
    nbytes: int  # of the image, which starts the file
    table: bytes  # one digest per block
    layout: Layout
    leaves: Leaves
    readers: int

    def close(self) -> None:
        """Closes the files."""
        for piece in self.files:
            os.close(piece.fd)

    def read(self, index: int, buffer: mmap.mmap) -> None:
        """Fills buffer with a block and checks it. Raises DamagedError naming file, block and bytes. Thread-safe.

        A slot is read like a file, not mapped: one system call costs less than a page fault per 4 KiB.
        """
        start = index * BLOCK_NBYTES
        nbytes = min(BLOCK_NBYTES, self.nbytes - start)
        with memoryview(buffer) as view:
            for piece in self.files:
                first, stop = max(start, piece.start), min(start + nbytes, piece.start + piece.nbytes)
                if first < stop:
                    with view[first - start : align_up(stop - start)] as part:
                        piece.read(part, first - piece.start, stop - first)
            matches = digest(view[:nbytes]) == self.table[index * DIGEST_NBYTES : (index + 1) * DIGEST_NBYTES]
        if not matches:
            place = f"block {index} (bytes {start} to {start + nbytes})"
            raise DamagedError(f"{self.where}: {place} does not match its digest")


def open_slot(path: str, job: JobKey, save: SaveId, rank: int) -> Source:
    """The segment in a slot of the arena. Raises DamagedError, OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        seal = _checked_seal(fd, path, job, save, rank)
        table, layout, leaves = (_part(fd, path, seal, what) for what in ("digest table", "layout", "leaves"))
        return Source(
            files=(Piece(fd, path, 0, seal.image_nbytes),),
            where=path,
            nbytes=seal.image_nbytes,
            table=table,
            layout=decode_layout(layout, where=path),
            leaves=decode_leaves(leaves, where=path),
            readers=max(_ARENA_READERS, torch.get_num_threads()),
        )
    except BaseException:
        os.close(fd)
        raise


def _checked_seal(fd: int, path: str, job: JobKey, save: SaveId, rank: int) -> Seal:
    capacity = os.fstat(fd).st_size
    seal = decode_seals(os.pread(fd, SEALS_NBYTES, max(0, capacity - SEALS_NBYTES)))[2]
    if seal.state is not SlotState.DIGESTED or (seal.job, seal.save, seal.rank) != (job, save, rank):
        raise DamagedError(f"{path}: its seal is not that of {save}, rank {rank}")
    if seal.content_nbytes + SEALS_NBYTES > capacity:
        raise DamagedError(f"{path}: its seal claims more bytes than it has")
    return seal


def _part(fd: int, path: str, seal: Seal, what: str) -> bytes:
    start, nbytes, expected = seal.tail[what]
    data = os.pread(fd, nbytes, start)
    if digest(data) != expected:
        raise DamagedError(f"{path}: {what} (bytes {start} to {start + nbytes}) does not match its digest")
    return data


def read_manifest(directory: str, save: SaveId | None = None) -> Manifest:
    """The manifest of a committed checkpoint (of save, if given). Raises DamagedError, OSError."""
    manifest_path, committed_path = os.path.join(directory, MANIFEST), os.path.join(directory, COMMITTED)
    manifest_raw = _contents(manifest_path)
    committed = decode_committed(_contents(committed_path), where=committed_path)
    manifest = decode_manifest(manifest_raw, where=manifest_path)
    if (committed.save, committed.manifest_xxh3_128) != (manifest.save, digest(manifest_raw).hex()):
        raise DamagedError(f"{committed_path}: does not match {MANIFEST}")
    if save is not None and manifest.save != save:
        raise DamagedError(f"{manifest_path}: is of {manifest.save}, not of {save}")
    return manifest


def vote_notes(directory: str, manifest: Manifest) -> tuple[str, ...]:
    """What is wrong with the votes. The data is proven without them, but somebody should know."""
    return tuple(note for vote in manifest.votes if (note := _vote_note(directory, vote.node, vote.digest)))


def open_file(directory: str, record: FileRecord) -> Source:
    """An image of a committed checkpoint, read past the page cache where possible. Raises DamagedError, OSError."""
    path = os.path.join(directory, record.name)
    layout, leaves = decode_layout(record.layout, where=path), decode_leaves(record.leaves, where=path)
    files: list[Piece] = []
    try:
        for name, start, nbytes in record.extents():
            where = os.path.join(directory, name)
            files.append(Piece(_open_direct(where), where, start, nbytes))
            _check_size(where, os.fstat(files[-1].fd).st_size, nbytes)
    except BaseException:
        for piece in files:
            os.close(piece.fd)
        raise
    return Source(tuple(files), path, record.nbytes, record.digests, layout, leaves, readers=_STORE_READERS)


def _check_size(path: str, found: int, expected: int) -> None:
    if found != expected:
        raise DamagedError(f"{path}: {found} bytes, the manifest says {expected}")


def _contents(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _open_direct(path: str) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def _vote_note(directory: str, node: str, expected: bytes) -> str:
    path = os.path.join(directory, VOTES_DIR, node)
    try:
        matches = digest(_contents(path)) == expected
    except OSError as error:
        return f"{path}: {error.strerror}"
    return "" if matches else f"{path}: block 0 does not match its digest; the data is not affected"


@dataclass(frozen=True, slots=True)
class Target:
    """Contiguous CPU bytes that one box of the image goes to."""

    data_offset: int
    nbytes: int
    address: int


def copy_out(source: Source, targets: list[Target], *, sparse: bool = False) -> None:
    """Copies parts of the image into the targets, several blocks at once. Raises DamagedError for the first bad block.

    All of the image is checked; sparse: only the blocks that hold something of a target are read.

    Reads, digests and copies run outside the GIL. On an error the targets hold verified bytes of some blocks and their
    old bytes elsewhere.
    """
    pieces = _pieces(targets)
    wanted = sorted(pieces) if sparse else range(block_count(source.nbytes))
    buffers: SimpleQueue[mmap.mmap] = SimpleQueue()
    for _ in range(min(source.readers, len(wanted))):
        buffers.put(_buffer())

    def copy_block(index: int) -> None:
        buffer = buffers.get()  # as many as threads: never waits
        try:
            source.read(index, buffer)
            base = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
            for offset, target, nbytes in pieces.get(index, ()):
                ctypes.memmove(target, base + offset, nbytes)
        finally:
            buffers.put(buffer)

    if not wanted:
        return
    with ThreadPoolExecutor(source.readers) as pool:
        jobs = [pool.submit(copy_block, index) for index in wanted]
        try:
            for job in jobs:
                job.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _buffer() -> mmap.mmap:
    """Page-aligned memory for one block, in huge pages where the kernel gives them."""
    buffer = mmap.mmap(-1, BLOCK_NBYTES)
    with contextlib.suppress(OSError):
        buffer.madvise(_HUGE)
    return buffer


def _pieces(targets: list[Target]) -> dict[int, list[tuple[int, int, int]]]:
    """For each block: (offset in the block, target address, bytes) of what it holds of each target."""
    out: dict[int, list[tuple[int, int, int]]] = {}
    for target in targets:
        done = 0
        while done < target.nbytes:
            index, offset = divmod(target.data_offset + done, BLOCK_NBYTES)
            nbytes = min(BLOCK_NBYTES - offset, target.nbytes - done)
            out.setdefault(index, []).append((offset, target.address + done, nbytes))
            done += nbytes
    return out
