"""The numbers of one client's saves: checks steps, and gives each save its id."""

import logging
from collections.abc import Callable

from ckptd.shared.base.errors import UsageError
from ckptd.shared.base.ids import SaveId
from ckptd.shared.protocol.messages import LoadFrom
from ckptd_client._daemon import settings
from ckptd_client._daemon.link import Link
from ckptd_client._daemon.turns import Owner
from ckptd_client._local.save_record import SaveRecord

log = logging.getLogger("ckptd_client")
_LOWER = "ckptd: step %d is saved after step %d: load takes the newest save, load(state, step=...) another"


class Numbers:
    """The numbers of the link's incarnation. Every method holds the lock of the numbers, briefly."""

    def __init__(self, link: Link, owner: Owner, check_open: Callable[[], None]) -> None:
        self._link = link
        self._lock = owner.numbers
        self._check_open = check_open
        self._counter, self._last_step, self._highest = 0, -1, -1
        self._steps: set[int] = set()
        self._warned = False

    def count(self) -> tuple[int, int]:
        """Incarnation and number of the next save. All ranks count alike, also saves that fail."""
        with self._lock():
            self._check_open()
            self._counter += 1
            return self._link.incarnation, self._counter

    def name(self, number: tuple[int, int], step: int | None) -> SaveId:
        """The id of the save of this number. step: None for the one after the last.

        Raises UsageError for a step that was saved already, and for a number from before the last load.
        """
        with self._lock():
            self._check_open()
            incarnation, counter = number
            if incarnation != self._link.incarnation:
                text = "the state was staged before the load that came after it, and cannot be saved any more"
                raise UsageError(text, hint="wait for the future of dcp.async_save before a load")
            return SaveId(incarnation, counter, self._check_step(step), self._link.run)

    def next(self, step: int | None, state: object) -> SaveId:
        """The id of the next save of a state. Raises UsageError, also if step and state are exchanged."""
        with self._lock():
            self._counter += 1  # also for a save that fails, so that all ranks count alike
            settings.check_order(state, step)
            return SaveId(self._link.incarnation, self._counter, self._check_step(step), self._link.run)

    def begin(self, handle: SaveRecord, *, unsealed: bool = False) -> None:
        """Registers the handle of a save that begins. unsealed: a later call seals it or gives it up.

        Raises UsageError if its step was saved since it got its id.
        """
        save = handle.save_id
        with self._lock():
            if unsealed:
                self.name((save.incarnation, save.counter), save.step)
                self._link.unsealed.add(save)
            self._link.book.add(handle)
            self._steps.add(save.step)
            self._last_step = save.step
            lower, self._highest = save.step < self._highest, max(save.step, self._highest)
            if lower and not self._warned:
                self._warned = True
                log.warning(_LOWER, save.step, self._highest)

    def free_step(self, wanted: int) -> int:
        """The step, or the next one that was not saved in this incarnation."""
        while wanted in self._steps:
            wanted += 1
        return wanted

    def begin_incarnation(self, order: LoadFrom) -> None:
        """Starts the incarnation that a load has given the job."""
        with self._lock():
            self._link.begin_incarnation(order.incarnation, order.run)
            self._counter, self._steps = 0, set()
            self._last_step = order.save.step if order.save is not None else -1
            self._highest, self._warned = -1, False

    def _check_step(self, step: int | None) -> int:
        if step is None:
            return self._last_step + 1
        step = settings.as_step(step)
        if step in self._steps and not self._was_in_vain(step):
            raise UsageError(
                f"step {step} was already saved by this run, since it began or loaded last",
                hint="save each step once; to go back to an older step, load it first",
            )
        return step

    def _was_in_vain(self, step: int) -> bool:
        """Whether the step's save can reach no milestone any more, so that the step may be saved again."""
        handle = self._link.book.of_step(self._link.incarnation, step)
        return handle is not None and handle.in_vain and not self._link.outbox.holds(handle.save_id)
