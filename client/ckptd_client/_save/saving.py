"""``Client.save``: copies a state's values into a slot, seals it and hands it over, now or after late copies."""

import contextlib
import logging
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from ckptd.shared.base.errors import WaitTimeoutError
from ckptd.shared.base.ids import SaveId
from ckptd.shared.format.save_metadata import Scalar
from ckptd.shared.protocol.messages import End
from ckptd_client._image.plan import Plan, Values
from ckptd_client._local.copy_engines import check_not_capturing
from ckptd_client._local.save_record import SaveRecord
from ckptd_client._save.late.overlapping import Overlapping
from ckptd_client._save.preparing import Preparing
from ckptd_client._save.slot_writer import fill_slot
from ckptd_client._save.staging import Staging

log = logging.getLogger("ckptd_client")
_SKIP_NOTICE_S = 0.2  # limit to report an interrupted save


class Saving:
    """One client's saves of states."""

    def __init__(self, staging: Staging) -> None:
        self._staging = staging
        self.overlapping = Overlapping(staging)
        self.preparing = Preparing(staging)

    @contextlib.contextmanager
    def settled(self, deadline: float, *, patient: bool = False) -> Iterator[bool]:
        """The client's lock, once no save's copies run. patient: the deadline is for the copies only.

        Gives False if another thread held the lock until then.
        """
        self._staging.owner.check()
        while True:
            self.overlapping.settle(deadline, cancel=True)
            with self._staging.first(None if patient else deadline) as mine:
                if mine and self.overlapping.running and time.monotonic() < deadline:
                    continue  # another thread has begun a save; its copies need the lock to end
                yield mine
                return

    def save(self, state: dict[str, Any], step: int | None, *, drain: bool, metadata: dict[str, Scalar]) -> SaveRecord:
        """See Client.save."""
        began = time.perf_counter()
        staging = self._staging
        deadline = staging.until()
        with self.settled(deadline) as mine:
            staging.check_open()
            self.preparing.forget_steps()
            save = staging.numbers.next(step, state)
            check_not_capturing()  # after the count, so that all ranks count alike
            said = metadata if staging.group.rank == 0 else {}
            staged = partial(self._staged, state, save, said, began, drain=drain, deadline=deadline)
            handle = staged() if mine else self._refused(save)
            handle.held_since = None
            handle.stall_s += time.perf_counter() - began
            self._count(handle)
        return handle

    def _refused(self, save: SaveId) -> SaveRecord:
        handle = self._staging.open(save, unsealed=False)
        error = WaitTimeoutError("another thread kept the client to itself")
        self._staging.note_failure(handle, error, deadline=None)
        return handle

    def _staged(  # noqa: PLR0913 - what is saved, since when, until when
        self, state: dict[str, Any], save: SaveId, metadata: dict[str, Scalar], began: float, *, drain: bool,
        deadline: float,
    ) -> SaveRecord:  # fmt: skip
        staging = self._staging
        plans, asked = staging.stats.plans, time.monotonic()
        sample = staging.link.sampling.next(save, drain=drain)
        plan, values = staging.plans.gather(state, sample, metadata)
        if staging.stats.plans > plans:  # a plan is made once; the timeout does not cover it
            deadline += time.monotonic() - asked
        handle = staging.open(save, unsealed=False)
        handle.held_since = began
        staging.link.sampling.record(plan.streams, sample, handle)
        staging.stats.nbytes += plan.nbytes
        self._stage_or_fail(handle, plan, values, drain=drain, deadline=deadline)
        return handle

    def _count(self, handle: SaveRecord) -> None:
        stats = self._staging.stats
        stats.saves += 1
        stats.stall_s += handle.stall_s
        stats.last_stall_s = handle.stall_s

    def _stage_or_fail(self, handle: SaveRecord, plan: Plan, values: Values, *, drain: bool, deadline: float) -> None:
        staging, link = self._staging, self._staging.link
        link.staging = handle.save_id
        try:
            staging.while_daemons_end(
                lambda: self._stage(handle, plan, values, drain=drain, deadline=deadline),
                deadline,
                lambda: staging.was_delivered(handle),
            )
        except Exception as error:  # noqa: BLE001 - training continues after any error
            staging.note_failure(handle, error, deadline=deadline)
        except BaseException as error:  # for example Ctrl-C: code that continues must not wait for this save
            link.outbox.forget(handle.save_id)
            staging.note_failure(handle, error, deadline=time.monotonic() + _SKIP_NOTICE_S)
            raise
        finally:
            link.staging = None

    def _stage(self, handle: SaveRecord, plan: Plan, values: Values, *, drain: bool, deadline: float) -> None:
        staging, link = self._staging, self._staging.link
        need = staging.fit_slots(plan, values.plain.nbytes, deadline)
        staging.free_orphans(need)
        began, allocating = time.monotonic(), link.allocating
        try:
            name = link.wait_slot(need, deadline)
        except WaitTimeoutError:
            self._skip(handle, time.monotonic() - began, deadline)
            return
        if allocating:  # memory is allocated once; the timeout does not cover it
            deadline += time.monotonic() - began
        late = self.overlapping.late(plan, values)
        if late is not None:
            try:
                segment = staging.hold(plan, name, owner=self.overlapping)
            except BaseException:
                late.release()
                raise
            self.overlapping.begin(segment, plan, values, late, handle=handle, drain=drain, deadline=deadline)
            return
        try:
            slot = link.slots.take(name)
        except FileNotFoundError as error:
            raise link.why_gone(name, deadline) from error
        try:
            for digest in values.digests:
                digest.take()
            fill_slot(slot, plan, values.tensors)
            staging.write_seal(slot, plan, values.plain, handle)
        except BaseException:
            link.slots.grant(name, slot.capacity)
            raise
        staging.hand_over(name, handle, drain=drain, deadline=deadline)

    def _skip(self, handle: SaveRecord, waited_s: float, deadline: float) -> None:
        """Ends the save as skipped: no slot was free in time."""
        reason, _ = self._staging.no_slot()
        if not self._staging.link.all_granted:
            reason = f"the memory of its slots is still being allocated after {waited_s:.3g} s"
            reason += "; call prepare(state) before training"
        handle.fail(End.SKIPPED, reason)
        log.warning("ckptd: step %d was not saved: %s", handle.step, reason)
        self._staging.link.outbox.skip(handle.save_id, reason, deadline)
