"""What a daemon asks its store worker to do with the journal of a job; part of ``messages``."""

from typing import Annotated

import msgspec

from ckptd.history.account import Account
from ckptd.shared.base.ids import JobName, Nbytes, StoreId
from ckptd.shared.protocol.journal import MAX_SEGMENTS


class PutJournal(msgspec.Struct, frozen=True, kw_only=True, tag="put-journal"):
    """A segment of the job's journal, as it lies in the arena. Answered by no result. Can be repeated.

    ``start``, ``nbytes``: of the segment in the file at path. ``first``: none of its name was put before.
    """

    id: int
    store_id: StoreId
    job: JobName
    name: Annotated[str, msgspec.Meta(max_length=64)]
    path: str
    start: Nbytes
    nbytes: Nbytes
    first: bool = False


class ArenaSegment(msgspec.Struct, frozen=True, kw_only=True):
    """A segment of a journal that lies in the arena. start, nbytes: of it in the file at path."""

    name: Annotated[str, msgspec.Meta(max_length=64)]
    path: str
    start: Nbytes
    nbytes: Nbytes


class ReadAccount(msgspec.Struct, frozen=True, kw_only=True, tag="read-account"):
    """What the job's runs have come to, by its journal. Answered by AccountRead. Can be repeated.

    ``segments``: in the arena: so many bytes of each count, also once the store has it and the arena has not.
    ``last``: of the writer who asks, later segments do not count: it knows what is in them.
    ``seen``: ``others`` of the answer that it has; None: it has none.
    """

    id: int
    store_id: StoreId
    job: JobName
    writer: Annotated[str, msgspec.Meta(max_length=8)]
    last: int
    seen: Annotated[str, msgspec.Meta(max_length=1024)] | None = None
    segments: Annotated[list[ArenaSegment], msgspec.Meta(max_length=MAX_SEGMENTS)] = []


class AccountRead(msgspec.Struct, frozen=True, tag="account-read"):
    """others: the last segments of other writers. account: None: they are those that the daemon has seen."""

    others: str
    account: Account | None
