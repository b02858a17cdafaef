"""A few figures of many values. Pure."""

import math
from collections.abc import Iterable, Sequence

import msgspec


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Of durations in seconds. count: of how many."""

    count: int
    median: float
    p99: float
    total: float


def percentile(values: Sequence[float], share: float) -> float:
    """The least of the values that so large a share is not above. Of one value or more."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def spread(values: Iterable[float | None]) -> Spread | None:
    """Of those that are known; None if none is."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return Spread(count=len(known), median=percentile(known, 0.5), p99=percentile(known, 0.99), total=sum(known))
