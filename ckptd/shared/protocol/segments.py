"""What a rank wants of segments in the memory of nodes, and what its daemon has of them here."""

from typing import Annotated

import msgspec

from ckptd.shared.base.ids import Rank
from ckptd.shared.format.byte_ranges import RANGE_NBYTES

FileName = Annotated[str, msgspec.Meta(pattern=r"^r[0-9]{5,7}-[0-9]{6,12}\.(slot|part)\Z")]


class Wanted(msgspec.Struct, frozen=True, array_like=True):
    """Of the segment of this rank. ``ranges``: of its image, as byte_ranges packs them."""

    rank: Rank
    ranges: bytes = b""

    def __post_init__(self) -> None:
        """Raises ValueError for bytes that are no pairs."""
        if len(self.ranges) % RANGE_NBYTES:
            raise ValueError(f"{len(self.ranges)} bytes are no ranges")


class SegmentHere(msgspec.Struct, frozen=True, array_like=True):
    """A file in the job's directory of the arena: a slot, or a partial segment, which has what was asked for."""

    rank: Rank
    name: FileName


class SegmentLacks(msgspec.Struct, frozen=True, array_like=True):
    """Why nothing, or not all, of a rank's segment came."""

    rank: Rank
    problem: Annotated[str, msgspec.Meta(max_length=4096)]
