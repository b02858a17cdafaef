"""Numbers and texts as a terminal shows them to people. Writes what ckptd.system.units reads."""

from ckptd.shared.base.wording import ranges
from ckptd.system.units import format_size as size
from ckptd.system.units import size_unit

__all__ = ["counted", "duration", "percent", "printable", "ranges", "rate", "size", "size_unit"]


def duration(seconds: float) -> str:
    """Duration in at most two units: "0.4s", "12s", "3m20s", "3h12m", "2d4h"."""
    if seconds < 10 and round(seconds, 1) % 1:  # noqa: PLR2004
        return f"{seconds:.1f}s"
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    parts = [(days, "d"), (h, "h"), (m, "m"), (s, "s")]
    first = next((i for i, (number, _) in enumerate(parts) if number), len(parts) - 1)
    return "".join(f"{number}{unit}" for i, (number, unit) in enumerate(parts[first : first + 2]) if number or not i)


def rate(bytes_per_s: float) -> str:
    """Bytes per second: "1.2 GiB/s"."""
    return f"{size(int(bytes_per_s))}/s"


def percent(part: float, whole: float) -> str:
    """Share of whole: "39 %"; an empty whole is all there."""
    return f"{100 * part / whole if whole else 100:.0f} %"


def counted(number: int, noun: str) -> str:
    """A number and its noun: "1 rank", "16 ranks", "1,000 nodes"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def printable(text: str) -> str:
    """The text without what would steer the terminal: file names on a shared store are anybody's. Line breaks stay."""
    return "".join(char if char.isprintable() or char == "\n" else "\N{REPLACEMENT CHARACTER}" for char in text)
