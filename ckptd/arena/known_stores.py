"""Which store each job of this arena was saved to: the ids of stores, in one small file of the arena.

The file stays when a job's memory goes, so that a restarted job notices another disk, or none, at its path.
"""

import contextlib
import logging
import os

import msgspec

from ckptd.shared.base.decoding import MALFORMED
from ckptd.shared.base.ids import JobKey, StoreId
from ckptd.shared.base.log_line import line
from ckptd.shared.files import spare_pages
from ckptd.shared.format import arena_paths

log = logging.getLogger("ckptd")
_MOST = 4096  # jobs; the oldest entries go first
_MAX_NBYTES = 8 << 20


class KnownStores:
    """The file and its content. For an arena whose lock is held. Only ``remember`` and ``forget`` write."""

    def __init__(self, arena: str) -> None:
        self._arena = arena
        self._path = os.path.join(arena, arena_paths.STORES)
        self._ids: dict[str, StoreId] = self._read()

    def of(self, job: JobKey) -> StoreId | None:
        """The store that the job was saved to last; None: not recorded."""
        return self._ids.get(arena_paths.job_dir(job))

    def remember(self, job: JobKey, store_id: StoreId) -> None:
        """Keeps it for the next process of this daemon. Blocks for one small write. Raises OSError."""
        name = arena_paths.job_dir(job)
        if self._ids.get(name) == store_id:
            return
        self._ids.pop(name, None)
        self._ids[name] = store_id
        for oldest in list(self._ids)[:-_MOST]:
            del self._ids[oldest]
        self._write()

    def forget(self, job: JobKey) -> None:
        """The user gives up what the job has here. Raises OSError."""
        if self._ids.pop(arena_paths.job_dir(job), None) is not None:
            self._write()

    def _read(self) -> dict[str, StoreId]:
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            with os.fdopen(fd, "rb") as file:
                return msgspec.msgpack.decode(file.read(_MAX_NBYTES), type=dict[str, StoreId])
        except FileNotFoundError:
            return {}
        except (OSError, *MALFORMED) as error:
            log.warning(line("the ids of stores cannot be read", path=self._path, error=error))
            return {}

    def _write(self) -> None:
        raw = msgspec.msgpack.encode(self._ids)
        spare_pages.write(self._arena, lambda: _put(self._path, raw))


def _put(path: str, raw: bytes) -> None:
    new = f"{path}.new"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(new)
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(raw)
    os.replace(new, path)
