"""What is read again next, and when: the order of a scrub, and its rate. Pure."""

from collections.abc import Mapping
from typing import NamedTuple, TypeVar

from ckptd.shared.protocol.scrubbing import Place

T = TypeVar("T")


class Read(NamedTuple):
    """How far it was read. at: when to its end, last; None: never. place: where that continues; None: not begun."""

    at: float | None = None
    place: Place | None = None


def due_at(read: Read, every_s: float) -> float:
    """When it is to be read (further); in the past: at once."""
    return float("-inf") if read.place is not None or read.at is None else read.at + every_s


def next_of(found: Mapping[T, Read], now: float, every_s: float) -> T | None:
    """What has been begun; else what was never read, in the order given; else what was read the longest ago.

    None: all of it was read within every_s.
    """
    begun = next((one for one, read in found.items() if read.place is not None), None)
    if begun is not None:
        return begun
    oldest = min(found, key=lambda one: due_at(found[one], every_s), default=None)
    return oldest if oldest is not None and due_at(found[oldest], every_s) <= now else None


class Pace:
    """At most bytes_per_s over time: each read waits until what was read before has had its time. 0: nothing is read.

    Shared by all that read at one rate.
    """

    def __init__(self, bytes_per_s: int) -> None:
        self.bytes_per_s = bytes_per_s
        self.free_at = float("-inf")

    def took(self, nbytes: int, now: float) -> None:
        """So many bytes were read by now."""
        self.free_at = max(self.free_at, now) + nbytes / max(1, self.bytes_per_s)
