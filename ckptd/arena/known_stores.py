"""Which store each job of this arena was saved to: the ids of stores, in one small file of the arena.

The file stays when a job's memory goes, so that a restarted job notices another disk, or none, at its path.
"""

import os

from ckptd.shared.base.ids import JobKey, StoreId
from ckptd.shared.files.records import put_record, record_at
from ckptd.shared.format import arena_paths

_MOST = 4096  # jobs; the oldest entries go first
_MAX_NBYTES = 8 << 20


class KnownStores:
    """The file and its content. For an arena whose lock is held. Only ``remember`` and ``forget`` write."""

    def __init__(self, arena: str) -> None:
        self._arena = arena
        self._path = os.path.join(arena, arena_paths.STORES)
        self._ids = record_at(self._path, dict[str, StoreId], _MAX_NBYTES, "the ids of stores cannot be read") or {}

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
        put_record(self._arena, self._path, self._ids)

    def forget(self, job: JobKey) -> None:
        """The user gives up what the job has here. Raises OSError."""
        if self._ids.pop(arena_paths.job_dir(job), None) is not None:
            put_record(self._arena, self._path, self._ids)
