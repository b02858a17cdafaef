"""Metrics of the daemon that holds an arena, asked for anew at each scrape, and served over HTTP.

Never in the daemon's own process: who asks looks at the lock that the daemon holds, and would drop it there.
"""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ckptd.ask import ask_status
from ckptd.metrics import families
from ckptd.protocol.errors import CkptdError, UsageError


class _Daemon(Collector):
    def __init__(self, arena: str, timeout_s: float) -> None:
        self._arena, self._timeout_s = arena, timeout_s

    def collect(self) -> Iterator[Metric]:
        """What the daemon says now."""
        try:
            status = ask_status(self._arena, self._timeout_s)
        except CkptdError:
            status = None
        yield GaugeMetricFamily("ckptd_up", "Whether the daemon answers.", value=status is not None)
        if status is not None:
            yield from families(status)


def registry_of(arena: str, timeout_s: float) -> CollectorRegistry:
    """Whoever collects from it asks the arena's daemon; one that does not answer in time is a sample: ckptd_up 0."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Daemon(arena, timeout_s))
    return registry


def serve(registry: CollectorRegistry, address: str, port: int) -> None:
    """From now on, at http://address:port/metrics, until the process ends. Raises UsageError."""
    try:
        start_http_server(port, address, registry)
    except OSError as error:
        text = f"cannot serve metrics at {address} port {port}: {error.strerror or error}"
        raise UsageError(text, hint="give another --port or --address") from error
