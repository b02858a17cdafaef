"""What a store answers: what lies there, the takers of numbers, the result of a commit. Sent by the worker as it is."""

from typing import Annotated

import msgspec

from ckptd.shared.base.ids import Incarnation, RunId, SaveId, Session, StoreId
from ckptd.shared.format.committed_record import Committed


class IncarnationRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Content of `.incarnations/i00000003`: the session that took the number. Written once, never changed."""

    incarnation: Incarnation
    run: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")]
    session: Session
    node: Annotated[str, msgspec.Meta(max_length=255)]


class CommittedEntry(msgspec.Struct, frozen=True):
    """A committed checkpoint and the directory it lies in."""

    committed: Committed
    dirname: str


class PartialEntry(msgspec.Struct, frozen=True, kw_only=True):
    """An unfinished checkpoint: finishable when its votes, all readable, cover each rank once; missing says why not."""

    save: SaveId
    voted: list[str]  # nodes
    damaged: list[str]  # what is wrong with each vote that cannot be read
    world_size: int | None = None
    missing: str = ""

    @property
    def finishable(self) -> bool:
        """Whether commit can be tried from the votes alone. It still checks that the files are there."""
        return not self.missing


class Scan(msgspec.Struct, frozen=True, tag="scan"):
    """All of one job on one store."""

    committed: list[CommittedEntry]  # newest first
    partials: list[PartialEntry]  # newest first
    problems: list[str]  # of entries that are neither: what is wrong and, on a line of its own, a hint
    records: list[IncarnationRecord] = []  # lowest number first
    strange: list[str] = []  # names with numbers that no run of the job can have had: nothing is made of them


class OpenedStore(msgspec.Struct, frozen=True):
    """A store that may be used: its id (empty: there is none yet), and what its user should know."""

    store_id: Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{32})?\Z")]
    warnings: list[str] = []


class Taker(msgspec.Struct, frozen=True):
    """Who takes a number: its new run id, its session, and the node of the daemon that asks."""

    run: RunId
    session: Session
    node: Annotated[str, msgspec.Meta(max_length=255)]


class Committer(msgspec.Struct, frozen=True):
    """Whose commit it is: the session, its incarnation, and the store that it was connected to."""

    incarnation: Incarnation
    session: Annotated[str, msgspec.Meta(max_length=128)]  # empty: that of the save
    store_id: StoreId
    void: list[Session] = []  # that are over, and take nothing over


class CommitOutcome(msgspec.Struct, frozen=True, tag="committed"):
    """The commit's record.

    note: what went wrong with a convenience (`latest`, tidying), if anything. taken_over: the incarnation of another
    session that took the job over before this commit was on the disk, so that no rank may call it durable; 0: none.
    """

    committed: Committed
    note: str = ""
    taken_over: Incarnation = 0
    published: bool = True  # a trainer's files, or there is nothing to be published
