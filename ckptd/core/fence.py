"""In whose name a coordinator commits, to which store, and whether another session has taken the job over. Pure.

The store's part of the fence: ckptd/store_incarnations.py.
"""

from collections.abc import Iterable

from ckptd.core import events as ev
from ckptd.core.actions import Commit
from ckptd.protocol.ids import JobKey, SaveId


class Fence:
    """One session's. What is drained goes to the store that was seen, and to no other at its path."""

    def __init__(self, job: JobKey) -> None:
        self._job = job
        self._incarnation = 0
        self._session = ""  # empty: none is known; commits are then made in the name of the session that saved
        self.store_id = ""  # of the store as it was seen last
        self.taken_over = 0  # the incarnation of another session that has taken the job over

    def begin(self, incarnation: int, session: str) -> None:
        """This session is the job now, in this incarnation."""
        self._incarnation, self._session, self.taken_over = incarnation, session, 0

    def commit(self, save: SaveId) -> Commit:
        """The order that makes the save durable, unless somebody has taken the job over."""
        return Commit(
            job=self._job,
            store_id=self.store_id,
            incarnation=self._incarnation,
            session=self._session,
            save=save,
        )

    def rival(self, records: Iterable[ev.Recorded]) -> int:
        """The highest incarnation that another session took after this one's; 0: none."""
        higher = [r.incarnation for r in records if r.incarnation > self._incarnation and r.session != self._session]
        return max(higher, default=0) if self._session else 0


def was_taken_over(save: SaveId, records: Iterable[ev.Recorded]) -> bool:
    """Whether another session than the one that saved it took a higher number.

    Then whether the checkpoint was on the store before that cannot be told from what lies there.
    """
    records = list(records)
    session = next((r.session for r in records if (r.incarnation, r.run) == save.owner), "")
    return any(r.incarnation > save.incarnation and r.session != session for r in records)
