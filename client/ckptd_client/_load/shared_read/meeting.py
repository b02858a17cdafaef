"""Where the ranks of a node meet for one read: a file in the arena, which is one meeting and never another.

A rank enters before it opens anything of the checkpoint. From then on it has the file open, and says all it has to say
in it: that it joins, declines, or has left. So no word is said under a name, which may stand for a later meeting. The
file has a name until all have entered, or one has given up; what enters then makes a new file. A rank that finds itself
in the file of the name has been in that meeting, and makes a new one too.

Names are given and removed by one rank at a time, which holds a lock of the job's directory. Each rank holds a lock of
the file as long as it may still say something: a file that none holds is what an earlier read left, and is removed.
"""

import contextlib
import errno
import fcntl
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from ckptd.shared.files.mapping import Mapping as Memory
from ckptd.shared.format.arena_paths import READ_GROUP_SUFFIX, read_group_name
from ckptd.shared.format.digest import digest
from ckptd_client._load.shared_read.group_memory import ABSENT, DECLINED, ENTERED, LEFT, Layout, mapped

log = logging.getLogger("ckptd_client")
_TURN_S: Final = 2.0  # for the lock of the directory, which a rank that is stopped may hold
_PAUSE_S: Final = 0.001


@dataclass(frozen=True, slots=True)
class NodeReaders:
    """The ranks of this node that read a checkpoint on the store; they meet in a node group.

    read: names the read, on all nodes that take part. number: of the read, as this rank counts those of all ranks; 0:
    the name is the read's alone.
    """

    directory: str  # of the job in the arena
    session: str
    readers: tuple[int, ...]
    rank: int
    read: str
    nodes: bool = False  # whether other nodes take part
    number: int = 0

    @property
    def is_shared(self) -> bool:
        """Whether this rank reads it, and another rank or node does too."""
        return bool(self.read) and self.rank in self.readers and (len(self.readers) > 1 or self.nodes)

    @property
    def is_leader(self) -> bool:
        """Whether this rank exchanges blocks with other nodes."""
        return self.nodes and self.readers[:1] == (self.rank,)

    def enter(self) -> "Meeting | None":
        """This rank's place in the meeting; None: it reads alone. Blocks for _TURN_S at most."""
        if not self.is_shared:
            return None
        try:
            return Meeting(self)
        except OSError as error:  # no memory, for example
            log.info("ckptd: rank %d reads by itself: %s", self.rank, error)
            return None


class Meeting:
    """One rank's part in a meeting, from its entry on. Raises OSError."""

    def __init__(self, here: NodeReaders) -> None:
        self.here = here
        self.index = here.readers.index(here.rank)
        self.layout = Layout(len(here.readers), here.nodes)
        names = f"{here.session} {here.readers} {here.read} {here.nodes}"
        self._path = os.path.join(here.directory, read_group_name(digest(names.encode()).hex()[:16]))
        with _turn(here.directory):
            _sweep(here.directory, self._path)
            self._fd, self._counters = self._enter()

    def _enter(self) -> tuple[int, memoryview]:
        layout, own = self.layout, self.layout.state(self.index)
        while True:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                counters = self._counters_of(fd)
                if counters[own] == ABSENT and not self._is_left(fd, counters):
                    fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    counters[layout.read(self.index)] = self.here.number
                    counters[own] = ENTERED
                    if all(counters[layout.state(rank)] for rank in range(layout.ranks)):
                        self._remove()
                    return fd, counters
                self._remove()
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)

    def _counters_of(self, fd: int) -> memoryview:
        try:
            return mapped(fd, self.layout.counters_nbytes).view.cast("Q")
        except OSError:
            if os.fstat(fd).st_size < self.layout.counters_nbytes:
                self._remove()  # of no use to any
            raise

    def _is_left(self, fd: int, counters: memoryview) -> bool:
        """Whether ranks left the file of an earlier read of this name, in which others did not enter."""
        numbers = [counters[self.layout.read(rank)] for rank in range(self.layout.ranks)]
        return 0 < max(numbers) < self.here.number and _locked(fd)

    def _remove(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)

    def memory(self, layout: Layout) -> Memory:
        """All memory of the group, for a checkpoint of so many blocks. Raises OSError."""
        return mapped(self._fd, layout.nbytes)

    def decline(self) -> None:
        """This rank does not take part: no other waits for it, and nothing of other nodes comes through it."""
        layout, state = self.layout, self.layout.state(self.index)
        if self._counters[state] == ENTERED:
            for member in (self.index, *([layout.ranks] if self.here.is_leader else [])):
                self._counters[layout.position(member)] = LEFT
            self._counters[state] = DECLINED

    def end(self) -> None:
        """No rank enters any more."""
        with contextlib.suppress(OSError), _turn(self.here.directory):
            if os.stat(self._path, follow_symlinks=False).st_ino == os.fstat(self._fd).st_ino:
                os.unlink(self._path)

    def close(self) -> None:
        """This rank says nothing more. Its word stays where others may still come for it."""
        with contextlib.suppress(OSError):
            fcntl.flock(self._fd, fcntl.LOCK_UN)  # a forked process has the descriptor too
        os.close(self._fd)


@contextlib.contextmanager
def _turn(directory: str) -> Iterator[None]:
    """One process at a time. Raises TimeoutError, OSError."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        deadline = time.monotonic() + _TURN_S
        while not _locked(fd):
            if time.monotonic() >= deadline:
                raise TimeoutError(errno.ETIMEDOUT, "another rank holds the lock", directory)
            time.sleep(_PAUSE_S)
        try:
            yield
        finally:
            fcntl.flock(fd, fcntl.LOCK_UN)  # a forked process has the descriptor too
    finally:
        os.close(fd)


def _locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _sweep(directory: str, but: str) -> None:
    """Removes what ranks that were killed left of other reads."""
    for name in os.listdir(directory):
        path = os.path.join(directory, name)
        if not name.endswith(READ_GROUP_SUFFIX) or path == but:
            continue
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                if _locked(fd):
                    os.unlink(path)
                    fcntl.flock(fd, fcntl.LOCK_UN)
            finally:
                os.close(fd)
