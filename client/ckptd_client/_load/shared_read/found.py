"""Which checkpoint each rank of a read found. Ranks that found different ones share nothing. Pure."""

import logging
from collections.abc import Iterable, Sequence
from typing import Annotated, Final, Self

import msgspec

from ckptd.shared.base.errors import RestoreError
from ckptd.shared.base.ids import MAX_RANKS, SaveId
from ckptd.shared.format.digest import digest

log = logging.getLogger("ckptd_client")
MARK_NBYTES: Final = 8
_Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class Found(msgspec.Struct, frozen=True, array_like=True):
    """What a rank found. mark: of the checkpoint and its bytes, not 0. read: the number of the read, as it counts."""

    rank: Annotated[int, msgspec.Meta(ge=0, lt=MAX_RANKS)]
    step: _Number
    mark: _Number
    read: _Number = 0

    @classmethod
    def of(cls, rank: int, save: SaveId, content: bytes, read: int) -> Self:
        """content: differs where bytes of the checkpoint do."""
        said = digest(f"{save.text} {content.hex()}".encode())
        return cls(rank, save.step, int.from_bytes(said[:7], "little") + 1, read)

    @property
    def proof(self) -> bytes:
        """The mark, for an ask."""
        return self.mark.to_bytes(MARK_NBYTES, "little")


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[list[Found]] = msgspec.msgpack.Decoder(
    Annotated[list[Found], msgspec.Meta(min_length=1, max_length=2)]
)


def pack(found: Sequence[Found]) -> bytes:
    """The bytes of what merged gives."""
    return _encoder.encode(found)


def unpack(raw: bytes) -> list[Found]:
    """Raises msgspec.DecodeError."""
    return _decoder.decode(raw)


def merged(found: Sequence[Found]) -> list[Found]:
    """The first, with the highest number of those that found the same; then the first that found another checkpoint."""
    read = max(one.read for one in found if one.mark == found[0].mark)
    others = [one for one in found if one.mark != found[0].mark]
    return [msgspec.structs.replace(found[0], read=read), *others[:1]]


class DifferentError(RestoreError):
    """Ranks that call load_from(together=True) once found different checkpoints. other: that of another rank."""

    def __init__(self, mine: Found, other: Found) -> None:
        self.other = other
        one, two = sorted((mine, other), key=lambda found: found.rank)
        text = (
            f"the ranks are to read one checkpoint together: rank {one.rank} found step {one.step},"
            f" rank {two.rank} {'another checkpoint of that step' if one.step == two.step else f'step {two.step}'}"
        )
        super().__init__(text, hint="give all ranks the path of one step: latest may move on while they open it")


def refuse_others(mine: Found, found: Iterable[Found]) -> None:
    """Logs which rank found another checkpoint. Raises DifferentError if it did so in this very read of all ranks."""
    for one in found:
        if one.mark != mine.mark:
            if mine.read and one.read == mine.read:
                raise DifferentError(mine, one)
            log.warning(
                "ckptd: rank %d reads step %d without rank %d, which is at another read, of step %d",
                mine.rank, mine.step, one.rank, one.step,
            )  # fmt: skip
