"""Which tensors of a save are copied while training goes on, and the one save whose copies run. A part of Client."""
# ruff: noqa: SLF001 - see above

import atexit
import logging
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import util
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import torch

from ckptd.protocol.errors import CkptdError, SaveFailedError, UsageError
from ckptd_client import _segments as segments
from ckptd_client._attached import Attached, addresses, storage_of
from ckptd_client._copy_engines import divided
from ckptd_client._late_copies import Cut, LateCopies, PageCopies, TensorCopies, cuts
from ckptd_client._late_memory import LateMemory, late_memory
from ckptd_client._overlap import Overlap
from ckptd_client._page_guard import NoProofError, Piece, Range, batches, copy, whole_units
from ckptd_client._plan import Plan, Values
from ckptd_client._segments import Plain, Segment
from ckptd_client._slot_writing import copy_all, pin_for, slot_views
from ckptd_client.handle import SaveHandle

if TYPE_CHECKING:
    from ckptd_client.client import Client

log = logging.getLogger("ckptd_client")
Verify = Literal["proof", "samples", "off"]
_OFF = "off: "
_cuda: Any = torch.cuda  # much of it has no types


class Overlapping:
    """One client's. Its methods are called by threads that train, never under the client's lock but where said."""

    def __init__(self, client: "Client") -> None:
        self._client = weakref.ref(client)
        self._attached: list[Attached] = []
        self._verify: Verify | None = None  # None: proof on the host, off on devices
        self._memory: LateMemory | None = None
        self._in_force = ""  # what proves late copies, and why nothing is late; empty before attach
        self._written: set[str] = set()  # others were seen to write these: copied before save returns, for ever
        self._objections: set[str] = set()
        self._running: Overlap | None = None
        self._found: _Found | None = None  # of the last save; None when what is known of writers has changed
        self._last: _Last | None = None  # the save that the next step comes after

    # --- optimizers

    def attach(self, optimizers: Sequence[Any], verify: Verify | None) -> None:
        """From now on what only their step() writes may be copied late. Raises UsageError for what is no optimizer."""
        if not optimizers:
            raise UsageError("attach was given no optimizer", hint="attach(optimizer)")
        if verify is not None and verify not in get_args(Verify):
            raise UsageError(f"verify={verify!r}", hint='verify="proof", "samples" or "off"')
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
        self._agree(verify)

    def _agree(self, verify: Verify | None) -> None:
        """What is in force from here on, for all that is attached; said when it changes."""
        self._verify, self._found = verify or self._verify, None
        told: str = self._verify or "proof"
        if told == "proof":
            try:
                self._memory = late_memory()
            except NoProofError as error:
                told = f"{_OFF}{error}"
        self._tell(told)

    def _tell(self, told: str) -> None:
        """Says what is in force, once."""
        if told == self._in_force:
            return
        self._in_force = told
        client = self._client()
        if client is not None:
            client._stats.late = told
        if told.startswith(_OFF):
            text = f"nothing of the host's memory is copied late, since nothing proves it ({told.removeprefix(_OFF)})"
            log.warning('ckptd: attach: %s; attach(optimizer, verify="samples") copies it late on trust', text)
        else:
            log.info("ckptd: attach: late copies are verified by: %s", told)

    def detach(self) -> None:
        """No optimizer is attached any more."""
        while self._attached:
            self._attached.pop().detach()
        self._forget_units()
        if not self.running:
            self._running = self._last = None

    def _forget_units(self) -> None:
        if self._memory is not None and self._found is not None:
            self._memory.forget(self._found.units)
        self._found = None

    def candidates(self, plan: Plan, values: Values) -> "Candidates":
        """Which tensors lie in an attached optimizer's memory and may be read late. Under the lock."""
        believed = [attached for attached in self._attached if self._believes(attached)]
        if not believed or self._verify == "off":
            return _NONE
        owned = [tensor for attached in believed for tensor in attached.tensors()]
        tensors, names = values.tensors, [box.name for box in plan.image.boxes]
        shared = [one for digest in values.digests for one in digest.tensors]  # a rank copies its rows of these only
        mine, read, theirs = addresses(tensors), addresses([tensor for _, tensor in shared]), set(addresses(owned))
        last = self._found
        if last is None or not last.holds(plan.plan_id, mine, read, theirs, tensors):
            found = self._divided(names, tensors, self._inside(tensors, mine, owned, theirs), mine)
            held = self._inside([tensor for _, tensor in shared], read, owned, theirs)
            there = self._divided([name for name, _ in shared], [tensor for _, tensor in shared], held, read)
            units = whole_units(span for _, span in [*found.spans, *there.spans])
            if last is not None and self._memory is not None:
                self._memory.forget(last.units, but=units)
            last = self._found = _Found(plan.plan_id, mine, read, theirs, found, units)
        armed: list[Range] = []
        if self._memory is not None and last.units:
            armed = self._memory.arm(last.units)
            why_not = self._memory.why_not(last.units)
            if self._verify in (None, "proof"):
                self._tell(f"{_OFF}{why_not}" if why_not else "proof")
        return last.candidates._replace(armed=armed)

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
        self, names: Sequence[str], tensors: Sequence[torch.Tensor], inside: Sequence[int], mine: Sequence[int]
    ) -> "Candidates":
        by_engine = {i for positions in divided(tensors).values() for i in positions}
        able = [i for i in inside if not tensors[i].is_inference() and names[i] not in self._written]
        whole: list[int] = []
        if self._verify is not None:
            trusted = self._verify == "samples"
            whole = [i for i in able if i in by_engine or (trusted and tensors[i].is_cpu)]
        spans: list[tuple[int, Range]] = []
        if self._verify in (None, "proof") and self._memory is not None:
            able = [i for i in able if i not in by_engine and tensors[i].is_cpu and _lies_straight(tensors[i])]
            spans = sorted(((i, Range(mine[i], mine[i] + tensors[i].nbytes)) for i in able), key=lambda one: one[1])
        return Candidates(whole, spans, [])

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
        """Copies what is early now, and begins with what is late. Under the lock; none may be running."""
        client = self._client()
        assert client is not None  # noqa: S101 - it called
        client._link.unsealed.add(handle.save_id)
        plain = Plain(values.leaves, values.objects, values.said)
        fate = _Fate(client, self, segment, handle, plain, drain)
        names = [box.name for box in plan.image.boxes]
        copies: list[LateCopies] = []
        try:
            views, tensors = slot_views(segment.slot, plan), values.tensors
            pin_for(segment.slot, tensors)  # before the thread copies: then no engine makes it wait
            inside, outside = cuts(found.spans, found.armed)
            late = sum(cut.nbytes for cut in inside) + sum(tensors[i].nbytes for i in found.whole)
            client._stats.last_late_nbytes = late
            for digest in values.digests:
                digest.take(found.armed)
            if found.armed:
                pieces = [(names[cut.position], _piece(views, tensors, cut)) for cut in inside]
                keep = [tensors[i].detach() for i in sorted({cut.position for cut in inside})]
                assert self._memory is not None  # noqa: S101 - it armed them
                copies.append(PageCopies(self._memory, found.armed, pieces, keep, values.digests))
            if found.whole:
                columns = ([column[i] for i in found.whole] for column in (views, tensors, values.counted))
                checked, turn = self._verify == "proof", handle.save_id.counter
                copies.append(TensorCopies([names[i] for i in found.whole], *columns, checked=checked, turn=turn))
            overlap = Overlap(copies, fate)
            segment.owner = weakref.ref(overlap)
            _copy_early(segment, views, tensors, found, inside, outside)
        except BaseException:
            self.let_go(found)
            client._link.unsealed.discard(handle.save_id)
            segments.release(client, segment)
            raise
        self._running, self._last = overlap, _Last(handle, deadline)  # first: once a thread copies, it alone ends it
        try:
            overlap.start()
        except BaseException as error:
            overlap.cancel(f"{type(error).__name__} while its copy began")
            overlap.let_go()
            if overlap.withdraw():
                self._running = self._last = None
                client._link.unsealed.discard(handle.save_id)
                segments.release(client, segment)
            raise

    def let_go(self, found: "Candidates") -> None:
        """Nothing of these is copied late after all."""
        if found.armed and self._memory is not None:
            self._memory.release(found.armed)

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
                self._running.let_go()

    def _let_write(self) -> None:
        last, self._last = self._last, None
        if self._running is None:
            return
        if last is None:
            if self.running:
                self._running.hold_back()  # this optimizer may queue its writes elsewhere than the first one did
            return
        began = time.perf_counter()
        self._running.before_step(last.deadline)
        waited = time.perf_counter() - began
        last.handle.stall_s += waited
        client = self._client()
        if client is not None:
            client._stats.stall_s += waited

    def settle(self, deadline: float, *, cancel: bool = False) -> None:
        """Blocks until no save's copies run; with cancel, one that still does at the deadline is given up."""
        running = self._running
        if running is None or running.settle(deadline):
            return
        if cancel:
            running.cancel("its copy was not done when the next save had waited save_timeout_s for it")
            running.let_go()

    def note_written(self, names: Sequence[str]) -> None:
        """Somebody else writes these: from now on they are copied before save returns."""
        self._written.update(names)
        if names:
            self._found = self._found and self._found._replace(plan="")


class Candidates(NamedTuple):
    """Of a plan's tensors. Positions are among those."""

    whole: list[int]  # late as they are: on devices, or on trust
    spans: list[tuple[int, Range]]  # of the host: late where their pages are armed, in order of addresses
    armed: list[Range]  # write-protected from here on, until they are let go

    @property
    def late(self) -> bool:
        """Whether any of it is."""
        return bool(self.whole or self.armed)


_NONE = Candidates([], [], [])


class _Found(NamedTuple):
    """Candidates, and what they followed from."""

    plan: str
    addresses: list[int]  # of the plan's tensors
    read: list[int]  # of those that replicas' digests are of
    owned: set[int]  # of the optimizers'
    candidates: Candidates
    units: list[Range]

    def holds(
        self, plan: str, mine: list[int], read: list[int], owned: set[int], tensors: Sequence[torch.Tensor]
    ) -> bool:
        """Whether all is as it was; another view of the same memory is not. A save without digests changes nothing."""
        if (self.plan, self.addresses, self.owned) != (plan, mine, owned) or read not in ([], self.read):
            return False
        return all(_lies_straight(tensors[i]) for i, _ in self.candidates.spans)


def _lies_straight(tensor: torch.Tensor) -> bool:
    """Whether its bytes lie as they are to be written, are there, and no device is known to write to them."""
    if _cuda.is_initialized() and tensor.is_pinned():
        return False
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg() and tensor.nbytes > 0


def _piece(views: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], cut: Cut) -> Piece:
    to, start = views[cut.position].data_ptr(), tensors[cut.position].data_ptr()
    return Piece(to + cut.offset, start + cut.offset, cut.nbytes)


def _copy_early(  # noqa: PLR0913, PLR0917 - one step of begin
    segment: Segment, views: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], found: Candidates,
    inside: Sequence[Cut], outside: Sequence[Cut],
) -> None:  # fmt: skip
    """Whole tensors, and of those that are late in part the rest. Blocks until all is there."""
    partly = {cut.position for cut in inside}
    late = partly.union(found.whole)
    early = [i for i in range(len(tensors)) if i not in late]
    copy_all(segment.slot, [views[i] for i in early], [tensors[i] for i in early])
    for batch in batches(_piece(views, tensors, cut) for cut in outside if cut.position in partly):
        copy(batch)


@dataclass(frozen=True, slots=True)
class _Last:
    """A save before which the next step waits."""

    handle: SaveHandle
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

    def deliver(self) -> None:
        """Seals it and hands it over."""
        try:
            segments.seal(self.client, self.segment, self.handle, self.plain, drain=self.drain)
        except Exception as error:  # noqa: BLE001 - whatever it is, training goes on
            segments.give_up(self.client, self.handle, error)

    def discard(self, reason: str, written: Sequence[str]) -> None:
        """Gives it up, and tells everybody."""
        names = sorted({*written})
        self.overlapping.note_written(names)
        error: CkptdError = SaveFailedError(reason)
        if names:
            what = reason.removeprefix("it ")
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            text = f"{names[0]!r}{more}: it {what}; such tensors are copied before save returns"
            error = SaveFailedError(text, hint="write to the state in optimizer.step() only, or before save")
        segments.release(self.client, self.segment)
        segments.give_up(self.client, self.handle, error)


def _at_exit(overlapping: "weakref.ref[Overlapping]") -> None:
    """The last save of a script that ends without close."""
    found = overlapping()
    client = found._client() if found is not None else None
    if found is not None and client is not None and found.running:
        found.settle(time.monotonic() + client._save_timeout_s)
