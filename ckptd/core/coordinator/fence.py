"""In whose name a coordinator commits, to which store, and whether another session has taken the job over. Pure.

A number that was made up while the store was silent has no record there, and no takeover sees it: it is claimed as soon
as the store answers, and nothing is drained before. The store's part of the fence: ckptd/store/numbers.py.
"""

from collections.abc import Collection, Iterable

from ckptd.core import events as ev
from ckptd.core.actions import Claim, Commit
from ckptd.core.coordinator.job_state import JobState
from ckptd.shared.base.ids import NO_RUN, Run, RunId, SaveId


class Fence:
    """One session's. What is drained goes to the store that was seen, and to no other at its path."""

    def __init__(self, facts: JobState) -> None:
        self._job = facts.job
        self._over = facts.session
        self._incarnation = 0
        self._run: RunId = NO_RUN
        self._recorded = set[Run]()  # numbers with a record on the store
        self._seen: tuple[ev.Recorded, ...] = ()  # records, at the last look
        self._asked = 0  # the number that a look under way puts on record
        self._lost = 0  # the number that was made up, if the store had given it to another run of the job
        self._session = ""  # empty: none is known; commits are then made in the name of the session that saved
        self.store_id = ""  # of the store as it was seen last
        self.taken_over = 0  # the incarnation of another session that has taken the job over

    def begin(self, incarnation: int, run: RunId, session: str) -> None:
        """This session is the job now, in this incarnation."""
        self._incarnation, self._run, self._session, self.taken_over = incarnation, run, session, 0

    @property
    def void(self) -> tuple[str, ...]:
        """Sessions that are over, and take nothing over."""
        return self._over.void

    @property
    def present(self) -> Run:
        """In whose name commits are made."""
        return self._incarnation, self._run

    def recorded(self, runs: Iterable[Run]) -> None:
        """These numbers have their records on the store."""
        self._recorded |= set(runs)

    def saw(self, store_id: str) -> None:
        """This store answered."""
        self.store_id = store_id or self.store_id

    @property
    def claim(self) -> Claim | None:
        """What the next look at the store is to put on record first; None: it is there, or nobody is in."""
        if not self._session or self._run == NO_RUN or (self._incarnation, self._run) in self._recorded:
            return None
        return None if self.taken_over else Claim(self._incarnation, self._run, self._session)

    def must_claim(self) -> bool:
        """Whether the store is to be looked at for the claim's sake. Says so once."""
        claim = self.claim
        if claim is None or claim.incarnation in (self._asked, self._lost):
            return False
        self._asked = claim.incarnation
        return True

    def looked(self, event: ev.StoreScanned, highest: int) -> bool:
        """Takes in the scan. Returns whether an older run has the made-up number, which cannot be kept then.

        highest: of the saves there that are not this session's.
        """
        if event.problem or event.claimed:
            self._asked = 0
        if event.problem:
            return False
        self._seen = event.records
        self._recorded |= {(record.incarnation, record.run) for record in event.records}
        number, claimed = self._incarnation, event.claimed == self._incarnation
        if self.claim is None:
            return False
        if highest >= number or (claimed and event.lost):
            self._lost = number
        elif claimed and number != self._lost:
            self._recorded.add((number, self._run))
        return number == self._lost

    def hides(self, save: SaveId) -> str:
        """Why a save of an earlier session, found on the store, is worth nothing to its ranks; empty: it is theirs."""
        return overtaken(save, self._seen, (self._session, *self.void))

    @property
    def holds_drains(self) -> bool:
        """Whether nothing may be drained: somebody has taken the job over, or could not see that it is ours."""
        return bool(self.taken_over) or (self.claim is not None and self._lost != self._incarnation)

    def commit(self, save: SaveId) -> Commit:
        """The order that makes the save durable, unless somebody has taken the job over."""
        return Commit(
            job=self._job,
            store_id=self.store_id,
            incarnation=self._incarnation,
            session=self._session,
            save=save,
            void=self.void,
        )

    def rival(self, records: Iterable[ev.Recorded]) -> int:
        """The highest incarnation that another session took after this one's; 0: none."""
        own = (self._session, *self.void)
        higher = [r.incarnation for r in records if r.incarnation > self._incarnation and r.session not in own]
        return max(higher, default=0) if self._session else 0


def overtaken(save: SaveId, records: Iterable[ev.Recorded], void: Collection[str]) -> str:
    """Why the save is hidden by another session's than those of void, though it lies on the store; empty: it is not."""
    records = list(records)
    if not was_taken_over(save, records, void):
        return ""
    return f"incarnation {max(r.incarnation for r in records if r.session not in void)} took the job over"


def was_taken_over(save: SaveId, records: Iterable[ev.Recorded], void: Collection[str] = ()) -> bool:
    """Whether another session than the one that saved it took a higher number. void: sessions that took none.

    Then the store does not show whether the checkpoint was there before.
    """
    records = list(records)
    session = next((r.session for r in records if (r.incarnation, r.run) == save.owner), "")
    return any(r.incarnation > save.incarnation and r.session not in (session, *void) for r in records)
