"""Where the time of a job went, in words."""

from ckptd.shared.protocol.status import Goodput
from ckptd.system import human


def time_lost(found: Goodput) -> list[tuple[str, float]]:
    """What the time was lost to, with the seconds."""
    return [
        ("stalls", found.stall_s),
        ("restores", found.restore_s),
        ("repeated steps", found.repeated_s),
        ("starts", found.start_s),
        ("unexplained", found.unexplained_s),
    ]


def share(part: float, whole: float) -> str:
    """Such as "0.42 %"."""
    return f"{100 * part / whole:.3g} %" if whole > 0 else "-"


def overall(found: Goodput, most: int | None = None) -> str:
    """Such as "ETTR 94.6 % of 3h 12m: starts 3.1 %, stalls 0.4 %". most: only so many losses, the largest first."""
    if found.ettr is None:
        return "no time has passed"
    lost = time_lost(found)
    if most is not None:
        lost = sorted(((what, seconds) for what, seconds in lost if seconds > 0), key=lambda one: -one[1])[:most]
    parts = ", ".join(f"{what} {share(seconds, found.total_s)}" for what, seconds in lost)
    idle = f" ({human.duration(found.idle_s)} idle beside it)" if found.idle_s >= 1 else ""
    whole = f"ETTR {share(found.training_s, found.total_s)} of {human.duration(found.total_s)}{idle}"
    return f"{whole}: {parts}" if parts else whole
