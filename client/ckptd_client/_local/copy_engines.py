"""Copy engines of GPUs: they move bytes between a device's memory and the host's while the device computes.

All of the client's CUDA calls are here. One engine per device, made once, drives one stream of its own. What it copies
to must be registered with it (pinned): into other memory it copies all the same, but then the caller's thread waits.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final, Protocol

import torch

from ckptd.shared.base.errors import UsageError

STAGING_NBYTES: Final = 32 << 20  # of device memory, for what lies strided there
_PORTABLE: Final = 1  # cudaHostRegisterPortable: pinned for every device of the process
_DEVICE = attrgetter("device")
_cuda: Any = torch.cuda  # much of it has no types


class PinningError(Exception):
    """Memory could not be registered."""


class Mark(Protocol):
    """A place in a device's queue of work."""

    def wait(self) -> None:
        """Blocks the thread, without the GIL, until the device is there. Nothing else of the device is waited for."""

    def hold_back(self) -> None:
        """What this thread queues on its current stream from here on waits for it; the thread does not."""


class CopyEngine(Protocol):
    """Of one device. Its methods may be called from any thread."""

    def register(self, address: int, nbytes: int) -> Callable[[], None]:
        """Pins host memory; returns what undoes it, which never raises. Blocks. Raises PinningError."""

    def scratch(self, nbytes: int) -> torch.Tensor:
        """Pinned bytes of the host, reused once they are dropped."""

    def now(self) -> Mark:
        """After all that this thread has queued on its current stream so far."""

    def fetch(
        self, views: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], *, after: Mark, lasting: bool = False
    ) -> Mark:
        """Begins to copy tensors of the device into contiguous views of the host; the mark is where that is done.

        The caller keeps both until then. lasting: for so long that somebody may free the tensors' memory under it.
        When it raises, nothing is copied any more.
        """

    def differing(self, views: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> list[int]:
        """Positions at which the bytes differ now. Blocks for it, and for what this thread queued before."""

    def send(self, places: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]) -> None:
        """Copies bytes of the host into places of the device, after all that was queued there. Blocks until done."""


# --- CUDA


@dataclass(frozen=True, slots=True)
class CudaMark:
    """An event."""

    device: torch.device
    event: Any  # torch.cuda.Event

    def wait(self) -> None:
        """See Mark."""
        self.event.synchronize()

    def hold_back(self) -> None:
        """See Mark."""
        _cuda.current_stream(self.device).wait_event(self.event)


class CudaEngine:
    """See CopyEngine. Its stream has the lowest priority: what trains goes first."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = _cuda.Stream(device=device, priority=0)
        self._staging: torch.Tensor | None = None
        self._lock = threading.Lock()  # the staging memory is filled and emptied in the stream's order

    def register(self, address: int, nbytes: int) -> Callable[[], None]:
        """See CopyEngine."""
        runtime = _cuda.cudart()

        def undo() -> None:
            with contextlib.suppress(Exception), _cuda.device(self._device):  # the driver may be gone at exit
                if int(runtime.cudaHostUnregister(address)):
                    self._forget_error()

        with _cuda.device(self._device):  # else it would make a context on device 0
            code = int(runtime.cudaHostRegister(address, nbytes, _PORTABLE))
            if code:
                self._forget_error()
                raise PinningError(f"cudaHostRegister: {_cuda.CudaError(code)}")
        return undo

    def _forget_error(self) -> None:
        """The runtime keeps the last error of each thread, and torch would raise it at the next kernel it starts."""
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=self._device)

    def scratch(self, nbytes: int) -> torch.Tensor:
        """See CopyEngine."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def now(self) -> CudaMark:
        """See CopyEngine."""
        return self._mark(_cuda.current_stream(self._device))

    def _mark(self, stream: Any) -> CudaMark:
        return CudaMark(self._device, stream.record_event(_cuda.Event(blocking=True)))  # waiters sleep

    def fetch(
        self, views: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], *, after: Mark, lasting: bool = False
    ) -> CudaMark:
        """See CopyEngine."""
        assert isinstance(after, CudaMark)  # noqa: S101 - now made it
        with self._in_stream(after):
            if lasting:
                for tensor in tensors:
                    tensor.record_stream(self._stream)
            straight = [i for i, tensor in enumerate(tensors) if _is_straight(tensor)]
            if straight:
                pairs = [views[i] for i in straight], [tensors[i] for i in straight]
                torch._foreach_copy_(*pairs, non_blocking=True)
            for i in sorted(set(range(len(tensors))).difference(straight)):
                self._fetch_strided(views[i], tensors[i])
            return self._mark(self._stream)

    def _fetch_strided(self, view: torch.Tensor, tensor: torch.Tensor) -> None:
        """Through staging memory: torch would allocate as much, and resolve a lazy conjugate before it has arrived."""
        for place, part in parts_of(view, tensor, STAGING_NBYTES):
            staged = self._staged(part)
            staged.copy_(part)
            place.copy_(staged, non_blocking=True)

    def _staged(self, like: torch.Tensor) -> torch.Tensor:
        """Staging memory as a contiguous tensor. In the stream, whose order keeps one use from the next."""
        if self._staging is None:
            self._staging = torch.empty(STAGING_NBYTES, dtype=torch.uint8, device=self._device)
        return self._staging[: like.nbytes].view(like.dtype).view(like.shape)

    def differing(self, views: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> list[int]:
        """See CopyEngine. It is the device that compares: it is faster than the host, also with the way there."""
        with self._in_stream(self.now()):
            found = torch.zeros(len(tensors), dtype=torch.bool, device=self._device)
            for i, (view, tensor) in enumerate(zip(views, tensors, strict=True)):
                for place, part in parts_of(view, tensor, STAGING_NBYTES):
                    staged = self._staged(part)
                    staged.copy_(place, non_blocking=True)
                    found[i] |= (flat_bytes(staged) != flat_bytes(part)).any()
            return [i for i, differs in enumerate(found.tolist()) if differs]

    def send(self, places: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]) -> None:
        """See CopyEngine."""
        with self._in_stream(self.now()):
            torch._foreach_copy_(list(places), list(parts), non_blocking=True)
            done = self._mark(self._stream)
        done.wait()

    @contextlib.contextmanager
    def _in_stream(self, after: CudaMark) -> Iterator[None]:
        """What torch does here goes into the engine's stream. On an error it waits for what is there already."""
        with self._lock, torch.no_grad(), _cuda.stream(self._stream):
            self._stream.wait_event(after.event)
            try:
                yield
            except BaseException:
                self._stream.synchronize()
                raise


def _is_straight(tensor: torch.Tensor) -> bool:
    """Whether its bytes lie as they are to be written."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def parts_of(view: torch.Tensor, tensor: torch.Tensor, nbytes: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The same boxes of both, each of at most nbytes, those of a contiguous view contiguous. nbytes: an element's."""
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
    """Its bytes, in order; a copy where they do not lie so."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8)


# --- which engine


_engines: dict[torch.device, CopyEngine] = {}


def engine_of(device: torch.device) -> CopyEngine | None:
    """The device's engine, made now if it is new. None for the host, and for devices that have none here (xpu, mps)."""
    if device.type == "cuda" and device not in _engines:
        _engines.setdefault(device, CudaEngine(device))
    return _engines.get(device)


def divided(tensors: Sequence[torch.Tensor]) -> dict[CopyEngine, list[int]]:
    """Positions of the tensors that an engine can copy, by engine."""
    found: dict[CopyEngine, list[int]] = {}
    if not _engines and not _cuda.is_initialized():  # nearly all that train without a GPU
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
    """Whether what this thread queues goes into a CUDA graph, and not to the device."""
    return bool(_cuda.is_initialized() and _cuda.is_current_stream_capturing())


def check_not_capturing() -> None:
    """Raises UsageError when is_capturing."""
    if is_capturing():
        text = "a CUDA graph is being captured: what save copies would become part of it"
        raise UsageError(text, hint="save before the capture, or between replays")


class Fetch:
    """One save's copies out of the memory of devices, as it is when this is made."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._divided = divided(tensors)
        self._after = {engine: engine.now() for engine in self._divided}
        self._marks: list[Mark] = []
        self.engines = list(self._divided)
        self.others: Sequence[int] = range(len(tensors))  # positions of what the host has to copy
        if self._divided:
            fetched = {i for positions in self._divided.values() for i in positions}
            self.others = [i for i in self.others if i not in fetched]

    def begin(self, views: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], *, lasting: bool = False) -> None:
        """Queues all copies. See CopyEngine.fetch; wait must follow, also when this raises."""
        for engine, positions in self._divided.items():
            pairs = [views[i] for i in positions], [tensors[i] for i in positions]
            self._marks.append(engine.fetch(*pairs, after=self._after[engine], lasting=lasting))

    def hold_back(self) -> None:
        """What this thread queues on these devices from here on comes after the copies. Blocks nobody."""
        for mark in self._marks:
            mark.hold_back()

    def wait(self) -> None:
        """Blocks until all that was begun is done, on every device, whatever went wrong on one."""
        errors: list[Exception] = []
        for mark in self._marks:
            try:
                mark.wait()
            except Exception as error:  # noqa: BLE001 - raised below
                errors.append(error)
        if errors:
            raise errors[0]
