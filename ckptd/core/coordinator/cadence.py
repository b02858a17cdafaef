"""Which staged saves are due for a drain. Pure."""

from ckptd.shared.base.ids import SaveId
from ckptd.shared.protocol.messages import Cadence


class DrainCadence:
    """By the cadence that the job's ranks asked for."""

    def __init__(self) -> None:
        self.cadence = Cadence()
        self._last: tuple[int, float] | None = None  # (step, time) of the last save that was due
        self.from_step: int | None = None  # the job is about to be ended: what is saved from this step on is due

    def begin(self) -> None:
        """Another incarnation: its first save is due."""
        self._last = None

    def is_due(self, save: SaveId, now: float) -> bool:
        """The first is, and the first at or after each multiple of the steps: so ``keep_every`` finds its own."""
        last, cadence = self._last, self.cadence
        due = (
            last is None
            or (self.from_step is not None and save.step >= self.from_step)
            or save.step < last[0]
            or (cadence.steps > 0 and save.step // cadence.steps != last[0] // cadence.steps)
            or (cadence.seconds > 0 and now - last[1] >= cadence.seconds)
        )
        if due:
            self._last = (save.step, now)
        return due
