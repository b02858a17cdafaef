"""Which committed checkpoints may go, and which are on their way. Pure."""

from collections.abc import Collection, Iterable

from ckptd.core import events as ev
from ckptd.core.actions import Action, Note, RemoveCheckpoint
from ckptd.protocol.ids import JobKey, SaveId


def superfluous(committed: Iterable[SaveId], *, keep_last: int) -> list[SaveId]:
    """Committed saves beyond the newest keep_last, oldest first. The newest one always stays; keep_last 0 keeps all."""
    if keep_last <= 0:
        return []
    return sorted(committed)[:-keep_last]


class Retention:
    """Removals of one job's committed checkpoints."""

    def __init__(self, job: JobKey, keep_last: int) -> None:
        self._job = job
        self._keep_last = keep_last
        self._removing: set[SaveId] = set()
        self.hold = False  # a load reads from the store just now

    def retire(self, committed: Collection[SaveId]) -> list[Action]:
        """Removes what is superfluous."""
        if self.hold:
            return []
        gone = superfluous(set(committed) - self._removing, keep_last=self._keep_last)
        self._removing |= set(gone)
        return [RemoveCheckpoint(job=self._job, save=save) for save in gone]

    def removed(self, event: ev.CheckpointRemoved) -> list[Action]:
        """A removal ended; one that failed is tried again with the next commit."""
        self._removing.discard(event.save)
        return [Note(job=self._job, text=f"could not remove {event.save}: {event.problem}")] if event.problem else []
