"""What the loop waits for: sockets of ZeroMQ and descriptors, and which of them have something."""

import zmq

Pollable = zmq.Socket[bytes] | int
Wanted = tuple[tuple[Pollable, int], ...]  # with flags: zmq.POLLIN, zmq.POLLOUT


def readable(*pollables: Pollable) -> Wanted:
    """To be read."""
    return tuple((pollable, zmq.POLLIN) for pollable in pollables)


class Readiness:
    """Of the last ``wait``. A poller is made only when other things are waited for than before."""

    def __init__(self) -> None:
        self._wanted: Wanted = ()
        self._poller = zmq.Poller()
        self._ready: dict[object, int] = {}

    def wait(self, wanted: Wanted, timeout_ms: int) -> None:
        """Blocks until one of them is ready, at most so long."""
        if wanted != self._wanted:
            self._wanted, self._poller = wanted, zmq.Poller()
            for pollable, flags in wanted:
                self._poller.register(pollable, flags)
        self._ready = dict(self._poller.poll(timeout_ms))

    def of(self, pollable: object) -> int:
        """Its flags; 0: it is not ready."""
        return self._ready.get(pollable, 0)

    def __contains__(self, pollable: object) -> bool:
        return pollable in self._ready
