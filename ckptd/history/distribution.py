"""How often a value was how large: counts by fixed bounds, so that its size never grows. Pure."""

from bisect import bisect_left
from typing import Final

import msgspec

from ckptd.shared.protocol.messages import Milestone, Tier
from ckptd.shared.protocol.status import Histogram

DRAIN_RATE: Final = "drain_bytes_per_s"
RESTORE: Final = "restore"
STALL: Final = "stall"


def _steps(first: int, last: int) -> tuple[float, ...]:
    """1, 2 and 5 times each power of ten."""
    return tuple(float(f"{digit}e{power}") for power in range(first, last) for digit in (1, 2, 5))


SECONDS: Final = _steps(-2, 4)  # 10 ms to 5,000 s
STALLS: Final = _steps(-4, 2)  # 0.1 ms to 50 s
BYTES_PER_S: Final = _steps(6, 12)  # 1 MB/s to 500 GB/s
_BOUNDS: Final = {STALL: STALLS, DRAIN_RATE: BYTES_PER_S}


class Distribution(msgspec.Struct):
    """``counts`` has one number for each bound, of values up to it and above the one before, and one for the rest."""

    bounds: tuple[float, ...]
    counts: list[int]
    total: float = 0.0

    def add(self, value: float) -> None:
        """One more value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


def distribution(bounds: tuple[float, ...]) -> Distribution:
    """Without a value."""
    return Distribution(bounds, [0] * (len(bounds) + 1))


class Distributions(msgspec.Struct):
    """Of the saves, drains and loads of a job: all of them, also those without a value yet.

    A counter that begins above 0 looks like no increase.
    """

    saves: dict[str, Distribution] = msgspec.field(
        default_factory=lambda: {
            what: distribution(_BOUNDS.get(what, SECONDS)) for what in (*map(str, Milestone), STALL, DRAIN_RATE)
        }
    )
    loads: dict[str, Distribution] = msgspec.field(
        default_factory=lambda: {str(tier): distribution(SECONDS) for tier in Tier}
    )

    def shown(self) -> list[Histogram]:
        """Their values now."""
        saves = [(what, "", one) for what, one in self.saves.items()]
        loads = [(RESTORE, tier, one) for tier, one in self.loads.items()]
        return [
            Histogram(what=what, tier=tier, bounds=list(one.bounds), counts=list(one.counts), total=round(one.total, 6))
            for what, tier, one in (*saves, *loads)
        ]
