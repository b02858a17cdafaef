"""Decides which tensors of a save are copied late, and runs the late copies of one save at a time."""

import logging
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from ckptd.shared.base.errors import CkptdError, SaveFailedError, UsageError
from ckptd.shared.base.refusals import call_of, not_allowed
from ckptd_client._image.plan import Plan, Values
from ckptd_client._image.segment_plan import Plain
from ckptd_client._local.late_memory import LateMemory, Lease, late_memory
from ckptd_client._local.page_division import Division, placed
from ckptd_client._local.page_guard import NoProofError, Range, batches, copy
from ckptd_client._local.processes import call_at_exit
from ckptd_client._local.save_record import SaveRecord
from ckptd_client._save.late.choice import Choices, Chosen, Rules, Units
from ckptd_client._save.late.copies import LateCopies, PageCopies, TensorCopies
from ckptd_client._save.late.thread import TOO_SLOW, Overlap
from ckptd_client._save.optimizers import Attached, addresses
from ckptd_client._save.segment import Segment
from ckptd_client._save.slot_writer import copy_all, pin_for, slot_views
from ckptd_client._save.staging import Staging

log = logging.getLogger("ckptd_client")
Verify = Literal["proof", "samples", "off"]
_OFF = "off: "
_NOT_YET = "proof, but nothing is late yet: its memory is being put together into huge pages"
_IS_WATCHED = "proof, but nothing is late yet: it is watched whether others write to the pages that its tensors share"
_TOO_SMALL = "proof, but nothing is late: its tensors fill no page of 2 MiB"
_STRIKES = 3  # saves that may fail by writes of other code or slow copies before late copies end


class Overlapping:
    """The late copies of one client. Training threads call its methods, without the client's lock unless noted."""

    def __init__(self, staging: Staging) -> None:
        self._staging = weakref.ref(staging)
        staging.before_wait = self.settle
        self._attached: list[Attached] = []
        self._verify: Verify | None = None  # None: proof on the host, off on devices
        self._memory: LateMemory | None = None
        self._reported: set[str] = set()  # descriptions of the verification in force
        self._written: frozenset[str] = frozenset()  # other code wrote to these: copied before save returns
        self._strikes = 0  # saves that failed by writes of other code, or slow copies
        self._objections: set[str] = set()
        self._choices = Choices()
        self._running: Overlap | None = None
        self._last: _Last | None = None  # the save before the next step

    # --- optimizers

    def attach(self, optimizers: Sequence[Any], verify: Verify | None) -> None:
        """Allows late copies of tensors that only the optimizers' step() writes. Raises UsageError."""
        if not optimizers:
            raise UsageError("attach was given no optimizer", hint="attach(optimizer)")
        if verify is not None and verify not in get_args(Verify):
            must = '"proof", "samples" or "off"'
            raise not_allowed(UsageError, "verify", verify, must, "proof", origin=call_of("attach"))
        if not self._attached:
            call_at_exit(self.end)
        known = {id(attached.optimizer) for attached in self._attached}
        new = {id(optimizer): optimizer for optimizer in optimizers if id(optimizer) not in known}
        made: list[Attached] = []
        try:
            made += [Attached(optimizer, self.before_step) for optimizer in new.values()]
        except UsageError:
            for attached in made:
                attached.detach()
            raise
        self._attached += made
        self._set_verification(verify)

    def _set_verification(self, verify: Verify | None) -> None:
        """Sets the verification for all attached optimizers, and reports a change."""
        self._verify = verify or self._verify
        status: str = self._verify or "proof"
        if status == "proof":
            try:
                self._memory = late_memory()
                status = _NOT_YET
            except NoProofError as error:
                status = f"{_OFF}{error}"
        self._report(status)

    def _report(self, status: str) -> None:
        """Records the verification in force. Logs each description once."""
        staging = self._staging()
        if staging is not None:
            staging.stats.late = status
        if status in self._reported:
            return
        self._reported.add(status)
        if status.startswith(_OFF):
            hint = "" if self._strikes else '; attach(optimizer, verify="samples") copies it late on trust'
            text = f"nothing of the host's memory is copied late: {status.removeprefix(_OFF)}{hint}"
            log.warning("ckptd: attach: %s", text)
        else:
            log.info("ckptd: attach: late copies are verified by: %s", status)

    def detach(self) -> None:
        """Detaches all optimizers."""
        while self._attached:
            self._attached.pop().detach()
        units = self._choices.units
        self._choices.forget()
        if self._memory is not None:
            self._memory.forget(units)
        if not self.running:
            self._running = self._last = None

    def late(self, plan: Plan, values: Values) -> "Late | None":
        """The part of a save that may be copied late; None: nothing. Under the lock.

        It leases the memory until release, or until it is freed.
        """
        staging = self._staging()
        assert staging is not None  # noqa: S101 - it called
        staging.stats.last_late_nbytes = 0
        exclusive = [attached for attached in self._attached if self._is_exclusive(attached)]
        if not exclusive or self._verify == "off" or self._strikes >= _STRIKES:
            return None
        proof = self._memory is not None and self._verify in (None, "proof")
        rules = Rules(proof, self._verify is not None, self._verify == "samples", self._written)
        owned = [tensor for attached in exclusive for tensor in attached.tensors()]
        before = self._choices.units
        chosen = self._choices.of(plan, values, owned, rules)
        found = Late(chosen, chosen.with_read if values.digests else chosen.plain)
        if self._memory is not None:
            if (after := self._choices.units) != before:
                self._memory.forget(before, but=after)
            self._protect(self._memory, found, values.tensors)
        return found if chosen.choice.whole or found.ranges else None

    def _protect(self, memory: LateMemory, found: "Late", tensors: Sequence[torch.Tensor]) -> None:
        """Protects units of tensors alone. Shared units are protected after this thread's own writes there."""
        units = found.units.own if memory.alone else found.units.all
        found.lease = memory.lease(units)
        found.lease.protect(found.units.own)
        if addresses(tensors) != found.chosen.basis.lie:  # another thread has replaced a tensor's memory
            found.lease.release()
        if found.ranges:
            return
        if not found.units.all:
            self._report(_TOO_SMALL)
        else:
            why_not = memory.why_not(units) if units else "others write to the pages that its tensors share"
            self._report(f"{_OFF}{why_not}" if why_not else _NOT_YET)

    def _is_exclusive(self, attached: Attached) -> bool:
        objection = attached.objection()
        if objection and objection not in self._objections:
            self._objections.add(objection)
            log.warning("ckptd: what an attached optimizer writes is copied before save returns: %s", objection)
        return not objection

    # --- saves

    def begin(  # noqa: PLR0913 - keyword-only
        self, segment: Segment, plan: Plan, values: Values, found: "Late", *, handle: SaveRecord, drain: bool,
        deadline: float,
    ) -> None:  # fmt: skip
        """Copies the early part now and starts the late copies. Under the lock; no other late copies may run."""
        staging = self._staging()
        assert staging is not None  # noqa: S101 - it called
        staging.link.unsealed.add(handle.save_id)
        completion = _Completion(staging, self, segment, handle, values.plain, drain)
        try:
            overlap = Overlap(self._copied(segment, plan, values, found, handle.save_id.counter), completion)
            handle.late_nbytes = staging.stats.last_late_nbytes
            segment.owner = weakref.ref(overlap)
        except BaseException:
            found.release()
            staging.link.unsealed.discard(handle.save_id)
            staging.release(segment)
            raise
        self._running, self._last = overlap, _Last(handle, deadline)  # first: the thread ends the save
        try:
            overlap.start()
        except BaseException as error:
            overlap.cancel(f"{type(error).__name__} while its copy began")
            overlap.release()
            if overlap.withdraw():
                self._running = self._last = None
                staging.link.unsealed.discard(handle.save_id)
                staging.release(segment)
            raise

    def _copied(self, segment: Segment, plan: Plan, values: Values, found: "Late", turn: int) -> list[LateCopies]:
        """Copies the early part, and prepares the late copies."""
        staging, views, tensors = self._staging(), slot_views(segment.slot, plan), values.tensors
        assert staging is not None  # noqa: S101 - it called
        stats = staging.stats
        pin_for(segment.slot, tensors)  # before the thread copies, so that no engine makes it wait
        division, base = self._divided(found, plan), segment.memory.data_ptr()
        for digest in values.digests:
            digest.take(division.late_ranges)
        whole = found.chosen.choice.whole
        copies = self._of_tensors(found, values, views, whole, turn) if whole else []
        pages = self._of_pages(found, division, base, values) if found.ranges else None
        copy_all(segment.slot, [views[i] for i in division.whole], [tensors[i] for i in division.whole])
        for batch in batches(placed(division.early, base)):
            copy(batch)
        stats.last_late_nbytes = sum(tensors[i].nbytes for i in whole)
        if pages is not None and found.lease is not None:
            found.lease.protect(found.units.shared)  # lost units count as written
            copies.append(pages)
            stats.last_late_nbytes += division.nbytes
            self._report("proof" if division.late_ranges else _IS_WATCHED)
        return copies

    def _divided(self, found: "Late", plan: Plan) -> Division:
        late, watched = self._memory.trusted(found.units.shared) if self._memory is not None else ([], [])
        return found.chosen.divided(
            plan.image.data_offsets, armed=found.ranges, own=found.units.own, shared=late, watched=watched
        )

    def _of_pages(self, found: "Late", division: Division, base: int, values: Values) -> PageCopies:
        assert self._memory is not None  # noqa: S101 - the ranges belong to it
        assert found.lease is not None  # noqa: S101 - as above
        # Keeps the memory of large tensors, even if the tensors are freed; small ones whose memory changes count as
        # written.
        keep = [values.tensors, *(values.tensors[i].untyped_storage() for i in division.large)]
        names = found.chosen.names
        return PageCopies(
            self._memory, found.lease, division, slot=base, names=names, keep=keep, digests=values.digests
        )

    def _of_tensors(
        self, found: "Late", values: Values, views: Sequence[torch.Tensor], whole: Sequence[int], turn: int
    ) -> list[LateCopies]:
        names = [found.chosen.names[i] for i in whole]
        columns = ([column[i] for i in whole] for column in (views, values.tensors, values.counted))
        return [TensorCopies(names, *columns, checked=self._verify == "proof", turn=turn)]

    @property
    def running(self) -> bool:
        """Whether a save's copies run, or it is not handed over yet."""
        return self._running is not None and not self._running.over

    def before_step(self) -> None:
        """Blocks until an attached optimizer may write: at most save_timeout_s after save began.

        Never raises: an error here fails the save, not the step.
        """
        try:
            self._let_write()
        except Exception as error:  # noqa: BLE001 - see above
            text = f"{type(error).__name__}: {error}"
            log.warning("ckptd: before the optimizer's step: %s", text)
            if self._running is not None:
                self._running.cancel(text)
                self._running.release()

    def _let_write(self) -> None:
        last = self._last
        if last is None or self._running is None or not self.running:
            return
        began = last.handle.held_since = time.perf_counter()
        self._running.before_step(last.deadline)
        last.handle.held_since = None
        waited = time.perf_counter() - began
        last.handle.stall_s += waited
        staging = self._staging()
        if staging is not None:
            staging.stats.stall_s += waited

    def settle(self, deadline: float, *, cancel: bool = False) -> None:
        """Blocks until no save's copies run; with cancel, gives up a save whose copies run at the deadline."""
        running = self._running
        if running is None or running.settle(deadline):
            return
        if cancel:
            running.cancel("its copy was not done when the next save had waited save_timeout_s for it")
            running.release()

    def end(self) -> None:
        """Completes the last save when the process ends without close."""
        staging = self._staging()
        if staging is not None and self.running:
            self.settle(staging.until())

    def note_written(self, names: Sequence[str]) -> None:
        """Records tensors that other code writes: later saves copy them before they return, in the end all tensors."""
        self._written |= {*names}
        self._strike(f"others than the optimizer wrote to it, the last time to {names[0]!r}")

    def note_slow(self) -> None:
        """Records that a copy delayed the optimizer for save_timeout_s, and the save was given up."""
        self._strike("copies are not done when the optimizer has waited save_timeout_s for them")

    def _strike(self, text: str) -> None:
        self._strikes += 1
        if self._strikes == _STRIKES:
            self._report(f"{_OFF}it cost {_STRIKES} saves: {text}")


@dataclass(slots=True)
class Late:
    """The part of one save that is copied late."""

    chosen: Chosen
    units: Units
    lease: Lease | None = None

    @property
    def ranges(self) -> list[Range]:
        """Memory of the host that can be protected."""
        return self.lease.ranges if self.lease is not None else []

    def release(self) -> None:
        """Ends the protection."""
        if self.lease is not None:
            self.lease.release()


@dataclass(frozen=True, slots=True)
class _Last:
    """The save that the next step waits for."""

    handle: SaveRecord
    deadline: float


@dataclass(frozen=True, slots=True)
class _Completion:
    """Completes one save."""

    staging: Staging
    overlapping: Overlapping
    segment: Segment
    handle: SaveRecord
    plain: Plain
    drain: bool

    def deliver(self) -> None:
        """Seals the save and hands it over."""
        try:
            self.staging.seal(self.segment, self.handle, self.plain, drain=self.drain)
        except Exception as error:  # noqa: BLE001 - training continues after any error
            self.staging.give_up(self.handle, error)

    def discard(self, reason: str, written: Sequence[str]) -> None:
        """Gives the save up and reports it."""
        names = sorted({*written})
        if reason == TOO_SLOW:
            self.overlapping.note_slow()
        if names:
            self.overlapping.note_written(names)
        error: CkptdError = SaveFailedError(reason)
        if names:
            what = reason.removeprefix("it ")
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            text = f"{names[0]!r}{more}: it {what}; such tensors are copied before save returns"
            error = SaveFailedError(text, hint="write to the state in optimizer.step() only, or before save")
        self.staging.release(self.segment)
        self.staging.give_up(self.handle, error)
