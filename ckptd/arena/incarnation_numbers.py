"""Incarnation numbers that the clock has not passed yet, kept in one file of the arena: no run of a job has one twice.

A store counts its own numbers. One of the clock, or above it, may be given while the store is silent; the next run
of the job, of which nothing else may be left here, must have a larger one. Once the clock shows more, it needs no word.
"""

import os
import time
from collections.abc import Callable

import msgspec

from ckptd.shared.base.ids import Incarnation, JobKey, clocked_from, incarnation_at
from ckptd.shared.files.records import put_record, record_at
from ckptd.shared.format import arena_paths

_MAX_NBYTES = 1 << 20
_MAX_WAIT_S = 60.0


class Kept(msgspec.Struct, frozen=True, array_like=True):
    """The largest number that a job has had here."""

    job: JobKey
    number: Incarnation


class Numbers:
    """Reads the file at once. ``keep`` writes it, in one piece."""

    def __init__(self, arena: str, now: Callable[[], float] = time.time) -> None:
        self._arena = arena
        self._path = os.path.join(arena, arena_paths.NUMBERS)
        self._now = now
        kept = record_at(self._path, list[Kept], _MAX_NBYTES, "numbers cannot be read")
        self._numbers = {one.job: one.number for one in kept or ()}

    def ahead(self) -> list[Kept]:
        """Those that the clock has not passed."""
        shown = incarnation_at(self._now())
        self._numbers = {job: number for job, number in self._numbers.items() if number >= shown}
        return [Kept(job, number) for job, number in sorted(self._numbers.items())]

    def needed_beyond_s(self, seconds: float) -> float:
        """How much longer than that the clock takes to pass them all. At most a minute: it may have been set back."""
        newest = max((kept.number for kept in self.ahead()), default=0)
        return min(_MAX_WAIT_S, max(0.0, clocked_from(newest + 1) - self._now() - seconds))

    def keep(self, job: JobKey, number: int) -> None:
        """A life of the job has the number. Raises OSError."""
        if number < incarnation_at(self._now()):
            return
        self._numbers[job] = number
        put_record(self._arena, self._path, self.ahead())
