"""How a segment gets from a state into shared memory and to the daemon: open, fill, seal, or give up.

``save`` of a state and of files does all in one call; torch.distributed.checkpoint and copies that run while training
goes on fill a slot now, and seal it later. Between the two a segment holds its slot. It survives a daemon that ends
meanwhile: the next one grants slots anew, and the segment goes back into its own, or is copied into another.
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
from ckptd_client._image.segment_plan import SegmentPlan
from ckptd_client._local.rank import Group
from ckptd_client._local.slots import SlotMap
from ckptd_client._local.why_late import Cause, why_late
from ckptd_client._save.numbers import Numbers
from ckptd_client._save.plans import Plans
from ckptd_client._save.segment import Plain, Segment
from ckptd_client._save.slot_writer import PlainValues, fill_slot, seal_slot
from ckptd_client._save.stats import Stats
from ckptd_client.handle import SaveHandle

log = logging.getLogger("ckptd_client")
_AT_ONCE_S = 0.05
_REASON_S = 1.0  # beyond the time of a wait that was in vain


class Staging:
    """One client's saves on their way. Holds its link and the lock around it, its plans, and segments to be sealed.

    Methods may be called from any thread; in a forked child all raise UsageError, but those that give something back.
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
        self.told = ""  # the last failure that the user has heard of; an error would keep what its traceback holds
        self.before_wait: Callable[[float], object] = float  # called with a deadline by who waits for news
        self._segments: list[Segment] = []
        this = weakref.ref(self)  # a client that is dropped without close goes at once
        link.book.outlook.why_late = lambda save, wanted: one._why_late(save, wanted) if (one := this()) else Cause()  # noqa: SLF001

    def __reduce__(self) -> NoReturn:
        text = f"a client is of the process that connected, {self.owner.pid}, and can be neither pickled nor copied"
        raise UsageError(text, hint="connect there, or keep it out of what is sent to other processes")

    # --- what others ask

    @property
    def group(self) -> Group:
        """This rank's place in the job."""
        return self.link.group

    @property
    def job(self) -> JobKey:
        """Store and name of the job."""
        return self.link.job

    @property
    def integrity(self) -> Integrity:
        """How everything that the client saves and loads is proved."""
        return self.link.settings.integrity

    @property
    def is_own(self) -> Callable[[str], bool]:
        """Whether a name is of what each rank has for itself, as connect was told."""
        return self.link.settings.named.is_own

    def check_open(self) -> None:
        """Raises UsageError in a forked child, and when the client is closed."""
        self.owner.check()
        if self.closed:
            raise UsageError("this client is closed", hint="connect again")

    def until(self) -> float:
        """Until when a save that begins now may hold up its thread."""
        return time.monotonic() + self.save_timeout_s

    @contextlib.contextmanager
    def turn(self, deadline: float) -> Iterator[None]:
        """The client's lock, ahead of threads that wait for news. Raises WaitTimeoutError."""
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
        """What load could restore, the newest first, as the daemon that coordinates the job says. Blocks as ask."""
        answer = self.ask(lambda seq: AskSteps(seq=seq))
        assert isinstance(answer, Steps)  # noqa: S101 - the reply to AskSteps
        return answer.checkpoints

    def has(self, save: SaveId) -> bool:
        """Whether this very save can be restored. Another one may have its step's number. Blocks as ask."""
        name = save.incarnation, save.counter, save.step
        runs = [found.run for found in self.checkpoints() if (found.incarnation, found.counter, found.step) == name]
        return any(run in {"", save.run.hex()} for run in runs)  # empty: of a daemon that tells no runs

    def _why_late(self, save: SaveId, wanted: Milestone) -> Cause:
        """Asks the daemon, which gets a second to answer: who waited in vain is to be notified of the reason."""
        with contextlib.suppress(CkptdError):
            if self.link.is_lost:  # to start one would cost the next save its patience
                return Cause()
            answer = self.ask(lambda seq: AskStatus(seq=seq), _REASON_S)
            assert isinstance(answer, StatusReply)  # noqa: S101 - the reply to AskStatus
            return why_late(answer.status, self.link.job, save, wanted)
        return Cause()

    def pump(self, seconds: float, patience_s: float | None = None) -> None:
        """News for the handles; brings a lost daemon back while somebody waits."""
        if seconds > 0:
            self.before_wait(time.monotonic() + seconds)
        if self.closed and seconds > 0:
            raise SaveFailedError(
                "the client was closed and hears no more of its saves",
                hint="wait before close; what was staged becomes durable all the same",
            )
        with contextlib.suppress(PreemptedError), self.last(time.monotonic() + seconds) as mine:
            if self.closed or not mine:  # who has the lock hears the news for all
                return
            if seconds > 0:
                self.link.ensure(self.link.patient_until(patience_s))
            self.link.pump(time.monotonic() + min(seconds, _AT_ONCE_S))

    # --- open

    def open(self, save: SaveId, *, unsealed: bool = True) -> SaveHandle:
        """The handle of a save that begins: it is to be sealed or given up. unsealed: by a later call, which counts it.

        Raises UsageError as Numbers.begin.
        """
        handle = SaveHandle(save, self.pump)
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

        Raises CkptdError when there is none in time.
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
        """Asks for slots when those asked for before are too small, or could not be had. How many bytes it needs."""
        link, need = self.link, plan.exact_capacity(plain_nbytes)
        if need > link.capacity or link.refusal is not None:
            self.ask_slots(plan.capacity(plain_nbytes), deadline)
        return need

    def ask_slots(self, capacity: int, deadline: float) -> None:
        """Asks for slots of so many bytes, unless it has such."""
        link = self.link
        if capacity > link.capacity or link.refusal is not None:
            refused = link.refusal is not None  # then what was asked for is no measure
            link.ask_slots(capacity if refused else max(capacity, link.capacity), deadline)

    def hold(self, plan: SegmentPlan, name: str, *, owner: Any) -> Segment:
        """Takes a granted slot, to be filled by the caller. Under the client's lock."""
        slots = self.link.slots
        slot = slots.take(name)
        slots.held.add(name)
        segment = Segment(plan, name, slot, slot.bytes, self.link.attachments, weakref.ref(owner))
        self._segments.append(segment)
        return segment

    def holder(self, address: int) -> Segment | None:
        """The segment, filled and still to be sealed, in whose slot the address lies."""
        with self.first(self.until()):
            return next((segment for segment in self._segments if segment.holds(address)), None)

    def free_orphans(self, need: int) -> None:
        """Frees the slots whose owners are gone. need: when no slot of so many bytes is free, it looks twice."""
        if self._segments and self.link.slots.fitting(need) is None:
            gc.collect()  # an error's traceback may hold a state in a circle
        for left in [segment for segment in self._segments if segment.owner() is None]:
            self.release(left)

    def no_slot(self) -> tuple[str, str]:
        """Why no slot was free in time, and what to do."""
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
        """What once returns, begun anew with the next daemon when one ends in the middle of it, until it is over."""
        while True:
            try:
                self.link.ensure(deadline, hurried=True)
                return once()
            except ChannelLostError:
                if over() or time.monotonic() >= deadline:
                    raise

    # --- seal

    def seal(
        self, segment: Segment, handle: SaveHandle, plain: Plain, *, drain: bool, publication: Publication | None = None
    ) -> None:
        """Seals the segment and hands it over. Raises CkptdError when that fails."""

        def once() -> None:
            if self.link.holds(handle.save_id):
                return  # it was sealed: a new daemon has heard of it by now
            self._settle(segment, segment.plan.exact_capacity(plain.nbytes), deadline)
            self.write_seal(segment.slot, segment.plan, plain, handle)
            self.link.slots.held.discard(segment.name)
            self.hand_over(segment.name, handle, drain=drain, publication=publication, deadline=deadline)

        deadline = self.until()
        with self.turn(deadline):
            try:
                self.while_daemons_end(once, deadline)
            except ChannelLostError:
                if not self.link.holds(handle.save_id):
                    self.release(segment)
                    raise
                self.link.handed_over()  # it is sealed, and the next daemon is told
            except BaseException:
                self.release(segment)
                raise
            self.link.unsealed.discard(handle.save_id)
            self._segments.remove(segment)

    def write_seal(self, slot: SlotMap, plan: SegmentPlan, plain: PlainValues, handle: SaveHandle) -> None:
        """What says that the payloads in the slot are whole, and whose they are."""
        link = self.link
        seal_slot(slot, plan, plain, handle.save_id, job=link.job, group=link.group, integrity=self.integrity)

    def hand_over(
        self, slot: str, handle: SaveHandle, *, drain: bool, deadline: float, publication: Publication | None = None
    ) -> None:
        """The daemon has the sealed slot from here on. Blocks until it says so; raises CkptdError."""
        late = self.stats.late[:MAX_LATE_CHARS]
        order = HandOver(seq=0, slot=slot, save=handle.save_id, drain=drain, publication=publication, late=late)
        self.link.hand_over(order, deadline=deadline)

    def _settle(self, segment: Segment, need: int, deadline: float) -> None:
        """Makes sure that the segment lies in a slot that is this rank's to seal, and large enough."""
        link = self.link
        own = segment.attachment == link.attachments
        if own and segment.slot.capacity >= need:
            return
        if need > link.capacity or link.refusal is not None:
            self.ask_slots(segment.plan.capacity(need - segment.plan.exact_capacity(0)), deadline)
            own = False  # what was granted before is withdrawn
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
            segment.slot.plan_id = ""  # its fillers are not those of the plan it had
            segment.memory[:nbytes].copy_(old[:nbytes])
            link.slots.held.add(segment.name)
        segment.attachment = link.attachments

    # --- give up

    def release(self, segment: Segment) -> None:
        """Gives an unsealed segment's slot back: now, or with the next save if another thread keeps the client.

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

    def give_up(self, handle: SaveHandle, error: BaseException) -> None:
        """Tells everybody that this rank does not take part in the save. Never raises; blocks at most save_timeout_s.

        In a forked child nobody is told: the save is its parent's.
        """
        if not self.owner.is_here:
            return
        self.link.unsealed.discard(handle.save_id)
        deadline = self.until()
        with self.first(deadline) as mine:
            if not self.closed and not handle.failed_here:
                self.note_failure(handle, error, deadline=deadline if mine else None)

    def note_failure(self, handle: SaveHandle, error: BaseException, *, deadline: float | None) -> None:
        """An operational fault: training goes on, the handle says why. deadline None: the daemon cannot be told."""
        if handle.known_milestone is not None:
            return  # it was all but over: the daemon has the segment
        if isinstance(error, ChannelLostError) and self.was_delivered(handle):
            log.warning(
                "ckptd: step %d is complete in this node's memory; its daemon ended before it took it over", handle.step
            )
            self.link.handed_over()
            return  # the next daemon is told
        text = str(error) if isinstance(error, CkptdError) else f"{type(error).__name__}: {error}"
        handle.fail(End.FAILED, text)
        self.told = str(error)
        self.stats.failed += 1
        log.warning("ckptd: step %d was not saved: %s", handle.step, text)
        if deadline is not None:
            self.link.skip(handle.save_id, f"{type(error).__name__}: {error}", deadline)

    def was_delivered(self, handle: SaveHandle) -> bool:
        """Whether its segment is sealed, and the daemon has it or the next one will be told."""
        return self.link.holds(handle.save_id) or handle.known_milestone is not None


def _nobody() -> None:
    """The owner of a segment that is given up."""
