"""What a daemon asks its store worker to read again, to copy and to mend; part of ``messages``."""

from typing import Annotated

import msgspec

from ckptd.shared.base.ids import MAX_PARTS, MAX_RANKS, JobName, Nbytes, Rank, SaveId, StoreId
from ckptd.shared.protocol.scrubbing import Block, Place

MAX_HARMS = 256  # of a piece; of what is more damaged the rest is left out


class ScrubCheckpoint(msgspec.Struct, frozen=True, kw_only=True, tag="scrub-checkpoint"):
    """Read about nbytes of a committed checkpoint and check them, from a place on. Answered by PieceRead."""

    id: int
    store_id: StoreId
    job: JobName
    save: SaveId
    place: Place
    nbytes: Nbytes


class ReadBlock(msgspec.Struct, frozen=True, kw_only=True, tag="read-block"):
    """A block of a rank's image, proved. Answered by BlockRead."""

    id: int
    store_id: StoreId
    job: JobName
    save: SaveId
    rank: Rank
    block: Block


class MendCheckpoint(msgspec.Struct, frozen=True, kw_only=True, tag="mend-checkpoint"):
    """Write damaged images of these ranks again, from slots that hold the same save, else from parity on the store.

    Answered by Mended. ``slots``: rank and path of a slot; whatever lies there is proved. Can be repeated.
    """

    id: int
    store_id: StoreId
    job: JobName
    save: SaveId
    ranks: Annotated[list[Rank], msgspec.Meta(max_length=MAX_RANKS)]
    slots: Annotated[list[tuple[Rank, str]], msgspec.Meta(max_length=MAX_RANKS)] = []
    bytes_per_s: Nbytes = 0


class Harm(msgspec.Struct, frozen=True):
    """What is wrong with a file. rank None: it is no image."""

    path: str
    what: str
    rank: Rank | None = None


class PieceRead(msgspec.Struct, frozen=True, tag="piece-read"):
    """next: where to continue; None: that was the rest. gone: the checkpoint is not there any more."""

    next: Place | None
    nbytes: Nbytes
    harms: Annotated[list[Harm], msgspec.Meta(max_length=MAX_HARMS + MAX_PARTS)]
    gone: bool = False


class BlockRead(msgspec.Struct, frozen=True, tag="block-read"):
    """The bytes of the block."""

    data: bytes


class Mended(msgspec.Struct, frozen=True, tag="mended"):
    """Ranks whose files were written again, from memory or from parity; lost: those not made good, and why.

    The others' were sound when they were read again.
    """

    memory: list[Rank] = []
    parity: list[Rank] = []
    lost: list[Rank] = []
    problem: str = ""


ScrubRequest = ScrubCheckpoint | ReadBlock | MendCheckpoint
ScrubResult = PieceRead | BlockRead | Mended
