"""Serves metrics of the daemon that holds an arena over HTTP; each scrape asks the daemon.

Never in the daemon's own process: a scrape opens the lock file, and closing it there would release the lock.
"""

import socket
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer

from prometheus_client import CollectorRegistry, MetricsHandler
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ckptd.arena.ask import ask_status
from ckptd.cli.view.metrics import families
from ckptd.daemon.liveness import living
from ckptd.shared.base.errors import CkptdError, UsageError
from ckptd.shared.bulk.sockets import close_both_ways

_MOST = 16  # connections at once
_PATIENCE_S = 5.0
_Request = socket.socket | tuple[bytes, socket.socket]  # as socketserver has it: of UDP the latter


class _Daemon(Collector):
    def __init__(self, arena: str, timeout_s: float) -> None:
        self._arena, self._timeout_s = arena, timeout_s

    def _unserved(self) -> int:
        try:
            return len(living(self._arena))
        except OSError:  # it is another user's
            return 0

    def collect(self) -> Iterator[Metric]:
        """What the daemon says now."""
        try:
            status = ask_status(self._arena, self._timeout_s)
        except CkptdError:
            status = None
        unserved = 0 if status is not None else self._unserved()
        yield GaugeMetricFamily("ckptd_up", "Whether the daemon answers.", value=status is not None)
        yield GaugeMetricFamily("ckptd_ranks_unserved", "Ranks that live while no daemon answers.", value=unserved)
        if status is not None:
            yield from families(status)


def registry_of(arena: str, timeout_s: float) -> CollectorRegistry:
    """Each collection asks the arena's daemon; without an answer in time it counts the ranks that live without one."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Daemon(arena, timeout_s))
    return registry


class _Handler(MetricsHandler):
    timeout = _PATIENCE_S  # of each call that reads or writes


class _Server(ThreadingHTTPServer):
    """Holds so many connections at most, whatever comes: a newer one ends the oldest."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, address: str, port: int, registry: CollectorRegistry) -> None:
        self.address_family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
        self._lock = threading.Lock()
        self._held: dict[_Request, None] = {}  # the oldest first
        super().__init__((address, port), _Handler.factory(registry))

    def process_request(self, request: _Request, client_address: object) -> None:
        """Serves it in a thread of its own."""
        with self._lock:
            if len(self._held) >= _MOST:  # a real scraper has sent its request by now
                oldest = next(iter(self._held))
                del self._held[oldest]
                if isinstance(oldest, socket.socket):
                    close_both_ways(oldest)  # its thread closes it
            self._held[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: _Request) -> None:
        """It is over."""
        with self._lock:
            self._held.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: _Request, client_address: object) -> None:
        """Anybody may break off: nothing of it comes into the log."""


def serve(registry: CollectorRegistry, address: str, port: int) -> None:
    """From now on, at http://address:port/metrics, until the process ends. Raises UsageError."""
    try:
        server = _Server(address, port, registry)
    except OSError as error:
        text = f"cannot serve metrics at {address} port {port}: {error.strerror or error}"
        raise UsageError(text, hint="give another --port or --address") from None
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
