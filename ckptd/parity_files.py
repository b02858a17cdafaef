"""The parity file of a save: parity, a record that says whose, and two seal pages like a slot's.

::

    0        nbytes   record_offset                                     capacity-8192  capacity
    | parity | pad to 4096 | record: piece, digest of every 16 MiB block | unused .. | seal A | seal B |

What is not sealed is worth nothing, whatever it holds. Memory is dear to touch for the first time: a file that is given
back waits under another name for the next parity; two are kept for each job.
"""

import os
import struct
import threading
from typing import Annotated, Final

import msgspec

from ckptd import failpoints
from ckptd.arena import Arena
from ckptd.core.events import Piece
from ckptd.parity.code import Code
from ckptd.parity.streams import column_nbytes
from ckptd.protocol import places
from ckptd.protocol.decoding import MALFORMED
from ckptd.protocol.digest import DIGEST_NBYTES, block_count, blocks, digest
from ckptd.protocol.errors import DamagedError, PeerError
from ckptd.protocol.ids import Digest, JobKey, Nbytes, SaveId
from ckptd.protocol.slot import PAGE, SEAL_NBYTES, SEALS_NBYTES, align_up

KEPT: Final = 2  # files per job, in use or spare
_MAX_WASTE: Final = 2  # times the bytes needed: a larger spare is no gain
_MAGIC: Final = b"CKPTDPY1"
_PREFIX: Final = struct.Struct("<8sQI")  # magic, sequence, body length


class ParitySeal(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Vouches for the record, which vouches for the parity. nbytes 0 and no job: the file is free."""

    job: JobKey | None = None
    nbytes: Nbytes = 0
    record_nbytes: Nbytes = 0
    record_digest: Digest = bytes(16)

    @property
    def record_offset(self) -> int:
        """Where the record begins."""
        return align_up(self.nbytes)


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """What the parity is of, and the digests of its blocks."""

    piece: Piece
    table: Annotated[bytes, msgspec.Meta(max_length=1 << 30)]


_seal_decoder = msgspec.msgpack.Decoder(ParitySeal)
_record_decoder = msgspec.msgpack.Decoder(Record)


def code_of(piece: Piece) -> Code:
    """The shape of the piece's set."""
    return Code(piece.scheme, len(piece.columns), max(map(column_nbytes, piece.columns), default=0))


class ParityFile:
    """One node's parity of one save, sealed. Blocks are checked at most once by each that is opened."""

    def __init__(self, arena: Arena, job: JobKey, name: str) -> None:
        self._name = name
        self._all = arena.view(job, name)
        self._seal = seal_of(self._all)
        if self._seal.job != job:
            raise PeerError(f"parity file {name} is not sealed")
        self.record = _read_record(self._all, self._seal, name)
        self.piece = self.record.piece
        self.nbytes = self._seal.nbytes
        self._checked: set[int] = set()

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Parity bytes."""
        return self._all[offset : offset + nbytes]

    def check(self, offset: int, nbytes: int) -> None:
        """Compares blocks with their digests. Raises DamagedError that names the block."""
        for index, (start, stop) in enumerate(blocks(self.nbytes)):
            if index in self._checked or start >= offset + max(nbytes, 1) or stop <= offset:
                continue
            at = index * DIGEST_NBYTES
            if digest(self._all[start:stop]) != self.record.table[at : at + DIGEST_NBYTES]:
                raise DamagedError(f"parity file {self._name} block {index} does not match its digest")
            self._checked.add(index)

    def still(self) -> bool:
        """Whether the seal is the one it was opened with."""
        return seal_of(self._all) == self._seal


def open_parity(arena: Arena, job: JobKey, save: SaveId, epoch: int) -> ParityFile | None:
    """The sealed parity of the save, None when there is none. Raises DamagedError."""
    name = places.parity_name(save, epoch)
    if name not in arena.sizes(job, places.PARITY_SUFFIX):
        return None
    try:
        return ParityFile(arena, job, name)
    except (OSError, PeerError):
        return None


class Parities:
    """The parity files of an arena: makes, seals, gives back. For threads."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self._lock = threading.Lock()
        self._spares = 0

    # --- start

    def scan(self) -> list[tuple[JobKey, Piece]]:
        """Every whole piece found at start; what is not whole is removed."""
        found = []
        jobs = os.path.join(self.arena.path, places.JOBS)
        for entry in sorted(os.listdir(jobs)):
            directory = os.path.join(jobs, entry)
            if os.path.islink(directory) or not os.path.isdir(directory):
                continue
            for name in sorted(os.listdir(directory)):
                path = os.path.join(directory, name)
                if not name.endswith(places.PARITY_SUFFIX) or os.path.islink(path) or not os.path.isfile(path):
                    continue
                whole = self._whole(path, entry)
                if whole is None:
                    os.unlink(path)
                else:
                    self.arena.adopt_file(path)
                    found.append(whole)
        return found

    def _whole(self, path: str, entry: str) -> tuple[JobKey, Piece] | None:
        """Job and piece of a sealed file that lies where it belongs."""
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < SEALS_NBYTES or os.fstat(file.fileno()).st_blocks * 512 < size:
                return None
            file.seek(size - SEALS_NBYTES)
            seal = decode_seals(file.read(SEALS_NBYTES))[2]
            if seal.job is None or seal.record_offset + seal.record_nbytes + SEALS_NBYTES > size:
                return None
            file.seek(seal.record_offset)
            raw = file.read(seal.record_nbytes)
        try:
            piece = _decode_record(raw, seal, path).piece
        except DamagedError:
            return None
        there = os.path.join(places.JOBS, entry, os.path.basename(path))
        belongs = os.path.join(places.job_dir(seal.job), places.parity_name(piece.save, piece.epoch))
        return (seal.job, piece) if there == belongs else None

    # --- life of a file

    def sealed(self, job: JobKey, save: SaveId, epoch: int) -> bool:
        """Whether the piece is whole."""
        try:
            return open_parity(self.arena, job, save, epoch) is not None
        except DamagedError:
            return False  # it is made again

    def make(self, job: JobKey, piece: Piece) -> str:
        """A file for the piece, free and with its memory. Blocks. Raises BudgetError, OSError."""
        name = places.parity_name(piece.save, piece.epoch)
        need = _capacity(code_of(piece).parity_nbytes, len(_encode_record(piece, b"")))
        self.arena.job_path(job)
        with self._lock:
            sizes = self.arena.sizes(job, places.PARITY_SUFFIX)
            if name in sizes:  # of an encode that was broken off
                _put_seal(self.arena.view(job, name), ParitySeal())
                if need <= sizes[name]:
                    return name
                self.arena.unlink(job, name)
            spares = [n for n, size in sizes.items() if n.startswith("spare-") and need <= size <= _MAX_WASTE * need]
            if spares:
                self.arena.rename(job, min(spares), name)
                return name
            for spare in [n for n in sizes if n.startswith("spare-")]:
                self.arena.unlink(job, spare)  # of no use to this job any more
            self.arena.reserve(0, 1, need, f"parity of step {piece.save.step}")
        self.arena.allocate_file(job, name, need)
        return name

    def seal(self, job: JobKey, name: str, piece: Piece) -> None:
        """Digests the parity, writes the record, and only then the seal. Blocks."""
        view = self.arena.view(job, name)
        nbytes = code_of(piece).parity_nbytes
        table = b"".join(digest(view[start:stop]) for start, stop in blocks(nbytes))
        failpoints.reach("encode.before-record")
        raw = _encode_record(piece, table)
        seal = ParitySeal(job=job, nbytes=nbytes, record_nbytes=len(raw), record_digest=digest(raw))
        view[seal.record_offset : seal.record_offset + len(raw)] = raw
        failpoints.reach("encode.before-seal")
        _put_seal(view, seal)
        failpoints.reach("encode.after-seal")

    def give_back(self, job: JobKey, save: SaveId, epoch: int, *, keep: bool = True) -> None:
        """The piece is no more. Its memory is kept for the next one, or freed, which blocks."""
        name = places.parity_name(save, epoch)
        with self._lock:
            sizes = self.arena.sizes(job, places.PARITY_SUFFIX)
            if name not in sizes:
                return
            _put_seal(self.arena.view(job, name), ParitySeal())
            if keep and len(sizes) <= KEPT:
                self._spares += 1
                self.arena.rename(job, name, places.spare_name(self._spares))
                return
        self.arena.unlink(job, name)
        if not keep:
            self.arena.leave(job)


# --- bytes


def _capacity(nbytes: int, record_nbytes: int) -> int:
    table = block_count(nbytes) * DIGEST_NBYTES + 16  # and the few bytes that say how long it is
    return align_up(nbytes) + align_up(record_nbytes + table, PAGE) + SEALS_NBYTES


def _encode_record(piece: Piece, table: bytes) -> bytes:
    return msgspec.msgpack.encode(Record(piece=piece, table=table))


def _decode_record(raw: bytes, seal: ParitySeal, where: str) -> Record:
    if digest(raw) != seal.record_digest:
        raise DamagedError(f"parity file {where}: its record does not match its digest")
    try:
        record = _record_decoder.decode(raw)
        code = code_of(record.piece)
    except (*MALFORMED, ValueError) as error:
        raise DamagedError(f"parity file {where}: its record is malformed: {error}") from None
    if code.parity_nbytes != seal.nbytes or len(record.table) != block_count(seal.nbytes) * DIGEST_NBYTES:
        raise DamagedError(f"parity file {where}: its record and its bytes do not fit together")
    return record


def _read_record(view: memoryview, seal: ParitySeal, name: str) -> Record:
    start = seal.record_offset
    return _decode_record(bytes(view[start : start + seal.record_nbytes]), seal, name)


def seal_of(view: memoryview) -> ParitySeal:
    """The seal in force of a parity file's bytes."""
    return decode_seals(bytes(view[-SEALS_NBYTES:]))[2]


def decode_seals(pages: bytes) -> tuple[int, int, ParitySeal]:
    """(index, sequence, seal) of the younger valid page; that of a free file when neither is valid."""
    best = (1, 0, ParitySeal())
    for index in (0, 1):
        page = pages[index * SEAL_NBYTES : (index + 1) * SEAL_NBYTES]
        magic, sequence, nbytes = _PREFIX.unpack_from(page)
        if magic != _MAGIC or digest(page[:-DIGEST_NBYTES]) != page[-DIGEST_NBYTES:] or sequence <= best[1]:
            continue
        try:
            best = (index, sequence, _seal_decoder.decode(page[_PREFIX.size : _PREFIX.size + nbytes]))
        except MALFORMED:
            continue
    return best


def _put_seal(view: memoryview, seal: ParitySeal) -> None:
    index, sequence, _ = decode_seals(bytes(view[-SEALS_NBYTES:]))
    body = msgspec.msgpack.encode(seal)
    head = (_PREFIX.pack(_MAGIC, sequence + 1, len(body)) + body).ljust(SEAL_NBYTES - DIGEST_NBYTES, b"\0")
    start = len(view) - SEALS_NBYTES + (1 - index) * SEAL_NBYTES
    view[start : start + SEAL_NBYTES] = head + digest(head)
