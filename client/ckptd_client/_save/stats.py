"""The counters of a client."""

from dataclasses import dataclass


@dataclass(slots=True)
class Stats:
    """Counts and times of one client since `connect`.

    Attributes:
        saves: Saves that this rank has staged.
        nbytes: Bytes of them.
        plans: How often the state's structure was planned.
        stall_s: Seconds that `save` held up the caller, in all.
        last_stall_s: The same for the last save.
        failed: Saves that failed on this rank.
        late: How copies that run while training goes on are verified: "proof", "samples" or "off"; empty without
            `attach`.
        last_late_nbytes: Bytes that were copied so, of the last save that had some.
    """

    saves: int = 0
    nbytes: int = 0
    plans: int = 0
    stall_s: float = 0.0
    last_stall_s: float = 0.0
    failed: int = 0
    late: str = ""  # what verifies copies that run while training goes on: proof, samples, off; empty: no attach
    last_late_nbytes: int = 0  # of the last save that had some
