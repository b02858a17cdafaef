"""Which committed checkpoints may go, and which are on their way. Pure."""

from collections.abc import Collection, Iterable

from ckptd.core import events as ev
from ckptd.core.actions import Action, Note, RemoveCheckpoint
from ckptd.core.coordinator.job_state import JobState
from ckptd.shared.base.ids import Run, SaveId


def superfluous(
    committed: Iterable[SaveId], *, keep_last: int, keep_every: int = 0, pinned: Collection[SaveId] = ()
) -> list[SaveId]:
    """Committed saves beyond the newest keep_last, oldest first. The newest one always stays; keep_last 0 keeps all.

    keep_every: those of steps that are multiples of it stay too, and those that are pinned.
    """
    if keep_last <= 0:
        return []
    old = sorted(committed)[:-keep_last]
    return [save for save in old if save not in pinned and not (keep_every and save.step % keep_every == 0)]


def removed_by_others(known: Iterable[SaveId], found: Collection[SaveId], present: Run) -> list[SaveId]:
    """Checkpoints that were committed once, and that a scan of the store did not find: others took them, or all.

    present: the run that commits now. What it committed may be newer than the scan, but for those older than the newest
    that was found of it: commits come in order.
    """
    newest = max((save for save in found if save.owner == present), default=None)
    lost = [save for save in known if save not in found]
    return [save for save in lost if save.owner != present or (newest is not None and save < newest)]


class Retention:
    """Removals of one job's committed checkpoints."""

    def __init__(self, facts: JobState) -> None:
        self._facts = facts
        self._job = facts.job
        self._removing: set[SaveId] = set()
        self._held = False  # a load read from the store when this was asked last

    def after_loads(self) -> list[Action]:
        """Removes what had to stay for a load that has ended."""
        return self.retire() if self._held and not self._facts.restore.running else []

    def retire(self) -> list[Action]:
        """Removes what is superfluous, unless a load reads from the store just now."""
        self._held = self._facts.restore.running is not None
        if self._held:
            return []
        there, policy = set(self._facts.on_store) - self._removing, self._facts.policy
        gone = superfluous(there, keep_last=policy.keep_last, keep_every=policy.keep_every)
        self._removing |= set(gone)
        return [RemoveCheckpoint(job=self._job, save=save) for save in gone]

    def removed(self, event: ev.CheckpointRemoved) -> list[Action]:
        """A removal ended; one that failed, or found a pin, is tried again with the next commit."""
        self._removing.discard(event.save)
        return [Note(job=self._job, text=f"could not remove {event.save}: {event.problem}")] if event.problem else []
