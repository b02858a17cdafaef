"""Incarnation numbers that the clock has not passed yet, kept in one file of the arena: no run of a job has one twice.

A store counts its own numbers. One of the clock, or above it, may be given while the store is silent; the next run
of the job, of which nothing else may be left here, must have a larger one. Once the clock shows more, it needs no word.
"""

import logging
import os
import time
from collections.abc import Callable

import msgspec

from ckptd.shared.base.decoding import MALFORMED
from ckptd.shared.base.ids import Incarnation, JobKey, clocked_from, incarnation_at
from ckptd.shared.base.log_line import line
from ckptd.shared.files import spare_pages
from ckptd.shared.files.regular import contents
from ckptd.shared.format import arena_paths

log = logging.getLogger("ckptd")
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
        self._numbers = {kept.job: kept.number for kept in _read(self._path)}

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
        raw = msgspec.msgpack.encode(self.ahead())
        spare_pages.write(self._arena, lambda: self._put(raw))

    def _put(self, raw: bytes) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        with os.fdopen(os.open(f"{self._path}.new", flags, 0o600), "wb") as file:
            file.write(raw)
        os.replace(f"{self._path}.new", self._path)


def _read(path: str) -> list[Kept]:
    try:
        return msgspec.msgpack.decode(contents(path, _MAX_NBYTES), type=list[Kept])
    except FileNotFoundError:
        return []
    except (OSError, *MALFORMED) as error:
        log.warning(line("numbers cannot be read", path=path, error=error))
        return []
