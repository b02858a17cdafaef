"""Which peer is to be looked at when: a heap, so that a thousand peers cost what those cost that are due."""

import heapq
import itertools
import math

from ckptd.peers.remote import Remote


class Turns:
    """At most one turn of each peer counts: the earliest that was asked for since it was taken."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Remote]] = []
        self._count = itertools.count()

    def see_to(self, remote: Remote, by: float) -> None:
        """It is to be looked at then, at the latest."""
        if by < remote.due:
            remote.due = by
            heapq.heappush(self._heap, (by, next(self._count), remote))

    def take(self, now: float) -> list[Remote]:
        """Those whose turn has come."""
        due = []
        while self._heap and self._heap[0][0] <= now:
            by, _, remote = heapq.heappop(self._heap)
            if by == remote.due:  # else an earlier turn was taken meanwhile
                due.append(remote)
                remote.due = math.inf
        return due

    @property
    def next(self) -> float | None:
        """When ``take`` has something, at the earliest."""
        return self._heap[0][0] if self._heap else None
