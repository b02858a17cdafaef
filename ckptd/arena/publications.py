"""What ranks of this node want published, kept in the job's directory of the arena: one small file for each save.

The arena is this user's alone (0700), and only a rank's own HandOver gets something in: this is the one place that a
daemon knows a directory from. What the arena loses is not published by anybody; the store says `UNPUBLISHED` then.
"""

import contextlib
import logging
import os
import threading

from ckptd.shared.base.ids import JobKey, SaveId, parse_save
from ckptd.shared.base.log_line import line
from ckptd.shared.files.records import put_record, record_at
from ckptd.shared.format import arena_paths
from ckptd.shared.protocol.publication import MAX_INTENTS, Intent, Publication, joined

log = logging.getLogger("ckptd")
_MAX_NBYTES = 16 << 20
_SUFFIXES = (arena_paths.DUE_SUFFIX, arena_paths.PUBLISHED_SUFFIX)


class Publications:
    """Of all jobs of an arena. Every method reads the files again: they are few, and in memory."""

    def __init__(self, arena: str) -> None:
        self._arena = arena
        self._lock = threading.Lock()

    def keep(self, job: JobKey, save: SaveId, to: Publication) -> None:
        """On record when it returns, with the files of other ranks of the node. Raises OSError."""
        with self._lock:
            directory = self._directory(job)
            published = os.path.join(directory, save.text + arena_paths.PUBLISHED_SUFFIX)
            if os.path.lexists(published) and not to.drafts:  # a state may be wanted at one more place
                return  # a rank says it again, to a daemon that has restarted
            path = os.path.join(directory, save.text + arena_paths.DUE_SUFFIX)
            before = _read(path) or _read(published)
            put_record(self._arena, path, Intent(save, to if before is None else joined(before.to, to)))
            with contextlib.suppress(FileNotFoundError):
                os.unlink(published)
            self._forget_oldest(directory, save)

    def from_on(self, job: JobKey, save: SaveId) -> list[Intent]:
        """Of this save and of newer ones, done or not."""
        return [intent for intent in self._all(job, _SUFFIXES) if intent.save >= save]

    def due(self, job: JobKey) -> list[Intent]:
        """All that is not done; what is newer than one of these and done is there to be put back if need be."""
        due = [intent.save for intent in self._all(job, (arena_paths.DUE_SUFFIX,))]
        # From each on: there is no oldest one where two runs had one number.
        return [intent for intent in self._all(job, _SUFFIXES) if any(intent.save >= save for save in due)]

    def is_due(self, job: JobKey, save: SaveId) -> bool:
        """Whether it was asked for, and not done."""
        return os.path.lexists(os.path.join(self._directory(job), save.text + arena_paths.DUE_SUFFIX))

    def done(self, job: JobKey, intent: Intent) -> None:
        """It is where it belongs. What was asked for meanwhile stays due."""
        path = os.path.join(self._directory(job), intent.save.text)
        with self._lock:
            if _read(path + arena_paths.DUE_SUFFIX) == intent:
                os.replace(path + arena_paths.DUE_SUFFIX, path + arena_paths.PUBLISHED_SUFFIX)

    def _directory(self, job: JobKey) -> str:
        return os.path.join(self._arena, arena_paths.job_dir(job))

    def _all(self, job: JobKey, suffixes: tuple[str, ...]) -> list[Intent]:
        directory = self._directory(job)
        found = (_read(os.path.join(directory, name)) for name in _names(directory) if name.endswith(suffixes))
        return sorted((intent for intent in found if intent is not None), key=lambda intent: intent.save.listed)

    @staticmethod
    def _forget_oldest(directory: str, newest: SaveId) -> None:
        """newest: of the run that saves now. What another run of its number left is older, whatever its counters."""

        def age(name: str) -> tuple[bool, tuple[int, ...]]:
            save = parse_save(name.partition(".")[0])
            if save is None:
                return False, ()
            return True, (save.incarnation, save.run == newest.run, save.counter, save.step)

        names = sorted((name for name in _names(directory) if name.endswith(_SUFFIXES)), key=age)
        for name in names[:-MAX_INTENTS]:
            if name.endswith(arena_paths.DUE_SUFFIX):
                log.info(line("publication given up", save=name, reason="many newer ones"))
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(directory, name))


def _names(directory: str) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except FileNotFoundError:
        return []


def _read(path: str) -> Intent | None:
    return record_at(path, Intent, _MAX_NBYTES, "publication cannot be read")
