"""Which tensors of a save are copied while training goes on, and the one save whose copies run. A part of Client."""
# ruff: noqa: SLF001 - see above

import atexit
import logging
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import util
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ckptd.protocol.errors import CkptdError, SaveFailedError, UsageError
from ckptd_client import _segments as segments
from ckptd_client._attached import Attached, addresses, storage_of
from ckptd_client._copy_engines import divided, is_capturing
from ckptd_client._overlap import Overlap
from ckptd_client._plan import Plan, Values
from ckptd_client._proofs import Probe
from ckptd_client._segments import Plain, Segment
from ckptd_client._slot_writing import copy_all, pin_for, slot_views
from ckptd_client._slots import SlotMap
from ckptd_client.handle import SaveHandle

if TYPE_CHECKING:
    from ckptd_client.client import Client

log = logging.getLogger("ckptd_client")
_PROBES = 3  # saves in which a tensor was found untouched before it is copied late


class Overlapping:
    """One client's. Its methods are called by threads that train, never under the client's lock but where said."""

    def __init__(self, client: "Client") -> None:
        self._client = weakref.ref(client)
        self._attached: list[Attached] = []
        self._probed: dict[str, int] = {}  # names of tensors -> saves in which nobody else wrote them, below _PROBES
        self._trusted: set[str] = set()
        self._written: set[str] = set()  # others were seen to write these: copied before save returns, for ever
        self._objections: set[str] = set()
        self._running: Overlap | None = None
        self._found: _Found | None = None  # of the last save; None when what is trusted has changed
        self._last: _Last | None = None  # the save that the next step comes after

    # --- optimizers

    def attach(self, optimizers: Sequence[Any]) -> None:
        """From now on what only their step() writes may be copied late. Raises UsageError for what is no optimizer."""
        if not optimizers:
            raise UsageError("attach was given no optimizer", hint="attach(optimizer)")
        if not self._attached:
            atexit.register(_at_exit, weakref.ref(self))
            # A process of multiprocessing, such as mp.spawn's, ends without atexit; others do this after zmq's end.
            util.Finalize(None, _at_exit, (weakref.ref(self),), exitpriority=0)
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

    def detach(self) -> None:
        """No optimizer is attached any more."""
        while self._attached:
            self._attached.pop().detach()

    def candidates(self, plan: Plan, tensors: Sequence[torch.Tensor]) -> "Candidates":
        """Which tensors lie in an attached optimizer's memory and may be copied late. Under the lock."""
        believed = [attached for attached in self._attached if self._believes(attached)]
        if not believed:
            return _NONE
        owned = [tensor for attached in believed for tensor in attached.tensors()]
        mine, theirs = addresses(tensors), set(addresses(owned))
        last = self._found
        if last is None or (last.plan, last.addresses, last.owned) != (plan.plan_id, mine, theirs):
            inside = self._inside(tensors, mine, owned, theirs)
            last = self._found = _Found(plan.plan_id, mine, theirs, self._divided(plan, tensors, inside, mine))
        return last.candidates

    @staticmethod
    def _inside(
        tensors: Sequence[torch.Tensor], mine: Sequence[int], owned: Sequence[torch.Tensor], theirs: set[int]
    ) -> list[int]:
        """Positions of tensors that begin where an owned one does, or elsewhere in its memory."""
        storages = {storage_of(tensor) for tensor in owned} - {0}
        return [
            i for i, address in enumerate(mine) if address and (address in theirs or storage_of(tensors[i]) in storages)
        ]

    def _divided(
        self, plan: Plan, tensors: Sequence[torch.Tensor], inside: Sequence[int], mine: Sequence[int]
    ) -> "Candidates":
        reached = {i for positions in divided(tensors).values() for i in positions}  # by a copy engine
        can = [i for i in inside if not tensors[i].is_inference() and (tensors[i].is_cpu or i in reached)]
        names = {i: plan.image.boxes[i].name for i in can}
        late = [i for i, name in names.items() if name in self._trusted]
        probed = [i for i, n in names.items() if n not in self._trusted and n not in self._written]
        return Candidates(late, probed, mine)

    def _believes(self, attached: Attached) -> bool:
        objection = attached.objection()
        if objection and objection not in self._objections:
            self._objections.add(objection)
            log.warning("ckptd: what an attached optimizer writes is copied before save returns: %s", objection)
        return not objection

    # --- saves

    def begin(  # noqa: PLR0913 - keyword-only
        self, segment: Segment, plan: Plan, values: Values, found: "Candidates", *, handle: SaveHandle, drain: bool,
        deadline: float,
    ) -> None:  # fmt: skip
        """Copies the early tensors now, and begins with the late ones. Under the lock; none may be running."""
        client, late = self._client(), found.late
        assert client is not None  # noqa: S101 - it called
        client._link.unsealed.add(handle.save_id)
        try:
            views, tensors = slot_views(segment.slot, plan), values.tensors
            pin_for(segment.slot, tensors)  # before the thread copies: then no engine makes it wait
            plain = Plain(values.leaves, values.objects, values.said)
            overlap = Overlap(
                [views[i] for i in late],
                [tensors[i] for i in late],
                [values.counted[i] for i in late],
                _Fate(client, self, segment, handle, plain, drain, plan, late),
                addresses=[found.addresses[i] for i in late],
                turn=handle.save_id.counter,
            )
            segment.owner = weakref.ref(overlap)
            set_late = set(late)
            early = [i for i in range(len(tensors)) if i not in set_late]
            copy_all(segment.slot, [views[i] for i in early], [tensors[i] for i in early])
            overlap.start()
        except BaseException:
            client._link.unsealed.discard(handle.save_id)
            segments.release(client, segment)
            raise
        self._running = overlap
        self.watch(segment.slot, plan, values, found, handle=handle, deadline=deadline)

    def watch(  # noqa: PLR0913 - keyword-only
        self, slot: SlotMap, plan: Plan, values: Values, found: "Candidates", *, handle: SaveHandle, deadline: float
    ) -> None:
        """What was copied at once, and is still to be trusted, is looked at before the optimizer writes."""
        views = slot_views(slot, plan)
        names = [plan.image.boxes[i].name for i in found.probed]
        columns = ([column[i] for i in found.probed] for column in (views, values.tensors, values.counted))
        probe = Probe(names, *columns)
        self._last = _Last(handle, probe, deadline)

    @property
    def running(self) -> bool:
        """Whether a save's copies run, or it is still to be handed over."""
        return self._running is not None and not self._running.over

    def before_step(self) -> None:
        """An attached optimizer is about to write. Blocks until it may: at most save_timeout_s after save began.

        Never raises: whatever goes wrong here costs the save, and not the step.
        """
        try:
            self._let_write()
        except Exception as error:  # noqa: BLE001 - see above
            text = f"{type(error).__name__}: {error}"
            log.warning("ckptd: before the optimizer's step: %s", text)
            if self._running is not None:
                self._running.cancel(text)

    def _let_write(self) -> None:
        last, self._last = self._last, None
        if last is None:
            if self.running and self._running is not None:
                self._running.hold_back()  # this optimizer may queue its writes elsewhere than the first one did
            return
        began = time.perf_counter()
        if self._running is not None:
            self._running.before_step(last.deadline)
        if not is_capturing():
            self._weigh(last.probe, last.deadline)
        waited = time.perf_counter() - began
        last.handle.stall_s += waited
        client = self._client()
        if client is not None:
            client._stats.stall_s += waited

    def _weigh(self, probe: Probe, deadline: float) -> None:
        written = probe.written(deadline)
        if written is None:
            return
        if written:
            self.note_written(written)
            log.warning("ckptd: %s", _told(written, "is written between save and the optimizer's step"))
            return  # what else was touched, and put back, nobody knows
        for name in probe.names:
            self._probed[name] = self._probed.get(name, 0) + 1
            if self._probed[name] >= _PROBES:
                del self._probed[name]
                self._trusted.add(name)
                self._found = None

    def settle(self, deadline: float, *, cancel: bool = False) -> None:
        """Blocks until no save's copies run; with cancel, one that still does at the deadline is given up."""
        running = self._running
        if running is None or running.settle(deadline):
            return
        if cancel:
            running.cancel("its copy was not done when the next save had waited save_timeout_s for it")

    def note_written(self, names: Sequence[str]) -> None:
        """Somebody else writes these: from now on they are copied before save returns."""
        self._written.update(names)
        self._trusted.difference_update(names)
        self._found = None


class Candidates(NamedTuple):
    """Positions among a plan's tensors."""

    late: list[int]  # copied while training goes on
    probed: list[int]  # copied at once, and looked at before the optimizer writes
    addresses: Sequence[int]  # of all of the plan's tensors


_NONE = Candidates([], [], [])


class _Found(NamedTuple):
    """Candidates, and what they followed from."""

    plan: str
    addresses: list[int]  # of the plan's tensors
    owned: set[int]  # of the optimizers'
    candidates: Candidates


def _told(names: Sequence[str], what: str) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]!r}{more}: it {what}; such tensors are copied before save returns"


@dataclass(frozen=True, slots=True)
class _Last:
    """A save and what the next step has to do with it."""

    handle: SaveHandle
    probe: Probe
    deadline: float


@dataclass(frozen=True, slots=True)
class _Fate:
    """What becomes of one save."""

    client: "Client"
    overlapping: Overlapping
    segment: Segment
    handle: SaveHandle
    plain: Plain
    drain: bool
    plan: Plan
    late: list[int]  # positions among the plan's tensors

    def deliver(self) -> None:
        """Seals it and hands it over."""
        try:
            segments.seal(self.client, self.segment, self.handle, self.plain, drain=self.drain)
        except Exception as error:  # noqa: BLE001 - whatever it is, training goes on
            segments.give_up(self.client, self.handle, error)

    def discard(self, reason: str, written: Sequence[int]) -> None:
        """Gives it up, and tells everybody."""
        names = sorted({self.plan.image.boxes[self.late[i]].name for i in written})
        self.overlapping.note_written(names)
        error: CkptdError = SaveFailedError(reason)
        if names:
            what = reason.removeprefix("it ")
            error = SaveFailedError(
                _told(names, what), hint="write to the state in optimizer.step() only, or before save"
            )
        segments.release(self.client, self.segment)
        segments.give_up(self.client, self.handle, error)


def _at_exit(overlapping: "weakref.ref[Overlapping]") -> None:
    """The last save of a script that ends without close."""
    found = overlapping()
    client = found._client() if found is not None else None
    if found is not None and client is not None and found.running:
        found.settle(time.monotonic() + client._save_timeout_s)
