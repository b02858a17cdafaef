"""How long the loop's turns take: ranks and other nodes wait for each, so none may be long. Counted and logged."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from ckptd.shared.base.log_line import line

log = logging.getLogger("ckptd")
LONG_S = 0.05
_SAY_AGAIN_S = 10.0


class TurnWatch(Protocol):
    """Who must know when the loop is at work."""

    def turn_begins(self) -> None:
        """It is from now on."""

    def turn_ends(self) -> None:
        """It waits again."""


class Pace:
    """``long`` counts turns above LONG_S since the start; ``longest_s`` is the longest of all."""

    def __init__(self, plane: TurnWatch, clock: Callable[[], float] = time.monotonic) -> None:
        self._plane = plane
        self._clock = clock
        self.long = 0
        self.longest_s = 0.0
        self._part, self._part_began = "", 0.0
        self._slowest: tuple[float, str] = (0.0, "")
        self._said_at = float("-inf")

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Around everything between two waits of the loop."""
        began = self._part_began = self._clock()
        self._part, self._slowest = "", (0.0, "")
        self._plane.turn_begins()
        try:
            yield
        finally:
            self._plane.turn_ends()
            self._next_part("")
            self._ended(self._part_began - began)

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Around a part of a turn, for the log. Parts do not contain each other."""
        self._next_part(name)
        try:
            yield
        finally:
            self._next_part("")

    def _next_part(self, name: str) -> None:
        now = self._clock()
        if now - self._part_began > self._slowest[0]:
            self._slowest = now - self._part_began, self._part
        self._part, self._part_began = name, now

    def _ended(self, seconds: float) -> None:
        longest, self.longest_s = self.longest_s, max(self.longest_s, seconds)
        if seconds <= LONG_S:
            return
        self.long += 1
        if seconds > 2 * longest or self._part_began >= self._said_at + _SAY_AGAIN_S:
            self._said_at = self._part_began
            part_s, part = self._slowest
            log.info(
                line("long turn", seconds=round(seconds, 3), mostly=part or "the rest", part_s=round(part_s, 3),
                     long_turns=self.long)
            )  # fmt: skip
