"""Which training processes live. Each keeps its rank file locked while it does; a pidfd wakes us when it ends."""

import json
import os
from dataclasses import dataclass

from ckptd import locks
from ckptd.protocol import places
from ckptd.protocol.ids import JobKey


@dataclass(frozen=True, slots=True)
class LiveRank:
    """A process that holds a rank file's lock."""

    job: JobKey
    rank: int
    session: str
    pid: int  # as this daemon sees it; 0 when it is in another pid namespace
    host: str
    path: str


class Liveness:
    """Rank files of all jobs. ``descriptors`` are to be polled; a readable one means: call ``ended``."""

    def __init__(self) -> None:
        self._ranks: dict[str, LiveRank] = {}
        self._by_fd: dict[int, str] = {}
        self._fds: dict[str, int] = {}

    @property
    def descriptors(self) -> list[int]:
        """Pidfds to poll for reading."""
        return list(self._by_fd)

    @property
    def unwatched(self) -> bool:
        """Whether some rank has no pidfd, so that ``ended`` must be called now and then."""
        return len(self._fds) < len(self._ranks)

    def knows(self, path: str) -> bool:
        """Whether a live process holds this rank file."""
        return path in self._ranks

    def look(self, job: JobKey, directory: str) -> list[LiveRank]:
        """Live ranks of a job that were not known; files nobody holds are removed."""
        found = []
        for name in sorted(os.listdir(directory)) if os.path.isdir(directory) else []:
            path = os.path.join(directory, name)
            if not name.endswith(places.RANK_SUFFIX) or path in self._ranks:
                continue
            pid = locks.holder(path)
            rank = None if pid is None else _read(job, path, pid)
            if rank is not None:
                self._watch(rank)
                found.append(rank)
            elif pid is None and _is_complete(path):
                os.unlink(path)
        return found

    def _watch(self, rank: LiveRank) -> None:
        self._ranks[rank.path] = rank
        try:
            fd = os.pidfd_open(rank.pid) if rank.pid else None
        except OSError:
            fd = None
        if fd is not None:
            self._fds[rank.path], self._by_fd[fd] = fd, rank.path

    def ended(self) -> list[LiveRank]:
        """Ranks whose lock nobody holds any more; they are forgotten and their files removed."""
        gone = [rank for path, rank in self._ranks.items() if locks.holder(path) is None]
        for rank in gone:
            self.forget(rank.path)
        return gone

    def forget(self, path: str) -> None:
        """The rank closed, or ended."""
        self._ranks.pop(path, None)
        fd = self._fds.pop(path, None)
        if fd is not None:
            del self._by_fd[fd]
            os.close(fd)
        if os.path.exists(path):
            os.unlink(path)

    def close(self) -> None:
        """Closes the pidfds; the files stay for the next daemon."""
        for fd in self._by_fd:
            os.close(fd)
        self._by_fd.clear()
        self._fds.clear()


def _read(job: JobKey, path: str, pid: int) -> LiveRank | None:
    try:
        with open(path, "rb") as file:
            data = json.loads(file.read(4096))
        return LiveRank(job, int(data["rank"]), str(data["session"]), pid, str(data["host"]), path)
    except (ValueError, KeyError, TypeError):
        return None  # it is just being written


def _is_complete(path: str) -> bool:
    """Whether its writer got as far as writing it: an empty file may be about to be locked."""
    return os.path.exists(path) and os.path.getsize(path) > 0
