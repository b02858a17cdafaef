"""How often a value was how large: counts by fixed bounds, so that its size never grows. Pure."""

from bisect import bisect_left
from collections.abc import Sequence

from ckptd.shared.protocol.status import Histogram


def _steps(first: int, last: int) -> tuple[float, ...]:
    """1, 2 and 5 times each power of ten."""
    return tuple(float(f"{digit}e{power}") for power in range(first, last) for digit in (1, 2, 5))


SECONDS = _steps(-2, 4)  # 10 ms to 5,000 s
STALLS = _steps(-4, 2)  # 0.1 ms to 50 s
BYTES_PER_S = _steps(6, 12)  # 1 MB/s to 500 GB/s


class Distribution:
    """``counts`` has one number for each bound, of values up to it and above the one before, and one for the rest."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._total = 0.0

    def add(self, value: float) -> None:
        """One more value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def resume(self, kept: Histogram) -> None:
        """Adds what an earlier daemon had counted. With other bounds than these it is left out: nothing is guessed."""
        if tuple(kept.bounds) == self._bounds and len(kept.counts) == len(self._counts):
            self._counts = [ours + theirs for ours, theirs in zip(self._counts, kept.counts, strict=True)]
            self._total += kept.total

    def shown(self, what: str, tier: str = "") -> Histogram:
        """Its value now."""
        return Histogram(
            what=what, tier=tier, bounds=list(self._bounds), counts=list(self._counts), total=round(self._total, 6)
        )
