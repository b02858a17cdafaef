"""Parity of one save: what each member of a redundancy set contributes, and what one of them keeps.

Apart from the events that name them: who reads or writes parity alone needs nothing of the daemon.
"""

from dataclasses import dataclass

from ckptd.protocol.ids import SaveId
from ckptd.protocol.slot import Seal
from ckptd.protocol.topology import Scheme


@dataclass(frozen=True, slots=True)
class Column:
    """What one member of a redundancy set contributes: its segments of a save end to end, in the order of ranks.

    Each seal is the digested one of its slot: with it and the bytes before it the slot can be made again elsewhere.
    """

    node: str
    seals: tuple[Seal, ...] = ()


@dataclass(frozen=True, slots=True)
class Piece:
    """One member's parity of one save: what lies in its arena beside its slots, and whom it protects.

    epoch: the incarnation of the session whose topology made the set; a save is encoded again for each new one.
    """

    save: SaveId
    epoch: int
    scheme: Scheme
    index: int  # of the member that holds this piece
    columns: tuple[Column, ...]
