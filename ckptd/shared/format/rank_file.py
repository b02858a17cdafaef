"""Content of the file that a rank keeps locked while its process lives."""

from typing import Annotated

import msgspec

from ckptd.shared.base.decoding import decoded
from ckptd.shared.base.ids import JobKey, Rank, Session

MAX_NBYTES = 8192


class RankRecord(msgspec.Struct, frozen=True):
    """Who the process is; its pid is the lock's. A new daemon learns from it which job a directory belongs to."""

    job: JobKey
    rank: Rank
    session: Session
    host: Annotated[str, msgspec.Meta(max_length=255)]


_decoder = msgspec.json.Decoder(RankRecord)


def encode(record: RankRecord) -> bytes:
    """Content of the file."""
    return msgspec.json.encode(record)


def decode(data: bytes, *, where: str) -> RankRecord:
    """The record in a file. Raises DamagedError, also for a file that is just being written."""
    return decoded(_decoder.decode, data, where)
