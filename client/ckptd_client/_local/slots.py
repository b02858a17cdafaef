"""This rank's files in the arena: its rank file, and the slots that it may write."""

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import tempfile
from collections.abc import Callable

import torch

from ckptd.shared.base.errors import ConnectError
from ckptd.shared.base.ids import JobKey
from ckptd.shared.files import locks, spare_pages
from ckptd.shared.files.arena_location import make_directory
from ckptd.shared.files.mapping import POPULATE_WRITE, Mapping
from ckptd.shared.format import arena_paths, rank_file
from ckptd.shared.format.integrity import XXH3, Integrity
from ckptd.shared.format.slot import SEALS_NBYTES, Seal, next_seal
from ckptd_client._local.copy_engines import CopyEngine, PinningError
from ckptd_client._local.rank import Group

log = logging.getLogger("ckptd_client")

_POPULATE_NBYTES = 16 << 20  # 1 ms in small pages
_TRIES = 100  # to make a file in a directory that is removed meanwhile
_ARENA_HINT = "set another with connect(arena=...) or CKPTD_ARENA"


def _create(path: str) -> tuple[int, str]:
    """Descriptor and name of a new file beside path. Its directory may be removed at any moment, with a former run."""
    directory = os.path.dirname(path)
    for made in (os.path.dirname(directory), directory):  # makedirs would leave the upper one to the umask
        with contextlib.suppress(FileExistsError, FileNotFoundError):
            os.mkdir(made, 0o700)
    return tempfile.mkstemp(dir=directory, prefix=os.path.basename(path) + ".")


class RankFile:
    """Shows the daemon that this process is alive: locked until close, or until the process ends in any way.

    A record lock, because forked DataLoader workers would keep an flock. No other code in this process may open the
    file: closing any descriptor of it would release the lock. The file has its name only once it is locked and whole:
    so a file of that name that no process locks is an ended process's, and any process may remove it.
    """

    def __init__(self, arena: str, job: JobKey, rank: int, session: str) -> None:
        self.path = os.path.join(arena, arena_paths.job_dir(job), arena_paths.rank_file_name(rank, session))
        try:
            with spare_pages.told_when_full(arena, f"a small file of rank {rank}"):
                make_directory(arena)
                self._make(arena, rank_file.encode(rank_file.RankRecord(job, rank, session, os.uname().nodename)))
        except OSError as error:
            named = error.filename or self.path
            named = self.path if str(named).startswith(self.path) else named
            text = f"rank {rank} cannot make {named}: {error.strerror or error}"
            raise ConnectError(text, hint=f"ls -la {arena}; {_ARENA_HINT}") from None

    def _make(self, arena: str, record: bytes) -> None:
        for _ in range(_TRIES):
            with contextlib.suppress(FileNotFoundError):  # the directory was removed, or what lay in it
                self._fd, new = _create(self.path)
                try:
                    found = os.fstat(self._fd)
                    self._file = (found.st_dev, found.st_ino)
                    fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    spare_pages.write(arena, lambda: self._put(record))
                    self._name(new)
                except BaseException:
                    os.close(self._fd)
                    raise
                finally:
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(new)
                return
        raise ConnectError(f"{os.path.dirname(self.path)} is removed again and again")

    def _put(self, record: bytes) -> None:
        if os.pwrite(self._fd, record, 0) < len(record):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.path)

    def _name(self, new: str) -> None:
        """Gives the locked file its name, in place of the file of an ended process."""
        try:
            os.link(new, self.path)
        except FileExistsError:
            if locks.holder(self.path) is not None:
                text = f"another process holds {self.path}: it is this rank of this session already"
                raise ConnectError(text, hint="give each process its own rank") from None
            os.rename(new, self.path)

    @property
    def lost(self) -> bool:
        """Whether the file was removed, as by rm -r or logind's RemoveIPC, so that no process sees the lock."""
        return file_at(self.path) != self._file

    def meet(self, group: Group) -> None:
        """Blocks until all ranks' files exist, if ranks have no messages. Removes its file and raises ConnectError."""
        if group.meet is None:
            return
        directory = os.path.dirname(self.path)
        try:
            group.meet(
                lambda rank: os.path.exists(os.path.join(directory, arena_paths.rank_file_name(rank, group.session)))
            )
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)  # a later rank would count this one as present
            raise

    def close(self) -> None:
        """Releases the lock."""
        os.close(self._fd)


def file_at(path: str) -> tuple[int, int] | None:
    """Device and inode, which distinguish files of one name."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return (found.st_dev, found.st_ino)


class SlotMap:
    """One mapped slot. Forked children do not inherit the mapping, so they cannot write to it."""

    def __init__(self, path: str) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            found = os.fstat(fd)
            self.file = (found.st_dev, found.st_ino)
            self.mapping = Mapping(fd, found.st_size)
        finally:
            os.close(fd)
        self.mapping.advise(mmap.MADV_DONTFORK)
        self.bytes = torch.frombuffer(self.mapping.view, dtype=torch.uint8)
        self.views: list[torch.Tensor] = []  # of the tensors of the plan plan_id
        self.plan_id = ""
        self.pinned: bool | None = None  # None: not tried yet
        self.populated = False

    @property
    def capacity(self) -> int:
        """Bytes of the slot file."""
        return self.mapping.nbytes

    @property
    def memory(self) -> memoryview:
        """The slot's bytes."""
        return self.mapping.view

    def populate(self, stop: Callable[[], bool] = lambda: False) -> None:
        """Maps every page now, so that the first copy is as fast as later ones. Blocks; no effect before Linux 5.14.

        Works in parts, because each holds the process's memory lock; stop may end it between two parts.
        """
        if self.populated:
            return
        with contextlib.suppress(OSError):
            for start in range(0, self.mapping.nbytes, _POPULATE_NBYTES):
                if stop():
                    return
                self.mapping.advise(POPULATE_WRITE, start, min(_POPULATE_NBYTES, self.mapping.nbytes - start))
        self.populated = True

    def pin(self, engine: CopyEngine) -> None:
        """Registers the slot with the copy engines of all devices, once, until it is unmapped. Blocks, never raises.

        The daemon collapsed its pages before it granted the slot: pinned pages cannot be moved. If the slot cannot be
        registered, copies still work, but block the thread that starts them.
        """
        if self.pinned is not None:
            return
        try:
            self.mapping.before_unmap(engine.register(self.mapping.address, self.mapping.nbytes))
            self.pinned = True
        except PinningError as error:
            self.pinned = False
            _warn_unpinned(self.capacity, error)

    def put_seal(self, seal: Seal, integrity: Integrity = XXH3) -> None:
        """Writes the seal: from now on every reader of the slot takes its content as complete."""
        offset, page = next_seal(bytes(self.memory[-SEALS_NBYTES:]), seal, integrity)
        start = self.capacity - SEALS_NBYTES + offset
        self.memory[start : start + len(page)] = page

    def close(self) -> None:
        """Releases the slot; a tensor that still views it keeps it mapped."""
        self.views = []
        del self.bytes
        self.mapping.close()


def _warn_unpinned(nbytes: int, error: PinningError) -> None:
    """Warns once per process."""
    if not _warned:
        _warned.append(True)
        log.warning(
            "ckptd: a slot of %d bytes cannot be pinned, so copies from the GPU are slower and hold up training: %s; "
            "raise the limit of locked memory (ulimit -l unlimited, docker run --ulimit memlock=-1)",
            nbytes,
            error,
        )


_warned: list[bool] = []


class Slots:
    """The slots granted to this rank, oldest grant first; each file is mapped once, while it exists."""

    def __init__(self, directory: str) -> None:
        self.directory = directory  # of the job in the arena
        self.granted: dict[str, int] = {}  # capacity by name; read-only for others
        self.held: set[str] = set()  # filled and not sealed: never taken, even if a new daemon grants them again
        self._maps: dict[str, SlotMap] = {}

    def grant(self, name: str, capacity: int) -> None:
        """Records that the daemon lets this rank write the slot."""
        self.granted[name] = capacity

    def give_back(self) -> None:
        """Drops all grants."""
        self.granted.clear()

    def withdraw(self, name: str) -> None:
        """Drops the grant of a slot."""
        self.granted.pop(name, None)

    def withdraw_below(self, capacity: int) -> None:
        """Drops the grants of smaller slots."""
        self.granted = {name: nbytes for name, nbytes in self.granted.items() if nbytes >= capacity}

    def path(self, name: str) -> str:
        """Absolute path of a slot."""
        return os.path.join(self.directory, name)

    def maps(self) -> list[SlotMap]:
        """The mappings of the granted slots."""
        return [self.map(name) for name in self.granted if name not in self.held]

    def lent(self) -> list[SlotMap]:
        """The mappings of slots that the daemon has now: nothing writes to their sealed content."""
        return [slot for name, slot in self._maps.items() if name not in self.granted and name not in self.held]

    @property
    def count(self) -> int:
        """Slots granted now."""
        return len(self.granted)

    def fitting(self, nbytes: int) -> str | None:
        """Name of a granted slot of at least so many bytes."""
        fits = (name for name, capacity in self.granted.items() if capacity >= nbytes and name not in self.held)
        return next(fits, None)

    def take(self, name: str) -> SlotMap:
        """The slot's mapping; drops its grant, unless it cannot be mapped."""
        slot = self.map(name)
        del self.granted[name]
        return slot

    def map(self, name: str) -> SlotMap:
        """The slot's mapping, created if it is new. Closes mappings of removed files then.

        A name alone does not identify a file: a daemon that found the arena empty counts from the start again.
        """
        if name not in self._maps or self._maps[name].file != file_at(self.path(name)):
            for old in [n for n, slot in self._maps.items() if slot.file != file_at(self.path(n))]:
                self._maps.pop(old).close()
            self._maps[name] = SlotMap(self.path(name))
        return self._maps[name]

    def unmap_below(self, capacity: int) -> None:
        """Unmaps smaller slots: mapped memory is not free after its file is unlinked."""
        small = [name for name, slot in self._maps.items() if slot.capacity < capacity and name not in self.held]
        for name in small:
            self._maps.pop(name).close()

    def populate(self) -> None:
        """Maps all pages of all granted slots. Blocks."""
        for name in list(self.granted):
            self.map(name).populate()

    def close(self) -> None:
        """Unmaps everything."""
        self.granted.clear()
        while self._maps:
            self._maps.popitem()[1].close()
