"""Which training processes live. Each keeps its rank file locked while it does; a pidfd wakes us when it ends."""

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass

from ckptd.shared.base.errors import DamagedError
from ckptd.shared.base.ids import JobKey
from ckptd.shared.files import locks
from ckptd.shared.format import arena_paths
from ckptd.shared.format.arena_paths import job_dir
from ckptd.shared.format.rank_file import MAX_NBYTES, RankRecord, decode


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

    def look(self, directory: str) -> tuple[list[LiveRank], list[RankRecord]]:
        """Live ranks of a job's directory that were not known, and those that died unseen; the latter's files go."""
        live, dead = [], []
        for path in _rank_files(directory):
            if path in self._ranks:
                continue
            pid = locks.holder(path)
            record = _read(path)
            if record is not None and pid is not None:
                rank = LiveRank(record.job, record.rank, record.session, pid, record.host, path)
                self._watch(rank)
                live.append(rank)
            elif pid is None:  # a rank's file has its name only once it is locked and whole
                _remove(path)
                dead += [record] if record is not None else []
        return live, dead

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
        _remove(path)

    def close(self) -> None:
        """Closes the pidfds; the files stay for the next daemon."""
        for fd in self._by_fd:
            os.close(fd)
        self._by_fd.clear()
        self._fds.clear()


def somebody_waits(arena: str) -> bool:
    """Whether a process holds the rank file of some job in the arena, attached or about to be."""
    return any(locks.holder(path) is not None for path in _all_rank_files(arena))


def living(arena: str) -> list[LiveRank]:
    """Ranks of all jobs in the arena whose processes live. Changes nothing: for who looks while no daemon answers."""
    held = ((path, locks.holder(path), _read(path)) for path in _all_rank_files(arena))
    return [
        LiveRank(record.job, record.rank, record.session, pid, record.host, path)
        for path, pid, record in held
        if pid is not None and record is not None
    ]


def _all_rank_files(arena: str) -> Iterator[str]:
    jobs = os.path.join(arena, arena_paths.JOBS)
    names = os.listdir(jobs) if os.path.isdir(jobs) else []
    return (path for name in sorted(names) for path in _rank_files(os.path.join(jobs, name)))


def job_of(directory: str) -> JobKey | None:
    """The job that some rank file in the directory names."""
    records = [record for path in _rank_files(directory) if (record := _read(path)) is not None]
    return next((r.job for r in records if os.path.basename(directory) == os.path.basename(job_dir(r.job))), None)


def _remove(path: str) -> None:
    """The rank file, and the step board beside it."""
    for one in (path, arena_paths.steps_beside(path)):
        if os.path.exists(one):
            os.unlink(one)


def _rank_files(directory: str) -> list[str]:
    names = sorted(os.listdir(directory)) if os.path.isdir(directory) else []
    paths = [os.path.join(directory, name) for name in names if name.endswith(arena_paths.RANK_SUFFIX)]
    return [path for path in paths if _is_file(path)]


def _is_file(path: str) -> bool:
    """Whether it is a file and nothing that leads elsewhere or blocks the process that opens it."""
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except FileNotFoundError:
        return False


def _read(path: str) -> RankRecord | None:
    """None: it was removed, or is no rank's."""
    try:
        with open(path, "rb") as file:
            return decode(file.read(MAX_NBYTES), where=path)
    except (OSError, DamagedError):
        return None
