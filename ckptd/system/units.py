"""Sizes and durations as people write them. Every size unit is a power of 1024, as in systemd, Slurm and Docker."""

import re

_SIZE_RE = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgtp]?)(?:i?b)?\s*$", re.IGNORECASE)
_DURATION_RE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(ms|s|m|h|d)")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_PREFIXES = "KMGTP"


def parse_size(text: str) -> int:
    """Bytes of "64G", "1.5 GiB", "512MB" or "4096". Raises ValueError on anything else."""
    match = _SIZE_RE.match(text)
    if match is None:
        raise ValueError(f"{text!r} is no size")
    power = _PREFIXES.index(match[2].upper()) + 1 if match[2] else 0
    return int(float(match[1]) * 1024**power) if "." in match[1] else int(match[1]) * 1024**power


def parse_duration_s(text: str) -> float:
    """Seconds of "24h", "1h30m", "500ms" or "2.5". Raises ValueError on anything else."""
    text = text.strip()
    if re.fullmatch(r"[0-9]+(\.[0-9]+)?", text):
        return float(text)
    parts = _DURATION_RE.findall(text)
    if not parts or _DURATION_RE.sub("", text).strip():
        raise ValueError(f"{text!r} is no duration")
    return sum(float(number) * _SECONDS[unit] for number, unit in parts)


def size_unit(nbytes: float) -> tuple[str, int]:
    """The unit in which people read so many bytes, and its bytes."""
    power = next((power for power in range(len(_PREFIXES)) if abs(nbytes) < 1024 ** (power + 1)), len(_PREFIXES))
    return (f"{_PREFIXES[power - 1]}iB" if power else "B"), 1024**power


def format_size(nbytes: int) -> str:
    """Text for people: "512 B", "64.0 MiB", "23.5 GiB"."""
    unit, unit_nbytes = size_unit(nbytes)
    return f"{nbytes} B" if unit == "B" else f"{nbytes / unit_nbytes:.1f} {unit}"
