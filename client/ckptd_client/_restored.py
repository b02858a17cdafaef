"""What load tells of what it brought back."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Restored:
    """What load brought back. ``notes`` says what was damaged or missing on the way, empty when nothing was.

    ``tier``: where this rank's bytes came from, which may differ from rank to rank: "arena" (they were in this node's
    memory), "peer" (copied from another node's), "rebuilt" (from parity in other nodes' memory), "pfs".
    """

    step: int
    tier: str
    seconds: float
    nbytes: int
    notes: list[str] = field(default_factory=list)
