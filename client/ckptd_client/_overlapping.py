"""Which tensors of a save are copied while training goes on, and the one save whose copies run. A part of Client."""
# ruff: noqa: SLF001 - see above

import atexit
import logging
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ckptd.protocol.errors import CkptdError, SaveFailedError, UsageError
from ckptd_client import _segments as segments
from ckptd_client._attached import Attached, storage_of
from ckptd_client._overlap import Overlap
from ckptd_client._plan import Plan, Values
from ckptd_client._segments import Plain, Segment
from ckptd_client._slot_writing import slot_views
from ckptd_client.handle import SaveHandle

if TYPE_CHECKING:
    from ckptd_client.client import Client

log = logging.getLogger("ckptd_client")
_COMPARED = 3  # saves whose every byte is compared before they count


class Overlapping:
    """One client's. Its methods are called by threads that train, never under the client's lock but where said."""

    def __init__(self, client: "Client") -> None:
        self._client = weakref.ref(client)
        self._attached: list[Attached] = []
        self._written: set[str] = set()  # names of tensors that others were seen to write: copied before save returns
        self._objections: set[str] = set()
        self._overlaps = 0
        self._running: _Running | None = None

    # --- optimizers

    def attach(self, optimizers: Sequence[Any]) -> None:
        """From now on what only their step() writes may be copied late. Raises UsageError for what is no optimizer."""
        if not optimizers:
            raise UsageError("attach was given no optimizer", hint="attach(optimizer)")
        if not self._attached:
            atexit.register(_at_exit, weakref.ref(self))
        known = [attached.optimizer for attached in self._attached]
        for optimizer in optimizers:
            if not any(optimizer is one for one in known):
                self._attached.append(Attached(optimizer, self.before_step))

    def detach(self) -> None:
        """No optimizer is attached any more."""
        while self._attached:
            self._attached.pop().detach()

    def late(self, plan: Plan, tensors: Sequence[torch.Tensor]) -> list[int]:
        """Positions of tensors that may be copied late: their memory is an attached optimizer's. Under the lock."""
        trusted = [attached for attached in self._attached if self._trusts(attached)]
        owned = {storage_of(tensor) for attached in trusted for tensor in attached.tensors()}
        owned.discard(0)
        if not owned:
            return []
        found = [i for i, tensor in enumerate(tensors) if storage_of(tensor) in owned and not tensor.is_inference()]
        if self._written:
            found = [i for i in found if plan.image.boxes[i].name not in self._written]
        return found

    def _trusts(self, attached: Attached) -> bool:
        objection = attached.objection()
        if objection and objection not in self._objections:
            self._objections.add(objection)
            log.warning("ckptd: what an attached optimizer writes is copied before save returns: %s", objection)
        return not objection

    # --- the save that runs

    def begin(  # noqa: PLR0913 - keyword-only
        self, segment: Segment, plan: Plan, values: Values, late: Sequence[int], *, handle: SaveHandle, drain: bool,
        deadline: float,
    ) -> None:  # fmt: skip
        """Copies the early tensors now, and begins with the late ones. Under the lock; none may be running."""
        client = self._client()
        assert client is not None  # noqa: S101 - it called
        client._link.unsealed.add(handle.save_id)
        views, tensors = slot_views(segment.slot, plan), values.tensors
        set_late = set(late)
        early = [i for i in range(len(tensors)) if i not in set_late]
        fate = _Fate(
            client, self, segment, handle, Plain(values.leaves, values.objects, values.shares), drain,
            [plan.image.boxes[i].name for i in late],
        )  # fmt: skip
        overlap = Overlap(
            [views[i] for i in late],
            [tensors[i] for i in late],
            fate,
            compare=self._overlaps < _COMPARED,
            turn=handle.save_id.counter,
        )
        try:
            if early:
                with torch.no_grad():
                    torch._foreach_copy_([views[i] for i in early], [tensors[i] for i in early])
        except BaseException:
            client._link.unsealed.discard(handle.save_id)
            segments.release(client, segment)
            raise
        self._overlaps += 1
        segment.owner = weakref.ref(overlap)
        self._running = _Running(overlap, handle, deadline)
        overlap.start()

    @property
    def running(self) -> bool:
        """Whether a save's copies run, or it is still to be handed over."""
        return self._running is not None and not self._running.overlap.over

    def before_step(self) -> None:
        """An attached optimizer is about to write. Blocks until it may: at most save_timeout_s after save began."""
        running = self._running
        if running is None or running.overlap.over:
            return
        began = time.perf_counter()
        running.overlap.before_step(running.deadline)
        running.handle.stall_s += time.perf_counter() - began

    def settle(self, deadline: float, *, cancel: bool = False) -> None:
        """Blocks until no save's copies run; with cancel, one that still does at the deadline is given up."""
        running = self._running
        if running is None or running.overlap.over or running.overlap.settle(deadline):
            return
        if cancel:
            running.overlap.cancel("its copy was not done when the next save had waited save_timeout_s for it")

    def note_written(self, names: Sequence[str]) -> None:
        """Somebody else writes these: from now on they are copied before save returns."""
        self._written.update(names)


@dataclass(frozen=True, slots=True)
class _Running:
    overlap: Overlap
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
    names: list[str]  # of the tensors that are copied late

    def deliver(self) -> None:
        """Seals it and hands it over."""
        try:
            segments.seal(self.client, self.segment, self.handle, self.plain, drain=self.drain)
        except Exception as error:  # noqa: BLE001 - whatever it is, training goes on
            segments.give_up(self.client, self.handle, error)

    def discard(self, reason: str, written: Sequence[int]) -> None:
        """Gives it up, and tells everybody."""
        names = sorted({self.names[i] for i in written})
        self.overlapping.note_written(names)
        error: CkptdError = SaveFailedError(reason)
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            text = f"{names[0]!r}{more}: {reason}; from now on such tensors are copied before save returns"
            error = SaveFailedError(text, hint="write to the state in optimizer.step() only, or before save")
        segments.release(self.client, self.segment)
        segments.give_up(self.client, self.handle, error)


def _at_exit(overlapping: "weakref.ref[Overlapping]") -> None:
    """The last save of a script that ends without close."""
    found = overlapping()
    client = found._client() if found is not None else None
    if found is not None and client is not None and found.running:
        found.settle(time.monotonic() + client._save_timeout_s)
