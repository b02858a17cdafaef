"""Blocking work in rounds: what everybody needs first is done for everybody before what nobody waits for yet.

The first slot of a rank is what its first save waits for. Made beside its second one, on the same cores and of memory
that the machine has to find, it takes twice as long; behind all slots of the ranks before it, even longer.
"""

import heapq
import itertools
from collections.abc import Callable
from typing import TypeVar

from ckptd.daemon.background import Background

T = TypeVar("T")


class Rounds:
    """Background work, of which the earlier rounds go first. For the main loop's thread alone."""

    def __init__(self, background: Background) -> None:
        self._background = background
        self._waiting: list[tuple[int, int, Callable[[], None]]] = []
        self._order = itertools.count()  # of equal rounds what came first
        self._running: list[int] = []  # rounds

    def run(self, number: int, work: Callable[[], T], done: Callable[[T | Exception], None]) -> None:
        """As Background.run, once nothing of an earlier round is left. number: of the round, the lowest is first."""

        def ended(outcome: T | Exception) -> None:
            self._running.remove(number)
            try:
                done(outcome)
            finally:
                self._begin()

        start = lambda: self._background.run(work, ended)  # noqa: E731 - typed by what is around it
        heapq.heappush(self._waiting, (number, next(self._order), start))
        self._begin()

    @property
    def busy(self) -> bool:
        """Whether some work is not delivered yet."""
        return bool(self._running or self._waiting)

    def _begin(self) -> None:
        while self._waiting and len(self._running) < self._background.threads:
            number, _, start = self._waiting[0]
            if self._running and number > min(self._running):
                return
            heapq.heappop(self._waiting)
            self._running.append(number)
            start()
