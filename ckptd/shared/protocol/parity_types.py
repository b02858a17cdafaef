"""Parity of one save: what each member of a redundancy set contributes, and what one of them keeps."""

from typing import Annotated

import msgspec

from ckptd.shared.base.ids import MAX_RANKS, Incarnation, NodeName, SaveId
from ckptd.shared.format.schemes import Scheme
from ckptd.shared.format.schemes.layout import MAX_SET_SIZE
from ckptd.shared.format.slot import Seal

Member = Annotated[int, msgspec.Meta(ge=0, lt=MAX_SET_SIZE)]  # of a redundancy set, by its place in it


class DataColumn(msgspec.Struct, frozen=True):
    """What one member of a redundancy set contributes: its segments of a save end to end, in the order of ranks.

    Each seal is the digested one of its slot: with it and the bytes before it the slot can be made again elsewhere.
    """

    node: NodeName
    seals: Annotated[tuple[Seal, ...], msgspec.Meta(max_length=MAX_RANKS)] = ()


class ParityChunk(msgspec.Struct, frozen=True):
    """One member's parity of one save: what lies in its arena beside its slots, and whom it protects.

    epoch: the incarnation of the session whose topology made the set; a save is encoded again for each new one.
    """

    save: SaveId
    epoch: Incarnation
    scheme: Scheme
    index: Member  # that holds this chunk
    columns: Annotated[tuple[DataColumn, ...], msgspec.Meta(max_length=MAX_SET_SIZE)]
