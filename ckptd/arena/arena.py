"""The arena: a directory on tmpfs that this daemon alone owns, and the slot files in it."""

import contextlib
import errno
import os
import stat
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from ckptd.arena.budget import Budget, budget
from ckptd.arena.names import listdir, opened, rank_lives, rmdir_if_empty, unlink_if_there
from ckptd.arena.publications import Publications
from ckptd.arena.slot_memory import make_slot
from ckptd.shared.base.errors import BudgetError, ConfigError, DamagedError
from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.files import locks, spare_pages
from ckptd.shared.files.arena_location import make_directory
from ckptd.shared.files.mapping import Mapping
from ckptd.shared.format import arena_paths
from ckptd.shared.format.digest import blocks
from ckptd.shared.format.integrity import XXH3, Integrity, Purpose
from ckptd.shared.format.slot import SEALS_NBYTES, Seal, SlotState, decode_seals, next_seal
from ckptd.system import failpoints
from ckptd.system.units import format_size

MAX_SOCKET_PATH = 107  # sun_path, less its final NUL


@dataclass(frozen=True, slots=True)
class FoundSlot:
    """A slot file seen at start."""

    job_dir: str  # relative to the arena, as places.job_dir gives it
    name: str
    rank: int
    capacity: int
    seal: Seal


class Fragments(NamedTuple):
    """What a digested slot holds beside its image."""

    seal: Seal
    table: bytes
    layout: bytes
    leaves: bytes
    objects: bytes = b""  # of rank 0 alone


class Arena:
    """Owns the directory from open to close. Slot pages may be touched from threads, each slot from one at a time.

    integrity: the digest that proves its contents.
    """

    def __init__(self, path: str, budget_nbytes: int = 0, integrity: Integrity = XXH3) -> None:
        self.path = path
        self.publications = Publications(path)
        """Where ranks of this node want a trainer's files: the one word of it that counts."""
        self.integrity = integrity
        self._limit_nbytes = budget_nbytes
        self._lock_fd = -1
        self._mappings: dict[str, Mapping] = {}
        self._serials: dict[tuple[JobKey, int], int] = {}
        self._accounts = threading.Lock()
        self._used: dict[str, int] = {}  # slot path -> bytes
        self._making: dict[str, object] = {}  # slots whose pages are being touched; one that is missing was unlinked
        self._reserved = 0

    # --- life of the directory

    def open(self) -> None:
        """Makes and locks the directory. Raises ConfigError when it is somebody else's, in use, or no memory."""
        if len(self.socket_path.encode()) > MAX_SOCKET_PATH:
            raise ConfigError(
                f"arena {self.path!r}: its socket's path has {len(self.socket_path.encode())} bytes, "
                f"a unix socket's may have {MAX_SOCKET_PATH}",
                hint="choose a shorter arena: --arena, CKPTD_ARENA or connect(arena=...)",
            )
        make_directory(self.path)
        fd = locks.take(os.path.join(self.path, arena_paths.LOCK))
        if fd is None:
            pid = locks.holder(os.path.join(self.path, arena_paths.LOCK))
            raise ConfigError(
                f"a daemon (pid {pid}) already serves arena {self.path!r}", hint=f"ckptd status --arena {self.path}"
            )
        self._lock_fd = fd
        os.makedirs(os.path.join(self.path, arena_paths.JOBS), mode=0o700, exist_ok=True)
        self.keep_ballast()

    def keep_ballast(self) -> None:
        """Pages for small files are set aside, as many as there is room for."""
        if self.in_place():
            spare_pages.take(self.path)

    @property
    def socket_path(self) -> str:
        """Where ranks reach the daemon."""
        return os.path.join(self.path, arena_paths.SOCKET)

    def in_place(self) -> bool:
        """Whether path still leads to the directory that open locked."""
        try:
            return os.path.samestat(os.stat(os.path.join(self.path, arena_paths.LOCK)), os.fstat(self._lock_fd))
        except OSError:
            return False

    def close(self, *, remove: bool) -> None:
        """Gives the directory up; with remove, deletes what is left of it when no slot is. The lock goes last."""
        self._mappings.clear()  # a thread that still reads one keeps it
        unlink_if_there(self.socket_path)
        jobs = os.path.join(self.path, arena_paths.JOBS)
        if remove and not self._used:
            rmdir_if_empty(jobs)
        if remove and not os.path.exists(jobs):  # else a job of it counts on the identity, and reads the log
            small = (
                arena_paths.LOG,
                arena_paths.BALLAST,
                arena_paths.STORES,
                arena_paths.IDENTITY,
                arena_paths.NUMBERS,
            )
            for name in (*small, *(f"{one}.new" for one in small), arena_paths.LOCK):
                unlink_if_there(os.path.join(self.path, name))
            rmdir_if_empty(self.path)
        os.close(self._lock_fd)

    def job_path(self, job: JobKey) -> str:
        """Directory of the job, made if missing."""
        path = os.path.join(self.path, arena_paths.job_dir(job))
        os.makedirs(path, mode=0o700, exist_ok=True)
        return path

    def slot_path(self, job: JobKey, name: str) -> str:
        """Absolute path of a slot."""
        return os.path.join(self.path, arena_paths.job_dir(job), name)

    def scan(self) -> list[FoundSlot]:
        """Every slot file, with the seal in force. Files that are no slots are left alone."""
        found = []
        for entry in sorted(listdir(os.path.join(self.path, arena_paths.JOBS))):
            job_dir = f"{arena_paths.JOBS}/{entry}"
            directory = os.path.join(self.path, job_dir)
            if os.path.islink(directory):
                continue  # not ours, so nothing of it is removed
            for name in sorted(listdir(directory)):
                parsed = arena_paths.parse_slot_name(name)
                path = os.path.join(directory, name)
                file = os.lstat(path)
                if parsed is None or not stat.S_ISREG(file.st_mode):
                    if name.endswith(arena_paths.PARTIAL_SUFFIX) and path not in self._used:
                        os.unlink(path)  # of a load that ended with an earlier daemon
                    continue
                capacity = file.st_size
                if capacity < SEALS_NBYTES or file.st_blocks * 512 < capacity:
                    os.unlink(path)  # its allocation was cut short: a write where no page is would kill the writer
                    continue
                found.append(FoundSlot(job_dir, name, parsed[0], capacity, _read_seal(path, capacity, self.integrity)))
                self._used[path] = capacity
        return found

    def remove_stray(self, slot: FoundSlot) -> None:
        """Unlinks a slot file found at start that belongs to no job."""
        path = os.path.join(self.path, slot.job_dir, slot.name)
        unlink_if_there(path)
        self._used.pop(path, None)
        rmdir_if_empty(os.path.dirname(path))

    def adopt_serial(self, job: JobKey, name: str) -> None:
        """Makes sure that the slot's serial is not used again."""
        rank, serial = arena_paths.parse_slot_name(name) or (0, 0)
        self._serials[job, rank] = max(self._serials.get((job, rank), 0), serial)

    # --- memory

    def budget(self) -> Budget:
        """Bytes that can still be allocated now, and the limit that decides."""
        return budget(self.path)

    @property
    def used_nbytes(self) -> int:
        """Bytes of all slot files, allocated or about to be."""
        with self._accounts:
            return sum(self._used.values()) + self._reserved

    def budget_nbytes(self) -> int:
        """Bytes the arena may hold in all."""
        with self._accounts:
            touched = sum(self._used.values())
        room = self.budget().nbytes + touched
        return min(room, self._limit_nbytes) if self._limit_nbytes else room

    def nbytes_of(self, job: JobKey, name: str) -> int:
        """Bytes of a slot, 0 when there is none of that name."""
        with self._accounts:
            return self._used.get(self.slot_path(job, name), 0)

    def reserve(self, rank: int, count: int, capacity: int, what: str = "", *, spare_nbytes: int = 0) -> None:
        """Sets count x capacity aside. Raises BudgetError with the numbers and the setting to change.

        what: needs them, if it is no rank. spare_nbytes: what of the arena is given back for them first.
        """
        need, free = count * capacity, self.budget()
        with self._accounts:
            # What is reserved is not touched yet, so the machine still counts it as free.
            taken = self._reserved - spare_nbytes
            have = free.nbytes - taken
            own = self._limit_nbytes - sum(self._used.values()) - taken if self._limit_nbytes else have
            if need <= min(have, own):
                self._reserved += need
                return
        by_user = own < have
        slots = "" if what else f"{count} slots of {format_size(capacity)} = "
        why = "" if what else " (a slot for each save in memory: slots_per_rank)"
        name = "budget_nbytes, set by you" if by_user else free.tightest.name
        raise BudgetError(
            f"{what or f'rank {rank}'} needs {slots}{format_size(need)}{why}, "
            f"the arena has room for {format_size(max(0, min(have, own)))} more (limit: {name})",
            hint="raise budget_nbytes, or lower slots_per_rank to 2" if by_user else free.tightest.how_to_raise,
        )

    def allocate(self, job: JobKey, rank: int, capacity: int) -> str:
        """Makes a slot of the bytes set aside, each page faulted in, and returns its name. Blocks; for threads.

        Raises OSError (ENOSPC) when the tmpfs is fuller than it said.
        """
        with self._accounts:
            serial = self._serials.get((job, rank), 0) + 1
            self._serials[job, rank] = serial
        name = arena_paths.slot_name(rank, serial)
        self.allocate_file(job, name, capacity)
        return name

    def allocate_file(self, job: JobKey, name: str, capacity: int) -> None:
        """Makes a file of that name of the bytes set aside; else as allocate. Ends early when it is unlinked."""
        path = self.slot_path(job, name)
        left, mark = capacity, object()
        with self._accounts:
            self._making[path] = mark
        try:
            self.job_path(job)
            for taken in make_slot(path, capacity):
                left -= taken
                with self._accounts:  # what has its pages is no longer free, as the machine counts
                    self._reserved -= taken
                    if self._making.get(path) is not mark:
                        raise FileNotFoundError(errno.ENOENT, "given up while it was made", path)
                    self._used[path] = self._used.get(path, 0) + taken
        except OSError:
            self.release(left)
            if self._making.get(path) is mark:
                self.unlink(job, name)
            raise
        with self._accounts:
            if self._making.get(path) is mark:
                del self._making[path]

    def fill_in(self, job: JobKey, name: str, ranges: Iterable[tuple[int, int]], what: str) -> None:
        """Has memory for these pages (start, stop) of a file with holes. Blocks; for threads.

        what: needs it. Raises BudgetError; OSError, also when the file is not there any more.
        """
        path, pages = self.slot_path(job, name), list(ranges)
        left = sum(stop - start for start, stop in pages)
        self.reserve(0, 1, left, what)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                for start, stop in pages:
                    os.posix_fallocate(fd, start, stop - start)
                    left -= stop - start
                    with self._accounts:
                        self._reserved -= stop - start
                        self._used[path] = self._used.get(path, 0) + stop - start
            finally:
                os.close(fd)
        finally:
            self.release(left)

    def release(self, nbytes: int) -> None:
        """Gives back bytes that were set aside and not allocated."""
        with self._accounts:
            self._reserved -= nbytes

    def unlink(self, job: JobKey, name: str) -> None:
        """Removes a slot and gives its memory back. Blocks; for threads. Existing mappings keep their pages."""
        path = self.slot_path(job, name)
        with self._accounts:  # a thread finds the slot complete or not at all: none maps it after this
            last, mapping = opened(path), self._mappings.pop(path, None)
            unlink_if_there(path)
            self._making.pop(path, None)
        del mapping
        if last is not None:
            os.close(last)  # only here is the memory given back, with nobody waiting for the lock
        with self._accounts:
            self._used.pop(path, None)

    def rename(self, job: JobKey, old: str, new: str) -> None:
        """Gives a file's memory another name; its mapping stays warm."""
        before, after = self.slot_path(job, old), self.slot_path(job, new)
        os.rename(before, after)
        with self._accounts:
            self._used[after] = self._used.pop(before)
            if before in self._mappings:
                self._mappings[after] = self._mappings.pop(before)

    def adopt_file(self, path: str) -> int:
        """Counts a file found at start; its bytes."""
        nbytes = os.lstat(path).st_size
        with self._accounts:
            self._used[path] = nbytes
        return nbytes

    def sizes(self, job: JobKey, suffix: str) -> dict[str, int]:
        """Bytes of the job's files of the suffix, by name, as far as they are accounted for."""
        directory = os.path.join(self.path, arena_paths.job_dir(job))
        with self._accounts:
            return {
                os.path.basename(path): nbytes
                for path, nbytes in self._used.items()
                if path.endswith(suffix) and os.path.dirname(path) == directory
            }

    def slot_of(self, job: JobKey, rank: int, save: SaveId) -> str | None:
        """Name of the rank's slot that holds the save, digested. For threads too."""
        for name in self.sizes(job, arena_paths.SLOT_SUFFIX):
            parsed = arena_paths.parse_slot_name(name)
            if parsed is None or parsed[0] != rank:
                continue
            with contextlib.suppress(OSError):  # unlinked meanwhile
                seal = self.seal_of(job, name)
                if (seal.save, seal.rank, seal.state) == (save, rank, SlotState.DIGESTED):
                    return name
        return None

    def forget_job(self, job: JobKey) -> None:
        """Removes the job's directory, its topology and the files of ranks that are gone."""
        directory = os.path.join(self.path, arena_paths.job_dir(job))
        while names := self.sizes(job, arena_paths.PARITY_SUFFIX):  # one may be given another name meanwhile
            for name in names:
                self.unlink(job, name)
        for name in listdir(directory):
            path = os.path.join(directory, name)
            with contextlib.suppress(OSError):  # a link or a directory of that name stays, and so does the job's
                left = arena_paths.RANK_SUFFIX in name and locks.holder(path) is None
                left = left or arena_paths.READ_GROUP_SUFFIX in name  # of ranks that were killed while they joined
                left = left or (name.endswith(arena_paths.STEPS_SUFFIX) and not rank_lives(path))
                left = left or name.endswith(
                    (arena_paths.PUBLISHED_SUFFIX, arena_paths.DUE_SUFFIX, arena_paths.DUE_SUFFIX + ".new")
                )
                if left or name in (arena_paths.TOPOLOGY, arena_paths.TOPOLOGY + ".new"):
                    os.unlink(path)
        rmdir_if_empty(directory)

    def leave(self, job: JobKey) -> None:
        """Removes the job's directory if nothing is in it."""
        rmdir_if_empty(os.path.join(self.path, arena_paths.job_dir(job)))

    # --- slots

    def seal_of(self, job: JobKey, name: str) -> Seal:
        """The seal in force."""
        return decode_seals(bytes(self._view(job, name)[-SEALS_NBYTES:]), self.integrity, where=f"slot {name}")[2]

    def free(self, job: JobKey, name: str) -> None:
        """Invalidates the slot's old bytes for every reader."""
        failpoints.reach("stage.before-slot-freed")
        self._put_seal(job, name, Seal())
        failpoints.reach("stage.after-slot-freed")

    def digests(self, job: JobKey, name: str, save: SaveId) -> bytes | None:
        """The digest table of the slot's image, None when it does not hold the save. Blocks; for threads."""
        failpoints.reach("stage.before-digest")
        seal = self.seal_of(job, name)
        view = self._view(job, name)
        if seal.save != save or seal.content_nbytes + SEALS_NBYTES > len(view):
            return None
        return b"".join(self.integrity.digest(view[start:stop]) for start, stop in blocks(seal.image_nbytes))

    def seal_digests(self, job: JobKey, name: str, table: bytes) -> None:
        """Puts the digest table, then the seal that vouches for it, in force. The slot must hold what was digested."""
        view, seal = self._view(job, name), self.seal_of(job, name)
        failpoints.reach("stage.before-table")
        view[seal.table_offset : seal.table_offset + len(table)] = table
        failpoints.reach("stage.before-digested-seal")
        table_digest = self.integrity.digest(table, Purpose.TABLE)
        vouched = msgspec.structs.replace(seal, state=SlotState.DIGESTED, table_digest=table_digest)
        self._put_seal(job, name, vouched)
        failpoints.reach("stage.after-digested-seal")

    def fragments(self, job: JobKey, name: str) -> Fragments:
        """The tail of a digested slot, each part checked. Raises DamagedError."""
        view, seal = self._view(job, name), self.seal_of(job, name)
        if seal.state is not SlotState.DIGESTED:
            raise DamagedError(f"slot {name}: no digests sealed")
        parts = []
        for what, part in seal.tail.items():
            parts.append(bytes(view[part.offset : part.offset + part.nbytes]))
            if self.integrity.digest(parts[-1], Purpose(what)) != part.digest:
                raise DamagedError(f"slot {name}: {what} does not match its digest")
        return Fragments(seal, *parts)

    def seal(self, job: JobKey, name: str, seal: Seal) -> None:
        """Puts the seal of a slot that the daemon itself has filled and checked in force."""
        self._put_seal(job, name, seal)

    def view(self, job: JobKey, name: str) -> memoryview:
        """All bytes of a file, which stay mapped as long as somebody holds them."""
        return self._view(job, name)

    def _put_seal(self, job: JobKey, name: str, seal: Seal) -> None:
        view = self._view(job, name)
        offset, page = next_seal(bytes(view[-SEALS_NBYTES:]), seal, self.integrity)
        start = len(view) - SEALS_NBYTES + offset
        view[start : start + len(page)] = page

    def _view(self, job: JobKey, name: str) -> memoryview:
        """The slot's bytes, mapped while the slot lives: mapping it again for each save costs page faults."""
        path = self.slot_path(job, name)
        with self._accounts:
            mapping = self._mappings.get(path)
            if mapping is None:
                fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
                try:
                    mapping = Mapping(fd, os.fstat(fd).st_size)
                finally:
                    os.close(fd)
                self._mappings[path] = mapping
        return mapping.view

    def forget_mapping(self, job: JobKey, name: str) -> None:
        """Unmaps a slot that nobody will ask for again; a thread that still reads it keeps it."""
        with self._accounts:
            self._mappings.pop(self.slot_path(job, name), None)


def _read_seal(path: str, capacity: int, integrity: Integrity) -> Seal:
    with open(path, "rb") as file:
        file.seek(capacity - SEALS_NBYTES)
        return decode_seals(file.read(SEALS_NBYTES), integrity, where=path)[2]
