"""Where a scrub of a committed checkpoint continues, and what it finds. Pure."""

from typing import Annotated, NamedTuple

import msgspec

from ckptd.shared.base.ids import MAX_RANKS

Part = Annotated[int, msgspec.Meta(ge=0, le=2 * MAX_RANKS + 1)]
Block = Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)]


class Place(NamedTuple):
    """part 0: all records; then the image of each rank, then the parity of each vote. block: of it, of 16 MiB."""

    part: Part
    block: Block


BEGIN = Place(0, 0)


class Harm(NamedTuple):
    """What is wrong with a file of a checkpoint on the store. ``rank`` None: it is no image."""

    path: str
    what: str
    rank: int | None = None
