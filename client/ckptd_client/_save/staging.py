"""The staging of a segment, from a state to shared memory and the daemon: open, fill, seal, or give up.

``save`` of a state or of files takes all steps in one call; torch.distributed.checkpoint and late copies fill a slot
now and seal it later. Between the two the segment holds its slot. It survives the end of the daemon: the next daemon
grants slots again, and the segment keeps its own slot or is copied into another.
"""

import contextlib
import gc
import logging
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from torch import Tensor

from ckptd.shared.base.errors import CkptdError, SaveFailedError, UsageError, WaitTimeoutError
from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.format.integrity import Integrity
from ckptd.shared.protocol.messages import (
    MAX_LATE_CHARS,
    AskStatus,
    AskSteps,
    End,
    HandOver,
    Milestone,
    Request,
    StatusReply,
    Steps,
)
from ckptd.shared.protocol.publication import Publication
from ckptd_client._daemon.channel import ChannelLostError, PreemptedError
from ckptd_client._daemon.link import Link
from ckptd_client._daemon.turns import Owner, Turns
from ckptd_client._image.segment_plan import Plain, SegmentPlan
from ckptd_client._local.rank import Group
from ckptd_client._local.save_record import SaveRecord
from ckptd_client._local.slots import SlotMap
from ckptd_client._local.why_late import Cause, why_late
from ckptd_client._save.numbers import Numbers
from ckptd_client._save.plans import Plans
from ckptd_client._save.segment import Segment
from ckptd_client._save.slot_writer import fill_slot, seal_slot
from ckptd_client._save.stats import Stats
from ckptd_client._state.pickle import PickleKeys

log = logging.getLogger("ckptd_client")
_AT_ONCE_S = 0.05
_REASON_S = 1.0  # after a wait that timed out, to ask for the reason


class Staging:
    """The staging of one client. Holds its link and the lock around it, its plans, and segments to be sealed.

    Any thread may call its methods. In a forked child all raise UsageError, but those that release something.
    """

    def __init__(self, link: Link, save_timeout_s: float, *, dual: bool = True) -> None:
        """dual: images are for stock readers too."""
        self.link, self.save_timeout_s = link, save_timeout_s
        self.closed = False
        self.owner = Owner()
        turns = Turns(link, self.owner)
        self.lock, self.first, self.last = turns.lock, turns.first, turns.last
        self.stats = Stats()
        self.plans = Plans(link, self.stats, dual=dual)
        self.numbers = Numbers(link, self.owner, self.check_open)
        self.last_failure = ""  # text of the last reported failure; the error itself would keep its traceback alive
        self.before_wait: Callable[[float], object] = float  # called with a deadline before a wait for updates
        self._segments: list[Segment] = []
        this = weakref.ref(self)  # a client that is dropped without close is freed at once
        link.book.outlook.why_late = lambda save, wanted: one._why_late(save, wanted) if (one := this()) else Cause()  # noqa: SLF001

    def __reduce__(self) -> NoReturn:
        text = f"a client is of the process that connected, {self.owner.pid}, and can be neither pickled nor copied"
        raise UsageError(text, hint="connect there, or keep it out of what is sent to other processes")

    # --- queries

    @property
    def group(self) -> Group:
        """This rank and the size of the job."""
        return self.link.group

    @property
    def job(self) -> JobKey:
        """Store and name of the job."""
        return self.link.job

    @property
    def integrity(self) -> Integrity:
        """The proof of all data that the client saves and loads."""
        return self.link.settings.integrity

    @property
    def pickle_keys(self) -> PickleKeys:
        """Which keys allow_pickle names."""
        return self.link.settings.pickle_keys

    @property
    def is_own(self) -> Callable[[str], bool]:
        """Whether each rank has its own value of a name, by connect's per_rank."""
        return self.link.settings.named.is_own

    def check_open(self) -> None:
        """Raises UsageError in a forked child, and when the client is closed."""
        self.owner.check()
        if self.closed:
            raise UsageError("this client is closed", hint="connect again")

    def until(self) -> float:
        """The deadline of a save that begins now, by time.monotonic."""
        return time.monotonic() + self.save_timeout_s

    @contextlib.contextmanager
    def turn(self, deadline: float) -> Iterator[None]:
        """The client's lock, with priority over threads that wait for updates. Raises WaitTimeoutError."""
        with self.first(deadline) as mine:
            if not mine:
                raise WaitTimeoutError("another thread kept the client to itself")
            self.check_open()
            yield

    def ask(self, make: Callable[[int], Request], patience_s: float | None = None) -> Any:
        """The daemon's answer to a request. Blocks; raises CkptdError."""
        deadline = self.link.patient_until(patience_s)
        while True:
            with contextlib.suppress(PreemptedError), self.last(deadline) as mine:
                self.check_open()
                if not mine:
                    raise WaitTimeoutError("another thread kept the client to itself")
                return self.link.ask(make, deadline)

    def checkpoints(self) -> Any:
        """The checkpoints that load could restore, the newest first, from the coordinator. Blocks as ask does."""
        answer = self.ask(lambda seq: AskSteps(seq=seq))
        assert isinstance(answer, Steps)  # noqa: S101 - the reply to AskSteps
        return answer.checkpoints

    def has(self, save: SaveId) -> bool:
        """Whether this save can be restored; another one may have the same step. Blocks as ask does."""
        name = save.incarnation, save.counter, save.step
        runs = [found.run for found in self.checkpoints() if (found.incarnation, found.counter, found.step) == name]
        return any(run in {"", save.run.hex()} for run in runs)  # empty: from a daemon that sends no runs

    def _why_late(self, save: SaveId, wanted: Milestone) -> Cause:
        """Asks the daemon, for a second at most, why a wait timed out."""
        with contextlib.suppress(CkptdError):
            if self.link.is_lost:  # to start a daemon here would delay the next save
                return Cause()
            answer = self.ask(lambda seq: AskStatus(seq=seq), _REASON_S)
            assert isinstance(answer, StatusReply)  # noqa: S101 - the reply to AskStatus
            return why_late(answer.status, self.link.job, save, wanted)
        return Cause()

    def pump(self, seconds: float, patience_s: float | None = None) -> None:
        """Receives updates for the handles; during a wait also attaches to a new daemon if the old one ended."""
        if seconds > 0:
            self.before_wait(time.monotonic() + seconds)
        if self.closed and seconds > 0:
            raise SaveFailedError(
                "the client was closed and hears no more of its saves",
                hint="wait before close; what was staged becomes durable all the same",
            )
        with contextlib.suppress(PreemptedError), self.last(time.monotonic() + seconds) as mine:
            if self.closed or not mine:  # the thread that has the lock receives updates for all
                return
            if seconds > 0:
                self.link.ensure(self.link.patient_until(patience_s))
            self.link.pump(time.monotonic() + min(seconds, _AT_ONCE_S))

    # --- open

    def open(self, save: SaveId, *, unsealed: bool = True) -> SaveRecord:
        """Begins a save and returns its handle. unsealed: a later call seals it or gives it up.

        Raises UsageError as Numbers.begin does.
        """
        handle = SaveRecord(save, self.pump)
        self.numbers.begin(handle, unsealed=unsealed)
        if unsealed:
            self.stats.saves += 1
        return handle

    # --- fill

    def fill(
        self, plan: SegmentPlan, tensors: list[Tensor], plain_nbytes: int, *, owner: Any,
        deadline: float | None = None,
    ) -> Segment:  # fmt: skip
        """Copies the tensors into a free slot, which the segment then holds. Blocks until deadline, or save_timeout_s.

        Raises CkptdError if no slot is free in time.
        """

        def once() -> Segment:
            need = self.fit_slots(plan, plain_nbytes, until)
            self.free_orphans(need)
            segment = self.hold(plan, self._wait_slot(need, until), owner=owner)
            try:
                fill_slot(segment.slot, plan, tensors)
            except BaseException:
                self.release(segment)
                raise
            return segment

        until = self.until() if deadline is None else deadline
        with self.turn(until):
            segment: Segment = self.while_daemons_end(once, until)
            self.stats.nbytes += plan.nbytes
            return segment

    def fit_slots(self, plan: SegmentPlan, plain_nbytes: int, deadline: float) -> int:
        """Asks for slots if there are none of sufficient size. Returns the bytes that the plan needs."""
        link, need = self.link, plan.exact_capacity(plain_nbytes)
        if need > link.capacity or link.refusal is not None:
            self.ask_slots(plan.capacity(plain_nbytes), deadline)
        return need

    def ask_slots(self, capacity: int, deadline: float) -> None:
        """Asks for slots of so many bytes, unless they are granted or requested already."""
        link = self.link
        if capacity > link.capacity or link.refusal is not None:
            refused = link.refusal is not None  # then the size of the last request does not matter
            link.ask_slots(capacity if refused else max(capacity, link.capacity), deadline)

    def hold(self, plan: SegmentPlan, name: str, *, owner: Any) -> Segment:
        """Takes a granted slot for the caller to fill. Under the client's lock."""
        slots = self.link.slots
        slot = slots.take(name)
        slots.held.add(name)
        segment = Segment(plan, name, slot, slot.bytes, self.link.attachments, weakref.ref(owner))
        self._segments.append(segment)
        return segment

    def holder(self, address: int) -> Segment | None:
        """The filled and unsealed segment whose slot contains the address."""
        with self.first(self.until()):
            return next((segment for segment in self._segments if segment.holds(address)), None)

    def free_orphans(self, need: int) -> None:
        """Frees the slots of segments without an owner. need: bytes of the slot that the caller wants.

        Collects garbage only while no such slot is free, young objects first: the traceback of an error may be in a
        cycle with a state, but a whole collection takes seconds in a large process, within the save's timeout.
        """
        for generation in (None, 1, 2):
            if generation is not None:
                gc.collect(generation)
            for left in [segment for segment in self._segments if segment.owner() is None]:
                self.release(left)
            if not self._segments or self.link.slots.fitting(need) is not None:
                return

    def no_slot(self) -> tuple[str, str]:
        """The reason why no slot was free in time, and a hint."""
        if reason := self.link.book.waits_for:
            return f"no slot is free: {reason}", ""
        text = f"no slot was free within {self.save_timeout_s:g} s"
        if self._segments:
            held = len(self._segments)
            text += f"; {held} {'slot holds a state' if held == 1 else 'slots hold states'} staged and not yet written"
            hint = "wait for the future of dcp.async_save, keep no state that stage returned, or raise slots_per_rank"
            return text, hint
        hint = "save less often, or raise slots_per_rank or save_timeout_s"
        return f"{text}; drains are slow, or slots are few", hint

    def _wait_slot(self, need: int, deadline: float) -> str:
        try:
            return self.link.wait_slot(need, deadline)
        except WaitTimeoutError:
            text, hint = self.no_slot()
            raise SaveFailedError(text, hint=hint) from None

    def while_daemons_end(
        self, once: Callable[[], Any], deadline: float, over: Callable[[], bool] = lambda: False
    ) -> Any:
        """The result of once, called again with the next daemon if one ends during the call, until over."""
        while True:
            try:
                self.link.ensure(deadline, hurried=True)
                return once()
            except ChannelLostError:
                if over() or time.monotonic() >= deadline:
                    raise

    # --- seal

    def seal(
        self, segment: Segment, handle: SaveRecord, plain: Plain, *, drain: bool, publication: Publication | None = None
    ) -> None:
        """Seals the segment and hands it over. Raises CkptdError if that fails."""

        def once() -> None:
            if self.link.outbox.holds(handle.save_id):
                return  # it was sealed: ensure has reported it to the new daemon
            self._settle(segment, segment.plan.exact_capacity(plain.nbytes), deadline)
            self.write_seal(segment.slot, segment.plan, plain, handle)
            self.link.slots.held.discard(segment.name)
            self.hand_over(segment.name, handle, drain=drain, publication=publication, deadline=deadline)

        deadline = self.until()
        with self.turn(deadline):
            try:
                self.while_daemons_end(once, deadline)
            except ChannelLostError:
                if not self.link.outbox.holds(handle.save_id):
                    self.release(segment)
                    raise
                self.link.outbox.handed_over()  # it is sealed; the next daemon learns of it
            except BaseException:
                self.release(segment)
                raise
            self.link.unsealed.discard(handle.save_id)
            self._segments.remove(segment)

    def write_seal(self, slot: SlotMap, plan: SegmentPlan, plain: Plain, handle: SaveRecord) -> None:
        """Writes the seal: it shows that the payloads in the slot are complete, and to which save they belong."""
        link = self.link
        seal_slot(slot, plan, plain, handle.save_id, job=link.job, group=link.group, integrity=self.integrity)

    def hand_over(
        self, slot: str, handle: SaveRecord, *, drain: bool, deadline: float, publication: Publication | None = None
    ) -> None:
        """Hands the sealed slot over to the daemon. Blocks until the daemon confirms it; raises CkptdError."""
        order = HandOver(
            seq=0,
            slot=slot,
            save=handle.save_id,
            drain=drain,
            publication=publication,
            late=self.stats.late[:MAX_LATE_CHARS],
            stall_s=handle.held_s,
            late_nbytes=handle.late_nbytes,
            late_s=handle.late_s,
        )
        self.link.outbox.hand_over(order, deadline=deadline)

    def _settle(self, segment: Segment, need: int, deadline: float) -> None:
        """Moves the segment, if necessary, to a sufficient slot that is granted to this rank."""
        link = self.link
        own = segment.attachment == link.attachments
        if own and segment.slot.capacity >= need:
            return
        if need > link.capacity or link.refusal is not None:
            self.ask_slots(segment.plan.capacity(need - segment.plan.exact_capacity(0)), deadline)
            own = False  # earlier grants are withdrawn
        if link.slots.granted.get(segment.name, 0) >= need:
            link.slots.take(segment.name)
        else:
            old, nbytes = segment.memory, segment.plan.nbytes
            link.slots.held.discard(segment.name)
            if own:
                link.slots.grant(segment.name, segment.slot.capacity)
            segment.name = self._wait_slot(need, deadline)
            segment.slot = link.slots.take(segment.name)
            segment.memory = segment.slot.bytes
            segment.slot.plan_id = ""  # it does not contain the fillers of its last plan any more
            segment.memory[:nbytes].copy_(old[:nbytes])
            link.slots.held.add(segment.name)
        segment.attachment = link.attachments

    # --- give up

    def release(self, segment: Segment) -> None:
        """Releases an unsealed segment's slot: now, or with the next save if another thread keeps the client.

        Idempotent. Never raises; blocks at most save_timeout_s. In a forked child the slot is its parent's.
        """
        if not self.owner.is_here:
            return
        segment.owner = _nobody
        with self.first(self.until()) as mine:
            if not mine or segment not in self._segments:
                return
            self._segments.remove(segment)
            slots = self.link.slots
            if segment.name in slots.held:
                slots.held.discard(segment.name)
                if segment.attachment == self.link.attachments and segment.slot.capacity >= self.link.capacity:
                    slots.grant(segment.name, segment.slot.capacity)

    def give_up(self, handle: SaveRecord, error: BaseException) -> None:
        """Reports that this rank does not take part in the save. Never raises; blocks at most save_timeout_s.

        Does nothing in a forked child: the save is its parent's.
        """
        if not self.owner.is_here:
            return
        self.link.unsealed.discard(handle.save_id)
        deadline = self.until()
        with self.first(deadline) as mine:
            if not self.closed and not handle.failed_here:
                self.note_failure(handle, error, deadline=deadline if mine else None)

    def note_failure(self, handle: SaveRecord, error: BaseException, *, deadline: float | None) -> None:
        """Records an operational fault in the handle; training continues. deadline None: the daemon gets no report."""
        if handle.known_milestone is not None:
            return  # the daemon has the segment already
        if isinstance(error, ChannelLostError) and self.was_delivered(handle):
            log.warning(
                "ckptd: step %d is complete in this node's memory; its daemon ended before it took it over", handle.step
            )
            self.link.outbox.handed_over()
            return  # the next daemon learns of it
        text = str(error) if isinstance(error, CkptdError) else f"{type(error).__name__}: {error}"
        handle.fail(End.FAILED, text)
        self.last_failure = str(error)
        self.stats.failed += 1
        log.warning("ckptd: step %d was not saved: %s", handle.step, text)
        if deadline is not None:
            self.link.outbox.skip(handle.save_id, f"{type(error).__name__}: {error}", deadline)

    def was_delivered(self, handle: SaveRecord) -> bool:
        """Whether its segment is sealed, and this daemon has it or the next one learns of it."""
        return self.link.outbox.holds(handle.save_id) or handle.known_milestone is not None


def _nobody() -> None:
    """The owner of a segment that was given up."""
