"""How long the loop's turns take: ranks and other nodes wait for each, so none may be long. Counted and logged."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from ckptd.shared.base.log_line import line

log = logging.getLogger("ckptd")
LONG_S = 0.05
_SAY_AGAIN_S = 10.0
_COLLECTING = "garbage collection"


class TurnWatch(Protocol):
    """Who must know when the loop is at work."""

    def turn_begins(self) -> None:
        """It is from now on."""

    def turn_ends(self) -> None:
        """It waits again."""


class Pace:
    """``long`` counts turns above LONG_S since the start; ``longest_s`` is the longest of all.

    A turn that is long, and took little of a processor, waited for one: the log has both.
    """

    def __init__(
        self,
        plane: TurnWatch,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._plane = plane
        self._clock, self._cpu_clock = clock, cpu_clock
        self._thread = threading.get_ident()
        self._section = self._interrupted = ""
        self.long = 0
        self.longest_s = 0.0
        self._part, self._part_began = "", 0.0
        self._slowest: tuple[float, str] = (0.0, "")
        self._said_at = float("-inf")

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Around everything between two waits of the loop."""
        began, cpu_began = self._clock(), self._cpu_clock()
        self._part_began = began
        self._part, self._section, self._slowest = "", "", (0.0, "")
        self._plane.turn_begins()
        try:
            yield
        finally:
            self._plane.turn_ends()
            self._next_part("")
            self._ended(self._part_began - began, self._cpu_clock() - cpu_began)

    def section(self, name: str) -> None:
        """What the loop does from here on, but for parts."""
        self._section = name
        self._next_part(name)

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Around a part of a turn, for the log. Parts do not contain each other."""
        self._next_part(name)
        try:
            yield
        finally:
            self._next_part(self._section)

    def collecting(self, phase: str, _info: object) -> None:
        """For ``gc.callbacks``: a collection in the loop's thread is a part that interrupts another."""
        if threading.get_ident() != self._thread:
            return
        if phase == "start":
            self._interrupted = self._part
        self._next_part(_COLLECTING if phase == "start" else self._interrupted)

    def _next_part(self, name: str) -> None:
        now = self._clock()
        if now - self._part_began > self._slowest[0]:
            self._slowest = now - self._part_began, self._part
        self._part, self._part_began = name, now

    def _ended(self, seconds: float, cpu_s: float) -> None:
        longest, self.longest_s = self.longest_s, max(self.longest_s, seconds)
        if seconds <= LONG_S:
            return
        self.long += 1
        if seconds > 2 * longest or self._part_began >= self._said_at + _SAY_AGAIN_S:
            self._said_at = self._part_began
            part_s, part = self._slowest
            log.info(
                line("long turn", seconds=round(seconds, 3), cpu_s=round(cpu_s, 3), mostly=part or "the rest",
                     part_s=round(part_s, 3), long_turns=self.long)
            )  # fmt: skip
