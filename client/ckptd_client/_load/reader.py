"""Reads a segment: a load succeeds only if every block matches its digest."""

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import NamedTuple

import torch

from ckptd.shared.base.errors import DamagedError
from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.files.mapping import Mapping, fill, fill_huge
from ckptd.shared.files.regular import open_regular
from ckptd.shared.format.committed import file_findings, open_records, raise_first
from ckptd.shared.format.digest import BLOCK_NBYTES, DIGEST_NBYTES, block_count
from ckptd.shared.format.integrity import XXH3, Integrity, Purpose
from ckptd.shared.format.layout import Layout, Leaves, decode_leaves
from ckptd.shared.format.manifest import FileRecord
from ckptd.shared.format.packed_layout import decode_layout
from ckptd.shared.format.replica_attestations import Attestation
from ckptd.shared.format.slot import SEALS_NBYTES, Seal, SlotState, align_up, decode_seals
from ckptd.shared.format.stored_files import StoredFile, StoredFiles
from ckptd.shared.format.stored_records import StoredRecords
from ckptd.shared.stores.directory import OpenedFile
from ckptd_client._local.copy_engines import PinningError
from ckptd_client._local.destination import Destination, Place, deliver, engines_of

_STORE_READERS = 4  # reads in flight, so that large O_DIRECT reads keep a device busy
_CHUNK_NBYTES = 1 << 20  # fits the second-level cache of a core
Pieces = dict[int, list[Destination]]  # by block
_ARENA_READERS = 2  # at least; more threads than torch has do not speed up a copy from memory


@dataclass(frozen=True, slots=True)
class Piece:
    """A file that holds bytes of an image, from start on. start is whole pages, and nbytes too but for the last."""

    file: StoredFile
    where: str
    start: int
    nbytes: int

    def read(self, view: memoryview, offset: int, nbytes: int) -> None:
        """Fills view, nbytes rounded up to pages, with the bytes from offset on. Raises DamagedError, OSError."""
        try:
            found = self.file.read(view, offset, nbytes)
        except OSError as error:
            raise OSError(error.errno, error.strerror, self.where) from error
        if found < nbytes:
            raise DamagedError(f"{self.where}: ends at byte {offset + found}, it should have {self.nbytes}")


class Buffer(NamedTuple):
    """Memory for one block, whole pages."""

    address: int
    view: memoryview


@dataclass(frozen=True, slots=True)
class Source:
    """A rank's segment in a slot or on the store. Owns ``files``; close it with ``close``."""

    files: tuple[Piece, ...]  # of the image, in its order
    where: str
    nbytes: int  # of the image, which starts the file
    table: bytes  # one digest per block
    layout: Layout
    leaves: Leaves
    readers: int
    raw: bool = False  # there are zeros between the files
    mapping: Mapping | None = None  # of a slot: its huge pages cost less to map than to read
    holes: bool = False  # of a partial segment: it has what was pulled, which was checked on its way
    integrity: Integrity = XXH3  # what the digests are
    attestations: tuple[Attestation, ...] = ()  # the attestations of its rank

    def close(self) -> None:
        """Closes the files."""
        if self.mapping is not None:
            self.mapping.close()
        for piece in self.files:
            piece.file.close()

    def closed(self, *, holes: bool = False) -> "Source":
        """What it says of itself, after close."""
        return replace(self, files=(), mapping=None, holes=holes)

    def checked(self, index: int, buffer: Mapping | Buffer) -> int:
        """Address of buffer, filled with a block that matches its digest. Raises DamagedError. Thread-safe."""
        start = index * BLOCK_NBYTES
        stop = min(start + BLOCK_NBYTES, self.nbytes)
        if self.raw:
            ctypes.memset(buffer.address, 0, stop - start)  # what lies between its files
        for piece in self.files:
            first, last = max(start, piece.start), min(stop, piece.start + piece.nbytes)
            if first < last:
                part = buffer.view[first - start : align_up(last - start)]
                piece.read(part, first - piece.start, last - first)
                if self.raw:
                    part[last - first :] = bytes(len(part) - (last - first))  # a direct read may fill its last page
        self.check(index, self.integrity.digest(buffer.view[: stop - start]))
        return buffer.address

    def check(self, index: int, found: bytes) -> None:
        """Raises DamagedError naming file, block and bytes unless the block should have this digest."""
        if found != self.table[index * DIGEST_NBYTES : (index + 1) * DIGEST_NBYTES]:
            start = index * BLOCK_NBYTES
            place = f"block {index} (bytes {start} to {min(start + BLOCK_NBYTES, self.nbytes)})"
            hint = "" if self.mapping else f"see what else is wrong: ckptd verify {os.path.dirname(self.where)}"
            raise DamagedError(f"{self.where}: {place} does not match its digest", hint=hint)


def open_slot(path: str, job: JobKey, save: SaveId, rank: int, integrity: Integrity = XXH3) -> Source:
    """The segment in a slot of the arena. Raises DamagedError, OSError."""
    fd = open_regular(path)
    try:
        seal = _checked_seal(fd, path, (job, save, rank), integrity)
        table, layout, leaves = (
            _part(fd, path, seal, what, integrity) for what in ("digest table", "layout", "leaves")
        )
        return Source(
            files=(Piece(OpenedFile(fd), path, 0, seal.image_nbytes),),
            where=path,
            nbytes=seal.image_nbytes,
            table=table,
            layout=_slot_layout(layout, seal, path),
            leaves=decode_leaves(leaves, where=path),
            readers=max(_ARENA_READERS, torch.get_num_threads()),
            mapping=Mapping(fd, seal.image_nbytes, writable=False),
            integrity=integrity,
            attestations=seal.attestations,
        )
    except BaseException:
        os.close(fd)
        raise


def layout_of(path: str, job: JobKey, save: SaveId, rank: int, integrity: Integrity = XXH3) -> bytes:
    """The encoded layout in a slot, or in a partial segment. Raises DamagedError, OSError."""
    fd = open_regular(path)
    try:
        return _part(fd, path, _checked_seal(fd, path, (job, save, rank), integrity), "layout", integrity)
    finally:
        os.close(fd)


def reopened(described: Source, path: str, job: JobKey, save: SaveId, rank: int) -> Source:
    """A slot, or a partial segment, of which all but the bytes of its image is known. Raises DamagedError, OSError."""
    fd = open_regular(path)
    try:
        seal = _checked_seal(fd, path, (job, save, rank), described.integrity)
        files = (Piece(OpenedFile(fd), path, 0, seal.image_nbytes),)
        return replace(described, files=files, mapping=Mapping(fd, seal.image_nbytes, writable=False))
    except BaseException:
        os.close(fd)
        raise


def _checked_seal(fd: int, path: str, of: tuple[JobKey, SaveId, int], integrity: Integrity) -> Seal:
    capacity = os.fstat(fd).st_size
    pages = os.pread(fd, SEALS_NBYTES, max(0, capacity - SEALS_NBYTES))
    seal = decode_seals(pages, integrity, where=path)[2]
    if seal.state is not SlotState.DIGESTED or (seal.job, seal.save, seal.rank) != of:
        raise DamagedError(f"{path}: its seal is not that of {of[1]}, rank {of[2]}")
    if seal.content_nbytes + SEALS_NBYTES > capacity:
        raise DamagedError(f"{path}: its seal claims more bytes than it has")
    return seal


def _slot_layout(raw: bytes, seal: Seal, path: str) -> Layout:
    layout = decode_layout(raw, where=path)
    said = (layout.rank, layout.world_size, layout.image_nbytes, layout.raw)
    parts = tuple(part.nbytes for part in layout.parts)
    if (*said, parts) != (seal.rank, seal.world_size, seal.image_nbytes, seal.raw, seal.parts):
        raise DamagedError(f"{path}: its layout is of another slot")
    return layout


def _part(fd: int, path: str, seal: Seal, what: str, integrity: Integrity) -> bytes:
    start, nbytes, expected = seal.tail[what]
    data = os.pread(fd, nbytes, start)
    if integrity.digest(data, Purpose(what)) != expected:
        raise DamagedError(f"{path}: {what} (bytes {start} to {start + nbytes}) does not match its digest")
    return data


def read_records(stored: StoredFiles, save: SaveId | None = None) -> StoredRecords:
    """The records of a committed checkpoint (of save, if given), each read when it is asked for.

    Raises UsageError, DamagedError, OSError; so does asking.
    """
    return open_records(stored, save=save)


def open_file(records: StoredRecords, rank: int) -> Source:
    """An image of a committed checkpoint, read past the page cache where possible. Raises DamagedError, OSError."""
    stored, record = records.files, records[rank]
    path = stored.where(record.name)
    layout, leaves = records.layout(rank), decode_leaves(record.leaves, where=path)
    files: list[Piece] = []
    try:
        for name, start, nbytes in record.extents():
            files.append(Piece(stored.open(name), stored.where(name), start, nbytes))
            _check_size(files[-1])
    except BaseException:
        for piece in files:
            piece.file.close()
        raise
    return Source(
        tuple(files), path, record.nbytes, record.digests, layout, leaves, _STORE_READERS, layout.raw,
        integrity=stored.integrity, attestations=record.attestations,
    )  # fmt: skip


def check_files(stored: StoredFiles, records: Iterable[FileRecord]) -> None:
    """Raises unless these images exist with the sizes of the manifest; call it before memory is allocated for them."""
    raise_first(file_findings(stored, records))  # of sizes alone


def _check_size(piece: Piece) -> None:
    if piece.file.nbytes != piece.nbytes:
        raise DamagedError(f"{piece.where}: {piece.file.nbytes} bytes, should be {piece.nbytes}")


@dataclass(frozen=True, slots=True)
class Target:
    """Contiguous bytes that are the destination of a range of the image."""

    data_offset: int
    nbytes: int
    address: int  # in the host's memory
    device: torch.Tensor | None = None  # in place of the address: bytes on a device, which the caller keeps idle

    def place(self, done: int, nbytes: int) -> Place:
        """Where so many bytes go after the first so many."""
        return self.address + done if self.device is None else self.device[done : done + nbytes]


def copy_out(source: Source, targets: list[Target], *, sparse: bool = False) -> None:
    """Copies parts of the image into the targets, several blocks at once. Raises DamagedError for the first bad block.

    All of the image is checked; sparse: only the blocks that hold something of a target are read.

    Reads, digests and copies run outside the GIL. On an error the targets hold parts of the image, damaged or not, and
    their old bytes elsewhere.
    """
    if source.holes:
        return _copy_unchecked(source, targets)
    pieces = pieces_of(targets, BLOCK_NBYTES)
    wanted = sorted(pieces) if sparse else list(range(block_count(source.nbytes)))
    if source.mapping is None:
        copy_blocks(source, pieces, wanted)
    else:
        _each(source, wanted, _from_memory(source, targets))
    return None


def _copy_unchecked(source: Source, targets: list[Target]) -> None:
    """Copies from a partial segment, whose blocks have holes and so no digest to compare."""
    assert source.mapping is not None  # noqa: S101 - the caller has opened it
    base, pieces = source.mapping.address, pieces_of(targets, BLOCK_NBYTES)

    def copy_block(index: int) -> None:
        deliver(pieces[index], base + index * BLOCK_NBYTES)

    _each(source, sorted(pieces), copy_block)


def copy_blocks(source: Source, pieces: Pieces, wanted: list[int]) -> None:
    """Reads these blocks of a file, checks them, and copies the pieces out of them. Raises DamagedError, OSError."""
    _each(source, wanted, _from_file(source, pieces, len(wanted)))


def _each(source: Source, wanted: list[int], copy_block: Callable[[int], None]) -> None:
    """Copies these blocks, several at once."""
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


def _from_file(source: Source, pieces: Pieces, count: int) -> Callable[[int], None]:
    """Reads a block into a buffer, checks it, copies it; count blocks in all."""
    buffers = _buffers(min(source.readers, count), pieces)

    def copy_block(index: int) -> None:
        buffer = buffers.get()  # one per thread: never waits
        try:
            deliver(pieces.get(index, ()), source.checked(index, buffer))
        finally:
            buffers.put(buffer)

    return copy_block


def _from_memory(source: Source, targets: list[Target]) -> Callable[[int], None]:
    """Digests and copies a block chunk by chunk, each while it is in the core's own cache: memory is read once."""
    assert source.mapping is not None  # noqa: S101 - the caller has checked
    view, base = source.mapping.view, source.mapping.address
    pieces = pieces_of([target for target in targets if target.device is None], _CHUNK_NBYTES)
    far = pieces_of([target for target in targets if target.device is not None], BLOCK_NBYTES)
    buffers = _buffers(min(source.readers, len(far)), far)

    def copy_block(index: int) -> None:
        found = source.integrity.hasher()
        start = index * BLOCK_NBYTES
        buffer = buffers.get() if index in far else None  # pinned, for fast copies to a device
        try:
            for at in range(start, min(start + BLOCK_NBYTES, source.nbytes), _CHUNK_NBYTES):
                chunk = view[at : min(at + _CHUNK_NBYTES, source.nbytes)]
                found.update(chunk)
                deliver(pieces.get(at // _CHUNK_NBYTES, ()), base + at)
                if buffer is not None:
                    ctypes.memmove(buffer.address + at - start, base + at, len(chunk))
            source.check(index, found.value())
            if buffer is not None:
                deliver(far[index], buffer.address)
        finally:
            if buffer is not None:
                buffers.put(buffer)

    return copy_block


def _buffers(count: int, pieces: Pieces) -> SimpleQueue[Mapping]:
    """Memory for so many blocks, pinned when pieces of them go to a device."""
    engines = engines_of(place for found in pieces.values() for _, place, _ in found)
    buffers: SimpleQueue[Mapping] = SimpleQueue()
    for _ in range(count):
        buffer = _buffer()
        for engine in engines[:1]:  # memory pinned by one engine is pinned for all
            with contextlib.suppress(PinningError):
                buffer.before_unmap(engine.register(buffer.address, buffer.nbytes))
        buffers.put(buffer)
    return buffers


def _buffer() -> Mapping:
    """Memory for one block, in huge pages where the kernel gives them: a disk reads into scattered pages bit by bit."""
    buffer = Mapping(None, BLOCK_NBYTES)
    if not fill_huge(buffer, 0, BLOCK_NBYTES):
        fill(buffer, 0, BLOCK_NBYTES)
    return buffer


def pieces_of(targets: list[Target], step: int) -> Pieces:
    """For each step of the image: what it holds of each target."""
    out: Pieces = {}
    for target in targets:
        done = 0
        while done < target.nbytes:
            index, offset = divmod(target.data_offset + done, step)
            nbytes = min(step - offset, target.nbytes - done)
            out.setdefault(index, []).append((offset, target.place(done, nbytes), nbytes))
            done += nbytes
    return out
