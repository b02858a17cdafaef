"""Reads a segment back: each block is checked against its digest before any of its bytes reach a tensor."""

import ctypes
import mmap
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch

from ckptd.protocol.digest import BLOCK_NBYTES, DIGEST_NBYTES, block_count, digest
from ckptd.protocol.errors import DamagedError
from ckptd.protocol.ids import JobKey, SaveId, file_name
from ckptd.protocol.layout import Layout, Leaves, decode_layout, decode_leaves
from ckptd.protocol.manifest import COMMITTED, MANIFEST, VOTES_DIR, decode_committed, decode_manifest
from ckptd.protocol.slot import PAGE, SEALS_NBYTES, Seal, SlotState, align_up, decode_seals

_FILE_READERS = 4  # reads in flight: what large O_DIRECT reads need to keep a device busy


class Source(Protocol):
    """A rank's segment somewhere: its description, and its image block by block."""

    layout: Layout
    leaves: Leaves
    notes: list[str]
    readers: int

    def block(self, index: int) -> AbstractContextManager[int]:
        """Address of a block's bytes, digest checked, good within the context. Raises DamagedError. Thread-safe."""
        ...

    def close(self) -> None:
        """Lets go of files and memory."""
        ...


def _check_block(data: memoryview, index: int, table: bytes, where: str) -> None:
    if digest(data) != table[index * DIGEST_NBYTES : (index + 1) * DIGEST_NBYTES]:
        start = index * BLOCK_NBYTES
        raise DamagedError(f"{where}: block {index} (bytes {start} to {start + len(data)}) does not match its digest")


@dataclass(slots=True)
class _Held(AbstractContextManager[int]):
    """An address that needs nothing done when it is left."""

    address: int

    def __enter__(self) -> int:
        return self.address

    def __exit__(self, *_: object) -> None:
        return None


class SlotSource:
    """A sealed slot in the arena, mapped read-only."""

    def __init__(self, path: str, job: JobKey, save: SaveId, rank: int) -> None:
        self._where = path
        self.notes: list[str] = []
        self.readers = max(2, torch.get_num_threads())
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            # Private and writable only because torch wants no read-only buffer; nobody writes.
            self._memory = mmap.mmap(fd, 0, flags=mmap.MAP_PRIVATE)
        finally:
            os.close(fd)
        self._view = memoryview(self._memory)
        self._address = torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr()
        self._seal = self._checked_seal(job, save, rank)
        seal = self._seal
        self._table = self._part(seal.table_offset, seal.table_nbytes, seal.table_digest, "digest table")
        layout = self._part(seal.layout_offset, seal.layout_nbytes, seal.layout_digest, "layout")
        leaves = self._part(seal.leaves_offset, seal.leaves_nbytes, seal.leaves_digest, "leaves")
        self.layout = decode_layout(layout, where=path)
        self.leaves = decode_leaves(leaves, where=path)

    def _checked_seal(self, job: JobKey, save: SaveId, rank: int) -> Seal:
        seal = decode_seals(self._view[-SEALS_NBYTES:].tobytes())[2]
        if seal.state is not SlotState.DIGESTED or (seal.job, seal.save, seal.rank) != (job, save, rank):
            raise DamagedError(f"{self._where}: its seal is not that of {save}, rank {rank}")
        if seal.content_nbytes + SEALS_NBYTES > len(self._view):
            raise DamagedError(f"{self._where}: its seal claims more bytes than it has")
        return seal

    def _part(self, start: int, nbytes: int, expected: bytes, what: str) -> bytes:
        data = self._view[start : start + nbytes].tobytes()
        if digest(data) != expected:
            raise DamagedError(f"{self._where}: {what} (bytes {start} to {start + nbytes}) does not match its digest")
        return data

    def block(self, index: int) -> AbstractContextManager[int]:
        """The block where it lies in the slot."""
        start = index * BLOCK_NBYTES
        stop = min(start + BLOCK_NBYTES, self._seal.image_nbytes)
        _check_block(self._view[start:stop], index, self._table, self._where)
        return _Held(self._address + start)

    def close(self) -> None:
        """Unmaps the slot."""
        self._view.release()
        self._memory.close()


class FileSource:
    """A committed file on the PFS, read in large aligned pieces past the page cache where the file system allows."""

    def __init__(self, directory: str, save: SaveId, rank: int, world_size: int) -> None:
        manifest_raw = _read(os.path.join(directory, MANIFEST))
        committed_path = os.path.join(directory, COMMITTED)
        committed = decode_committed(_read(committed_path), where=committed_path)
        if committed.save != save or digest(manifest_raw).hex() != committed.manifest_xxh3_128:
            raise DamagedError(f"{directory}: {COMMITTED} does not match {MANIFEST}")
        manifest = decode_manifest(manifest_raw, where=os.path.join(directory, MANIFEST))
        if manifest.save != save or manifest.world_size != world_size:
            raise DamagedError(f"{directory}: the manifest is of {manifest.save}, {manifest.world_size} ranks")
        record = manifest.files[rank]
        self._where = os.path.join(directory, file_name(rank))
        self.layout = decode_layout(record.layout, where=self._where)
        self.leaves = decode_leaves(record.leaves, where=self._where)
        self.notes = _vote_notes(directory, [(v.node, v.digest) for v in manifest.votes])
        self.readers = _FILE_READERS
        self._nbytes, self._table = record.nbytes, record.digests
        self._fd = _open_direct(self._where)
        self._buffers = [mmap.mmap(-1, BLOCK_NBYTES) for _ in range(self.readers)]
        self._free = list(range(self.readers))
        if os.fstat(self._fd).st_size != record.nbytes:
            found = os.fstat(self._fd).st_size
            self.close()
            raise DamagedError(f"{self._where}: {found} bytes, the manifest says {record.nbytes}")

    def block(self, index: int) -> AbstractContextManager[int]:
        """The block in one of as many buffers as there are readers."""
        return _Buffered(self, index)

    def read_into(self, slot: int, index: int) -> int:
        """Reads and checks a block; returns its address."""
        start = index * BLOCK_NBYTES
        nbytes = min(BLOCK_NBYTES, self._nbytes - start)
        view = memoryview(self._buffers[slot])
        done = 0
        while done < nbytes:
            got = os.preadv(self._fd, [view[done : align_up(nbytes)]], start + done)
            if got <= 0:
                raise DamagedError(f"{self._where}: ends at byte {start + done}, the manifest says {self._nbytes}")
            done += got if got % PAGE == 0 or done + got >= nbytes else got - got % PAGE
        _check_block(view[:nbytes], index, self._table, self._where)
        return torch.frombuffer(self._buffers[slot], dtype=torch.uint8).data_ptr()

    def borrow(self) -> int:
        """A buffer for one block; there is one per reader, so this never waits."""
        return self._free.pop()

    def give_back(self, slot: int) -> None:
        """The buffer may be used again."""
        self._free.append(slot)

    def close(self) -> None:
        """Closes the file and frees the buffers."""
        os.close(self._fd)
        self._buffers.clear()


class _Buffered(AbstractContextManager[int]):
    """A block of a file for as long as the context lasts."""

    def __init__(self, source: FileSource, index: int) -> None:
        self._source = source
        self._index = index
        self._slot = -1

    def __enter__(self) -> int:
        self._slot = self._source.borrow()
        try:
            return self._source.read_into(self._slot, self._index)
        except BaseException:
            self._source.give_back(self._slot)
            raise

    def __exit__(self, *_: object) -> None:
        self._source.give_back(self._slot)


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _open_direct(path: str) -> int:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    return fd


def _vote_notes(directory: str, votes: list[tuple[str, bytes]]) -> list[str]:
    """Votes that no longer match the manifest: the data is proven without them, but somebody should know."""
    notes = []
    for node, expected in votes:
        path = os.path.join(directory, VOTES_DIR, node)
        try:
            damaged = digest(_read(path)) != expected
        except OSError as error:
            notes.append(f"{path}: {error.strerror}")
            continue
        if damaged:
            notes.append(f"{path}: block 0 does not match its digest; the checkpoint's data is not affected")
    return notes


@dataclass(frozen=True, slots=True)
class Target:
    """Contiguous CPU bytes that one box of the image goes to."""

    data_offset: int
    nbytes: int
    address: int


def copy_out(source: Source, targets: list[Target]) -> None:
    """Copies the image into the targets, several blocks at once. Raises DamagedError at the first bad block.

    The copies run outside the GIL. On an error the targets hold verified bytes of some blocks and old bytes elsewhere.
    """
    pieces = _pieces(targets)
    with ThreadPoolExecutor(source.readers) as pool:
        jobs = [pool.submit(_copy_block, source, i, pieces.get(i, [])) for i in _blocks(source)]
        try:
            for job in jobs:
                job.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _blocks(source: Source) -> Iterator[int]:
    return iter(range(block_count(source.layout.image_nbytes)))


def _copy_block(source: Source, index: int, pieces: list[tuple[int, int, int]]) -> None:
    with source.block(index) as address:
        for offset, target, nbytes in pieces:
            ctypes.memmove(target, address + offset, nbytes)


def _pieces(targets: list[Target]) -> dict[int, list[tuple[int, int, int]]]:
    """For each block, (offset in the block, target address, bytes) of what it holds of each target."""
    out: dict[int, list[tuple[int, int, int]]] = {}
    for target in targets:
        done = 0
        while done < target.nbytes:
            index, offset = divmod(target.data_offset + done, BLOCK_NBYTES)
            nbytes = min(BLOCK_NBYTES - offset, target.nbytes - done)
            out.setdefault(index, []).append((offset, target.address + done, nbytes))
            done += nbytes
    return out
