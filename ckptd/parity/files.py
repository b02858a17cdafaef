"""The parity file of a save: parity, a record that says whose, and two seal pages like a slot's.

::

    0        nbytes   record_offset                                     capacity-8192  capacity
    | parity | pad to 4096 | record: parity chunk, digest of every 16 MiB block | unused .. | seal A | seal B |

What is not sealed is worth nothing, whatever it holds. Memory is dear to touch for the first time: a file that is given
back waits under another name for the next parity; two are kept for each job.
"""

import os
import threading
from typing import Final

from ckptd.arena.arena import Arena
from ckptd.parity.code import code_of
from ckptd.parity.record import (
    ParitySeal,
    decode_record,
    decode_seals,
    encode_record,
    put_seal,
    read_record,
    seal_of,
    store_record,
)
from ckptd.shared.base.errors import DamagedError, PeerError
from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.format import arena_paths
from ckptd.shared.format.digest import DIGEST_NBYTES, block_count, blocks
from ckptd.shared.format.integrity import Purpose
from ckptd.shared.format.manifest import ParityRecord
from ckptd.shared.format.slot import PAGE, SEALS_NBYTES, align_up
from ckptd.shared.protocol.parity_types import ParityChunk
from ckptd.system import failpoints

KEPT: Final = 2  # files per job, in use or spare
_MAX_WASTE: Final = 2  # times the bytes needed: a larger spare is no gain


class ParityFile:
    """One node's parity of one save, sealed. Blocks are checked at most once by each that is opened."""

    def __init__(self, arena: Arena, job: JobKey, name: str) -> None:
        self._name = name
        self._all = arena.view(job, name)
        self._integrity = arena.integrity
        self._seal = seal_of(self._all, self._integrity)
        if self._seal.job != job:
            raise PeerError(f"parity file {name} is not sealed")
        self.record = read_record(self._all, self._seal, name, self._integrity)
        self.parity_chunk = self.record.parity_chunk
        self.nbytes = self._seal.nbytes
        self._checked: set[int] = set()

    @property
    def store_record(self) -> ParityRecord:
        """What a vote says of it, once it lies on the store."""
        return store_record(self.parity_chunk, self._seal)

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Parity bytes."""
        return self._all[offset : offset + nbytes]

    def check(self, offset: int, nbytes: int) -> None:
        """Compares blocks with their digests. Raises DamagedError that names the block."""
        for index, (start, stop) in enumerate(blocks(self.nbytes)):
            if index in self._checked or start >= offset + max(nbytes, 1) or stop <= offset:
                continue
            at = index * DIGEST_NBYTES
            if self._integrity.digest(self._all[start:stop]) != self.record.table[at : at + DIGEST_NBYTES]:
                raise DamagedError(f"parity file {self._name} block {index} does not match its digest")
            self._checked.add(index)

    def still(self) -> bool:
        """Whether the seal is the one it was opened with."""
        return seal_of(self._all, self._integrity) == self._seal


def open_parity(arena: Arena, job: JobKey, save: SaveId, epoch: int) -> ParityFile | None:
    """The sealed parity of the save, None when there is none. Raises DamagedError."""
    name = arena_paths.parity_name(save, epoch)
    if name not in arena.sizes(job, arena_paths.PARITY_SUFFIX):
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

    def scan(self) -> list[tuple[JobKey, ParityChunk]]:
        """Every whole parity chunk found at start; what is not whole is removed."""
        found = []
        jobs = os.path.join(self.arena.path, arena_paths.JOBS)
        for entry in sorted(os.listdir(jobs)):
            directory = os.path.join(jobs, entry)
            if os.path.islink(directory) or not os.path.isdir(directory):
                continue
            for name in sorted(os.listdir(directory)):
                path = os.path.join(directory, name)
                if not name.endswith(arena_paths.PARITY_SUFFIX) or os.path.islink(path) or not os.path.isfile(path):
                    continue
                whole = self._whole(path, entry)
                if whole is None:
                    os.unlink(path)
                else:
                    self.arena.adopt_file(path)
                    found.append(whole)
        return found

    def _whole(self, path: str, entry: str) -> tuple[JobKey, ParityChunk] | None:
        """Job and parity chunk of a sealed file that lies where it belongs."""
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < SEALS_NBYTES or os.fstat(file.fileno()).st_blocks * 512 < size:
                return None
            file.seek(size - SEALS_NBYTES)
            seal = decode_seals(file.read(SEALS_NBYTES), self.arena.integrity, where=path)[2]
            if seal.job is None or seal.record_offset + seal.record_nbytes + SEALS_NBYTES > size:
                return None
            file.seek(seal.record_offset)
            raw = file.read(seal.record_nbytes)
        try:
            parity_chunk = decode_record(raw, seal.nbytes, seal.record_digest, path, self.arena.integrity).parity_chunk
        except DamagedError:
            return None
        there = os.path.join(arena_paths.JOBS, entry, os.path.basename(path))
        belongs = os.path.join(
            arena_paths.job_dir(seal.job), arena_paths.parity_name(parity_chunk.save, parity_chunk.epoch)
        )
        return (seal.job, parity_chunk) if there == belongs else None

    # --- life of a file

    def sealed(self, job: JobKey, save: SaveId, epoch: int) -> bool:
        """Whether the parity chunk is whole."""
        try:
            return open_parity(self.arena, job, save, epoch) is not None
        except DamagedError:
            return False  # it is made again

    def make(self, job: JobKey, parity_chunk: ParityChunk) -> str:
        """A file for the parity chunk, free and with its memory. Blocks. Raises BudgetError, OSError."""
        name = arena_paths.parity_name(parity_chunk.save, parity_chunk.epoch)
        need = _capacity(code_of(parity_chunk).parity_nbytes, len(encode_record(parity_chunk, b"")))
        self.arena.job_path(job)
        with self._lock:
            sizes = self.arena.sizes(job, arena_paths.PARITY_SUFFIX)
            if name in sizes:  # of an encode that was broken off
                put_seal(self.arena.view(job, name), ParitySeal(), self.arena.integrity)
                if need <= sizes[name]:
                    return name
                self.arena.unlink(job, name)
            spares = [n for n, size in sizes.items() if n.startswith("spare-") and need <= size <= _MAX_WASTE * need]
            if spares:
                self.arena.rename(job, min(spares), name)
                return name
            for spare in [n for n in sizes if n.startswith("spare-")]:
                self.arena.unlink(job, spare)  # of no use to this job any more
            self.arena.reserve(0, 1, need, f"parity of step {parity_chunk.save.step}")
        self.arena.allocate_file(job, name, need)
        return name

    def seal(self, job: JobKey, name: str, parity_chunk: ParityChunk, table: bytes) -> None:
        """Writes the record with the digest table of the parity, and only then the seal. Blocks."""
        view = self.arena.view(job, name)
        nbytes = code_of(parity_chunk).parity_nbytes
        failpoints.reach("encode.before-record")
        raw = encode_record(parity_chunk, table)
        record_digest = self.arena.integrity.digest(raw, Purpose.PARITY_RECORD)
        seal = ParitySeal(job=job, nbytes=nbytes, record_nbytes=len(raw), record_digest=record_digest)
        view[seal.record_offset : seal.record_offset + len(raw)] = raw
        failpoints.reach("encode.before-seal")
        put_seal(view, seal, self.arena.integrity)
        failpoints.reach("encode.after-seal")

    def give_back(self, job: JobKey, save: SaveId, epoch: int, *, keep: bool = True) -> None:
        """The parity chunk is no more. Its memory is kept for the next one, or freed, which blocks."""
        name = arena_paths.parity_name(save, epoch)
        with self._lock:
            sizes = self.arena.sizes(job, arena_paths.PARITY_SUFFIX)
            if name not in sizes:
                return
            put_seal(self.arena.view(job, name), ParitySeal(), self.arena.integrity)
            if keep and len(sizes) <= KEPT:
                self._spares += 1
                self.arena.rename(job, name, arena_paths.spare_name(self._spares))
                return
        self.arena.unlink(job, name)
        if not keep:
            self.arena.leave(job)


def _capacity(nbytes: int, record_nbytes: int) -> int:
    table = block_count(nbytes) * DIGEST_NBYTES + 16  # and the few bytes that say how long it is
    return align_up(nbytes) + align_up(record_nbytes + table, PAGE) + SEALS_NBYTES
