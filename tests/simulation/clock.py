"""Virtual time: what is due next happens next, and one seeded source of chance decides everything that could differ."""

import heapq
from collections.abc import Callable
from random import Random
from typing import Any


class Clock:
    """A heap of calls. Two of the same time come in the order in which they were asked for."""

    def __init__(self, seed: int) -> None:
        self.now = 0.0
        self.random = Random(seed)
        self.steps = 0
        self.steady = False  # True: nothing takes as long as it rarely does
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._serial = 0

    def after(self, seconds: float, call: Callable[..., None], *args: Any) -> None:
        """Calls in so many virtual seconds. There is no way to cancel: what is late must notice that it is."""
        self.at(self.now + seconds, call, *args)

    def at(self, when: float, call: Callable[..., None], *args: Any) -> None:
        """Calls at that time, or now if it is over."""
        self._serial += 1
        heapq.heappush(self._heap, (max(when, self.now), self._serial, call, args))

    def step(self, until: float) -> bool:
        """Makes the next call that is due by then; False when there is none, and the time is ``until``."""
        if not self._heap or self._heap[0][0] > until:
            self.now = max(self.now, until)
            return False
        self.now, _, call, args = heapq.heappop(self._heap)
        self.steps += 1
        call(*args)
        return True

    def chance(self, probability: float) -> bool:
        """Whether something of this probability happens."""
        return probability > 0 and self.random.random() < probability

    def between(self, low: float, high: float) -> float:
        """A duration in seconds, even over the range."""
        return low + (high - low) * self.random.random()

    def mostly(self, usual: float, rarely: float, probability: float = 0.02) -> float:
        """A duration about as usual, and now and then up to the rare one."""
        if self.random.random() < probability and not self.steady:
            return usual + (rarely - usual) * self.random.random()
        return usual * (0.5 + self.random.random())
