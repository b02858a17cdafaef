"""Copy engines of GPUs: they copy bytes between a device's memory and the host's memory while the device computes.

All CUDA calls of the client are here. Each device has one engine, created once, with a stream of its own. Host memory
should be registered with the engine (pinned): copies into other memory block the caller's thread.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final

import torch

from ckptd.shared.base.errors import UsageError

STAGING_NBYTES: Final = 32 << 20  # of device memory, for strided tensors
_PORTABLE: Final = 1  # cudaHostRegisterPortable: pinned for every device of the process
_DEVICE = attrgetter("device")
_cuda: Any = torch.cuda  # much of it is untyped


class PinningError(Exception):
    """Memory could not be registered."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A point in a device's queue of work."""

    device: torch.device
    event: Any  # torch.cuda.Event

    def wait(self) -> None:
        """Blocks the thread, without the GIL, until the device reaches the point. Waits for no other work of it."""
        self.event.synchronize()

    def block_stream(self) -> None:
        """Makes later work of this thread's current stream wait for the point; the thread does not wait."""
        _cuda.current_stream(self.device).wait_event(self.event)


class CopyEngine:
    """The copy engine of one device. Any thread may call its methods.

    Its stream has the lowest priority: training goes first.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = _cuda.Stream(device=device, priority=0)
        self._staging: torch.Tensor | None = None
        self._lock = threading.Lock()  # the stream's order protects the staging memory

    def register(self, address: int, nbytes: int) -> Callable[[], None]:
        """Pins host memory; returns a function that undoes this and never raises. Blocks. Raises PinningError."""
        runtime = _cuda.cudart()

        def undo() -> None:
            with contextlib.suppress(Exception), _cuda.device(self._device):  # the driver may be gone at exit
                if int(runtime.cudaHostUnregister(address)):
                    self._forget_error()

        with _cuda.device(self._device):  # else the call would create a context on device 0
            code = int(runtime.cudaHostRegister(address, nbytes, _PORTABLE))
            if code:
                self._forget_error()
                raise PinningError(f"cudaHostRegister: {_cuda.CudaError(code)}")
        return undo

    def _forget_error(self) -> None:
        """Clears the thread's last error in the runtime, which torch would raise at the next kernel launch."""
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=self._device)

    def scratch(self, nbytes: int) -> torch.Tensor:
        """Pinned bytes of the host; their memory is reused once the tensor is dropped."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def now(self) -> Mark:
        """The point after all work that this thread has queued on its current stream."""
        return self._mark(_cuda.current_stream(self._device))

    def _mark(self, stream: Any) -> Mark:
        return Mark(self._device, stream.record_event(_cuda.Event(blocking=True)))  # waiters sleep

    def fetch(
        self, views: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], *, after: Mark, lasting: bool = False
    ) -> Mark:
        """Starts to copy tensors of the device into contiguous views of the host; the mark is the end of the copies.

        The caller keeps both until then. lasting: the tensors' owner may free their memory before the copies end.
        If it raises, no copy runs any more.
        """
        with self._in_stream(after):
            if lasting:
                for tensor in tensors:
                    tensor.record_stream(self._stream)
            straight = [i for i, tensor in enumerate(tensors) if _is_contiguous(tensor)]
            if straight:
                pairs = [views[i] for i in straight], [tensors[i] for i in straight]
                torch._foreach_copy_(*pairs, non_blocking=True)
            for i in sorted(set(range(len(tensors))).difference(straight)):
                self._fetch_strided(views[i], tensors[i])
            return self._mark(self._stream)

    def _fetch_strided(self, view: torch.Tensor, tensor: torch.Tensor) -> None:
        """Copies through staging memory: torch would allocate as much, and resolve a lazy conjugate too early."""
        for place, part in parts_of(view, tensor, STAGING_NBYTES):
            staged = self._staged(part)
            staged.copy_(part)
            place.copy_(staged, non_blocking=True)

    def _staged(self, like: torch.Tensor) -> torch.Tensor:
        """Staging memory as a contiguous tensor, for use in the stream: its order separates the uses."""
        if self._staging is None:
            self._staging = torch.empty(STAGING_NBYTES, dtype=torch.uint8, device=self._device)
        return self._staging[: like.nbytes].view(like.dtype).view(like.shape)

    def differing(self, views: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> list[int]:
        """Positions at which the bytes differ now. Blocks, also for earlier work of this thread.

        The device compares: it is faster than the host, even with the copy to it.
        """
        with self._in_stream(self.now()):
            found = torch.zeros(len(tensors), dtype=torch.bool, device=self._device)
            for i, (view, tensor) in enumerate(zip(views, tensors, strict=True)):
                for place, part in parts_of(view, tensor, STAGING_NBYTES):
                    staged = self._staged(part)
                    staged.copy_(place, non_blocking=True)
                    found[i] |= (flat_bytes(staged) != flat_bytes(part)).any()
            return [i for i, differs in enumerate(found.tolist()) if differs]

    def send(self, places: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]) -> None:
        """Copies bytes of the host into places of the device, after all queued work. Blocks."""
        with self._in_stream(self.now()):
            torch._foreach_copy_(list(places), list(parts), non_blocking=True)
            done = self._mark(self._stream)
        done.wait()

    @contextlib.contextmanager
    def _in_stream(self, after: Mark) -> Iterator[None]:
        """A context whose work goes into the engine's stream. After an error it waits for the work in the stream."""
        with self._lock, torch.no_grad(), _cuda.stream(self._stream):
            self._stream.wait_event(after.event)
            try:
                yield
            except BaseException:
                self._stream.synchronize()
                raise


def _is_contiguous(tensor: torch.Tensor) -> bool:
    """Whether the tensor's bytes are in the order in which they are written."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def parts_of(view: torch.Tensor, tensor: torch.Tensor, nbytes: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Equal boxes of both, each of at most nbytes (at least one element); those of a contiguous view are contiguous."""
    if tensor.nbytes <= nbytes:
        yield view, tensor
        return
    rows = nbytes // (tensor.nbytes // len(tensor))
    if rows:
        for start in range(0, len(tensor), rows):
            yield view[start : start + rows], tensor[start : start + rows]
        return
    for i in range(len(tensor)):
        yield from parts_of(view[i], tensor[i], nbytes)


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes, in order; a copy if the tensor is not contiguous."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8)


# --- engines


_engines: dict[torch.device, CopyEngine] = {}


def engine_of(device: torch.device) -> CopyEngine | None:
    """The engine of a device, created if new. None for the host, and for devices without an engine (xpu, mps)."""
    if device.type == "cuda" and device not in _engines:
        _engines.setdefault(device, CopyEngine(device))
    return _engines.get(device)


def by_engine(tensors: Sequence[torch.Tensor]) -> dict[CopyEngine, list[int]]:
    """By engine, the positions of the tensors that it can copy."""
    found: dict[CopyEngine, list[int]] = {}
    if not _engines and not _cuda.is_initialized():  # the usual case without a GPU
        return found
    devices: dict[torch.device, list[int]] = {}
    for i, device in enumerate(map(_DEVICE, tensors)):
        devices.setdefault(device, []).append(i)
    for device, positions in devices.items():
        engine = engine_of(device)
        if engine is not None:
            found[engine] = positions
    return found


def is_capturing() -> bool:
    """Whether work of this thread goes into a CUDA graph, not to the device."""
    return bool(_cuda.is_initialized() and _cuda.is_current_stream_capturing())


def check_not_capturing() -> None:
    """Raises UsageError if is_capturing."""
    if is_capturing():
        text = "a CUDA graph is being captured: what save copies would become part of it"
        raise UsageError(text, hint="save before the capture, or between replays")


class DeviceCopy:
    """One save's copies from devices to the host, of their content at the time of the constructor."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._divided = by_engine(tensors)
        self._after = {engine: engine.now() for engine in self._divided}
        self._marks: list[Mark] = []
        self.engines = list(self._divided)
        self.others: Sequence[int] = range(len(tensors))  # positions of tensors that the host copies
        if self._divided:
            fetched = {i for positions in self._divided.values() for i in positions}
            self.others = [i for i in self.others if i not in fetched]

    def begin(self, views: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], *, lasting: bool = False) -> None:
        """Queues all copies. See CopyEngine.fetch; call wait afterwards, also if this raises."""
        for engine, positions in self._divided.items():
            pairs = [views[i] for i in positions], [tensors[i] for i in positions]
            self._marks.append(engine.fetch(*pairs, after=self._after[engine], lasting=lasting))

    def block_stream(self) -> None:
        """Makes later work of this thread on these devices wait for the copies. Does not block."""
        for mark in self._marks:
            mark.block_stream()

    def wait(self) -> None:
        """Blocks until all copies end, on every device, even if one fails. Raises the first error."""
        errors: list[Exception] = []
        for mark in self._marks:
            try:
                mark.wait()
            except Exception as error:  # noqa: BLE001 - raised below
                errors.append(error)
        if errors:
            raise errors[0]
