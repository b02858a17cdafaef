"""Which run a node belongs to, and to which store the job is saved, as far as the node knows. Pure."""

from ckptd.core.actions import Action, RememberStore
from ckptd.shared.base.ids import NO_RUN, JobKey, RunId


class Standing:
    """``incarnation``: the largest that was ever known here; ``run``: drawn with it, NO_RUN while nobody has told."""

    def __init__(self, job: JobKey, incarnation: int = 0) -> None:
        self._job = job
        self.incarnation = incarnation
        self.run: RunId = NO_RUN
        self.store_id = ""  # that the job was saved to last
        self.sessions_store = ""  # that the present session is saved to, as far as it has been told here
        self._session = ""

    def heard(self, incarnation: int, run: RunId) -> None:
        """The job has this number, or had an older one."""
        if incarnation > self.incarnation or (incarnation == self.incarnation and run != NO_RUN):
            self.incarnation, self.run = incarnation, run

    def opened(self, session: str, incarnation: int, run: RunId, store_id: str) -> list[Action]:
        """This session is the job now. store_id: as in saved_to; empty: it has seen none, or its coordinator forgot."""
        if session != self._session:
            self._session, self.sessions_store = session, ""
        self.heard(incarnation, run)
        return self.saved_to(store_id)

    def saved_to(self, store_id: str) -> list[Action]:
        """Later runs of the job learn from this arena to which store it was saved."""
        self.sessions_store = store_id or self.sessions_store
        if not store_id or store_id == self.store_id:
            return []
        self.store_id = store_id
        return [RememberStore(job=self._job, store_id=store_id)]
