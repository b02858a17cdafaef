"""Copies of one save that run while training goes on, in a thread of their own, and the proof that they are exact.

What is copied late must not be written before it is: who writes asks the Overlap first (``before_step``). That nobody
else did is proved before the save counts: by torch's own counts of writes, and by samples for writes that torch does
not count (through .data, numpy, fused kernels). A tensor is only copied late after a Probe of some saves has held.
"""

import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from ckptd_client._attached import addresses

_GROUP_NBYTES = 64 << 20  # copied in one call, without the GIL; what follows may be broken off
_SAMPLED = 64  # tensors of a save whose samples are taken
_SAMPLE_ELEMENTS = 16


class Fate(Protocol):
    """What becomes of the save. Called once, from the overlap's thread."""

    def deliver(self) -> None:
        """Everything is copied."""

    def discard(self, reason: str, written: Sequence[int]) -> None:
        """It is not what was saved, or came too late. written: positions that somebody wrote to."""


class Overlap:
    """Pairs of (view in a slot, tensor) to be copied. Holds the tensors until it is over.

    counted: for each tensor the one whose count of writes tells of it; of a DTensor's part that is the DTensor. turn: a
    count of saves, by which samples differ from save to save.
    """

    def __init__(
        self,
        views: Sequence[torch.Tensor],
        tensors: Sequence[torch.Tensor],
        counted: Sequence[torch.Tensor],
        fate: Fate,
        *,
        turn: int,
    ) -> None:
        self._views, self._tensors, self._counted, self._fate = list(views), list(tensors), list(counted), fate
        self._versions = _versions(counted, tensors)
        self._addresses = addresses(tensors)  # .data = x gives a tensor other memory, and counts nothing
        self._samples = _Samples(tensors, turn)
        self._streams = _after_what_is_queued(tensors)
        self._reason = ""
        self._copied = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ckptd-overlap", daemon=True)

    def start(self) -> None:
        """Begins to copy."""
        self._thread.start()

    @property
    def over(self) -> bool:
        """Whether the save was delivered or discarded."""
        return not self._thread.is_alive()

    def before_step(self, deadline: float) -> None:
        """Blocks until the tensors may be written; at the deadline they may all the same, and the save is given up."""
        if not self._copied.wait(max(0.0, deadline - time.monotonic())):
            self.cancel("its copy was not done when the optimizer had waited save_timeout_s for it")

    def settle(self, deadline: float) -> bool:
        """Blocks until it is over; False when it is not by the deadline."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return self.over

    def cancel(self, reason: str) -> None:
        """Discards the save, unless it is delivered already."""
        self._reason = self._reason or reason

    # --- the thread

    def _run(self) -> None:
        written: list[int] = []
        try:
            self._copy()
            written = [] if self._reason else self._changed()
        except Exception as error:  # noqa: BLE001 - whatever it is, training goes on
            self._reason = self._reason or f"{type(error).__name__}: {error}"
        if written:
            self._reason = self._reason or "it was written between save and the optimizer's step"
        self._copied.set()
        try:
            if self._reason:
                self._fate.discard(self._reason, written)
            else:
                self._fate.deliver()
        finally:
            self._views, self._tensors, self._counted, self._samples = [], [], [], _Samples([], 0)

    def _copy(self) -> None:
        for device, event in self._streams.items():
            torch.cuda.current_stream(device).wait_event(event)
        start = nbytes = 0
        with torch.no_grad():
            for i, view in enumerate(self._views):
                nbytes += view.nbytes
                if nbytes >= _GROUP_NBYTES or i + 1 == len(self._views):
                    torch._foreach_copy_(self._views[start : i + 1], self._tensors[start : i + 1])
                    start, nbytes = i + 1, 0
                if self._reason:
                    return

    def _changed(self) -> list[int]:
        """Positions of tensors that were written, or given other memory, since the save began."""
        versions = _versions(self._counted, self._tensors)
        now = zip(versions, self._versions, addresses(self._tensors), self._addresses, strict=True)
        changed = [i for i, (v, v_before, a, a_before) in enumerate(now) if v != v_before or a != a_before]
        return changed or self._samples.changed()


class Probe:
    """Tensors that were copied before save returned, and would not have been if it had been known that they may.

    Between save and the optimizer's step nobody may write to them: torch's counts tell, and the copies in views.
    """

    def __init__(
        self,
        names: Sequence[str],
        views: Sequence[torch.Tensor],
        tensors: Sequence[torch.Tensor],
        counted: Sequence[torch.Tensor],
    ) -> None:
        self.names, self._views = list(names), list(views)
        self._tensors, self._counted = list(tensors), list(counted)
        self._versions = _versions(counted, tensors)

    def written(self, deadline: float) -> list[str] | None:
        """Names of those that were; None when there was no time to look at all. To be asked before the step."""
        counts = zip(self.names, self._versions, _versions(self._counted, self._tensors), strict=True)
        found = {name for name, before, now in counts if before != now}
        for name, view, tensor in zip(self.names, self._views, self._tensors, strict=True):
            if time.monotonic() >= deadline:
                return sorted(found) or None
            if not same_bits(view, tensor):
                found.add(name)
        return sorted(found)


def _versions(counted: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> list[Any]:
    """Counts of writes. In-place operations on a DTensor count on it, and not on the part that lies here."""
    return [
        outer._version if outer is inner else (outer._version, inner._version)  # noqa: SLF001 - it has no other name
        for outer, inner in zip(counted, tensors, strict=True)
    ]


def _after_what_is_queued(tensors: Sequence[torch.Tensor]) -> dict[torch.device, torch.cuda.Event]:
    """Events after all that this thread has queued on each device: another thread has other streams."""
    devices = {tensor.device for tensor in tensors if tensor.is_cuda}
    return {device: torch.cuda.current_stream(device).record_event() for device in devices}


class _Samples:
    """A few elements of some tensors as they are now."""

    def __init__(self, tensors: Sequence[torch.Tensor], turn: int) -> None:
        count = len(tensors)
        picked = range(count) if count <= _SAMPLED else [(turn * _SAMPLED + k) % count for k in range(_SAMPLED)]
        self._taken: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        for i in picked:
            tensor = tensors[i]
            if tensor.is_cpu and tensor.is_contiguous() and tensor.numel() and not tensor.is_conj():
                flat = tensor.detach().view(-1)
                first = turn * _SAMPLE_ELEMENTS % len(flat)
                part = flat[first : first + _SAMPLE_ELEMENTS]
                self._taken.append((i, part, part.clone()))

    def changed(self) -> list[int]:
        """Positions of tensors whose samples differ from what they were."""
        return [i for i, now, before in self._taken if not same_bits(now, before)]


def same_bits(left: Any, right: Any) -> bool:
    """Whether two tensors of one shape and dtype have the same bytes: NaNs too."""
    return torch.equal(_bytes(left), _bytes(right))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8)
