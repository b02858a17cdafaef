"""What a client counts."""

from dataclasses import dataclass


@dataclass(slots=True)
class Stats:
    """Figures of one client's life. Seconds are of the caller's time."""

    saves: int = 0
    nbytes: int = 0
    plans: int = 0
    stall_s: float = 0.0
    last_stall_s: float = 0.0
    failed: int = 0
    late: str = ""  # what verifies copies that run while training goes on: proof, samples, off; empty: no attach
    last_late_nbytes: int = 0  # of the last save that had some
