"""A module for each trainer that bench.frameworks measures: what it saves by itself, and what it saves through ckptd.

Each has NEEDS, what pip calls its framework ("" for torch alone), and pairs(nbytes, folder), a context manager that
gives pairs of ways to save the same state; it runs on every rank, beside a daemon.
"""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Way:
    """One way to save. save: (step) -> seconds that training stood still. settle: until it is on the disk, uncounted.

    settle may stall training too, as what ends an asynchronous save does: it returns those seconds.
    """

    name: str
    save: Callable[[int], float]
    settle: Callable[[], float]


@dataclass(frozen=True, slots=True)
class Pair:
    """A row: the framework's own way beside ours."""

    framework: str
    own: Way
    ours: Way
