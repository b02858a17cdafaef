"""The sessions of a job that wait to join, each in a state of one table. Pure."""

from ckptd.core.coordinator.admission_states import ADMISSION, Admission, AdmissionOn
from ckptd.core.coordinator.former_nodes import FormerNodes
from ckptd.core.coordinator.wait_reasons import Waiting
from ckptd.shared.base.ids import JobKey


class WaitingSessions(dict[str, Waiting]):
    """By session."""

    def __init__(self, job: JobKey, node: str) -> None:
        super().__init__()
        self._job, self._node = job, node

    @property
    def taking(self) -> str:
        """The session for which an incarnation number is on its way, empty for none."""
        return next((name for name, one in self.items() if one.state is Admission.NUMBERING), "")

    def came(self, session: str, now: float) -> Waiting:
        """A rank of the session waits."""
        if session not in self:
            former = FormerNodes(self._job, self._node, session)
            self[session] = Waiting(now, former, ADMISSION.begin(AdmissionOn.CAME))
        return self[session]

    def move(self, session: str, on: AdmissionOn) -> bool:
        """Returns whether the table has that row; False: nothing else may follow. What has joined waits no more."""
        step = ADMISSION.step(self[session].state, on)
        if step is not None and step.after is not None:
            self[session].state = step.after
        elif step is not None:
            del self[session]
        return step is not None

    def left(self, session: str) -> None:
        """Ranks of the session may have left: it is over when none waits, unless its number is on its way."""
        if not self[session].ranks and session != self.taking:
            self.move(session, AdmissionOn.EMPTIED)

    def placed(self) -> list[tuple[str, Waiting]]:
        """Those of which every rank has a node now."""
        for session, waiting in self.items():
            if waiting.roster.whole and waiting.state is Admission.GATHERING:
                self.move(session, AdmissionOn.WHOLE)
            elif not waiting.roster.whole and waiting.state is Admission.PLACED:
                self.move(session, AdmissionOn.LEFT)
        return [(session, waiting) for session, waiting in self.items() if waiting.state is Admission.PLACED]
