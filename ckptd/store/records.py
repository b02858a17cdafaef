"""The small files that a job has on a store beside its checkpoints: which session took which number, what is pinned."""

from typing import Protocol

from ckptd.shared.format.stored_files import StoredFiles


class JobRecords(Protocol):
    """Those of one job. Names are as ``.pins/step-000000100.i0001``; raises OSError where there is no store."""

    files: StoredFiles  # at the job's location

    def put(self, name: str, data: bytes, *, new: bool = False) -> bool:
        """The record written, and on the medium with its name when this returns. The job need not be there yet.

        new: only if there is none. Of several processes that put one at once, one gets True; a process that is killed
        meanwhile may leave an empty record. Without new the last one counts.
        """

    def drop(self, name: str) -> bool:
        """Whether there was one; it is gone from the medium when this returns."""
