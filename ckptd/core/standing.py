"""Which run a node belongs to, and to which store the job is saved, as far as the node knows. Pure."""

from ckptd.core.actions import Action, RememberStore
from ckptd.protocol.ids import NO_RUN, JobKey, RunId


class Standing:
    """``incarnation``: the largest that was ever known here; ``run``: drawn with it, NO_RUN while nobody has told."""

    def __init__(self, job: JobKey, incarnation: int = 0) -> None:
        self._job = job
        self.incarnation = incarnation
        self.run: RunId = NO_RUN
        self.store_id = ""  # that the job was saved to last

    def heard(self, incarnation: int, run: RunId) -> None:
        """The job has this number, or had an older one."""
        if incarnation > self.incarnation or (incarnation == self.incarnation and run != NO_RUN):
            self.incarnation, self.run = incarnation, run

    def saved_to(self, store_id: str) -> list[Action]:
        """Later runs of the job learn from this arena to which store it was saved."""
        if not store_id or store_id == self.store_id:
            return []
        self.store_id = store_id
        return [RememberStore(job=self._job, store_id=store_id)]
