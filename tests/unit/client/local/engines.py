"""Copy engines that run without a GPU: real copies, in a thread of their own, in order."""

import contextlib
import threading
from queue import SimpleQueue

import torch

from ckptd_client._local.copy_engines import PinningError, flat_bytes


def is_mapped(address):
    """Whether the process has something there."""
    with open("/proc/self/maps") as maps:
        ranges = [line.split(" ", 1)[0].split("-") for line in maps]
    return any(int(first, 16) <= address < int(stop, 16) for first, stop in ranges)


class ThreadMark:
    def __init__(self, engine):
        self.engine = engine
        self.reached = threading.Event()
        self.error = None

    def wait(self):
        assert self.reached.wait(30)
        if self.error is not None:
            raise self.error

    def block_stream(self):
        """The host's memory is written by the thread itself, at once: so it is what must wait."""
        self.engine.held_back += 1
        if self.engine.holds_back:
            self.wait()


class ThreadEngine:
    """Copies tensors of the host's memory as an engine copies those of a device. A closed gate keeps it from them."""

    def __init__(self):
        self.gate = threading.Event()
        self.gate.set()
        self.refusal = ""
        self.broken = None
        self.holds_back = True
        self.fetches = 0
        self.pinned = {}  # address to bytes
        self.registered = self.undone = self.held_back = 0
        self.fetched = 0  # bytes
        self.pageable = 0  # bytes fetched into memory that was not pinned
        self.sent = 0
        self._jobs = SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def register(self, address, nbytes):
        if self.refusal:
            raise PinningError(self.refusal)
        assert is_mapped(address)
        assert address not in self.pinned, "registered twice"
        self.registered += 1
        self.pinned[address] = nbytes

        def undo():
            self.undone += 1
            assert is_mapped(address), "unmapped while it is registered"
            del self.pinned[address]

        return undo

    def scratch(self, nbytes):
        return torch.empty(nbytes, dtype=torch.uint8)

    def now(self):
        mark = ThreadMark(self)
        mark.reached.set()
        return mark

    def fetch(self, views, tensors, *, after, lasting=False):
        if self.broken is not None:
            raise self.broken
        self.fetches += 1
        mark = ThreadMark(self)
        self.pageable += sum(view.nbytes for view in views if not self._is_pinned(view))
        self._jobs.put((list(views), list(tensors), mark))
        return mark

    def _is_pinned(self, view):
        return any(start <= view.data_ptr() < start + nbytes for start, nbytes in self.pinned.items())

    def differing(self, views, tensors):
        pairs = zip(views, tensors, strict=True)
        return [i for i, (view, tensor) in enumerate(pairs) if not torch.equal(flat_bytes(view), flat_bytes(tensor))]

    def send(self, places, parts):
        for place, part in zip(places, parts, strict=True):
            place.copy_(part)
            self.sent += place.nbytes

    def _run(self):
        while True:
            job = self._jobs.get()
            if job is None:
                return
            views, tensors, mark = job
            self.gate.wait(30)
            try:
                with torch.no_grad():
                    torch._foreach_copy_(views, tensors)
                self.fetched += sum(view.nbytes for view in views)
            except Exception as error:
                mark.error = error
            mark.reached.set()
            del views, tensors, mark, job

    def close(self):
        self.gate.set()
        self._jobs.put(None)
        self._thread.join(30)


@contextlib.contextmanager
def installed(monkeypatch):
    """An engine for the host's memory: everything takes the way of a device's tensors."""
    from ckptd_client._local import copy_engines  # noqa: PLC0415

    engine = ThreadEngine()
    monkeypatch.setitem(copy_engines._engines, torch.device("cpu"), engine)
    try:
        yield engine
    finally:
        engine.close()
