"""Pushes the metrics of the daemon that holds an arena to an OpenTelemetry collector, over OTLP and HTTP.

Names, labels and bounds are those that Prometheus scrapes; a histogram is one metric. Its libraries are an extra:
``pip install 'ckptd[otel]'``.
"""

import threading
import time
from collections.abc import Iterable, Iterator
from itertools import pairwise

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

from ckptd import __version__
from ckptd.cli.view.metrics import OF_DAEMON, STARTED
from ckptd.shared.base.errors import UsageError

try:
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk.metrics import export as otel
    from opentelemetry.sdk.metrics.export import AggregationTemporality
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    _missing = ""
except ImportError as _error:
    _missing = _error.name or str(_error)

_PATH = "/v1/metrics"
_PATIENCE_S = 10.0
_UNKNOWN = 0  # start time: of what is older than the daemon, and of gauges


def push(registry: CollectorRegistry, endpoint: str, interval_s: float) -> None:
    """From now on, what the registry collects, until the process ends. Raises UsageError.

    Nothing is kept for a collector that is away; its library logs that, and the next push is tried as usual.
    """
    if _missing:
        raise UsageError(f"--otlp needs {_missing}", hint="pip install 'ckptd[otel]'")
    if not endpoint.startswith(("http://", "https://")):
        raise UsageError(f"--otlp {endpoint}: no address of HTTP", hint="such as http://127.0.0.1:4318")
    url = endpoint.rstrip("/")
    exporter = OTLPMetricExporter(endpoint=url if url.endswith(_PATH) else url + _PATH, timeout=_PATIENCE_S)

    def run() -> None:
        while True:
            exporter.export(_data(registry.collect(), time.time_ns()))
            time.sleep(interval_s)

    threading.Thread(target=run, name="otlp", daemon=True).start()


def _data(families: Iterable[Metric], now_ns: int) -> "otel.MetricsData":
    families = list(families)
    began_at = next((one.samples[0].value for one in families if one.name == f"ckptd_{STARTED}"), 0.0)
    starts = dict.fromkeys(OF_DAEMON, int(began_at * 1e9))
    metrics = [one for family in families for one in _metrics(family, starts.get(family.name, _UNKNOWN), now_ns)]
    facts = next((one.samples[0].labels for one in families if one.name == "ckptd"), {})
    named = {"service.name": "ckptd", "service.version": __version__}
    resource = Resource(named | ({"host.name": facts["node"]} if facts else {}))
    scope = otel.ScopeMetrics(InstrumentationScope("ckptd", __version__), metrics, "")
    return otel.MetricsData([otel.ResourceMetrics(resource, [scope], "")])


def _metrics(family: Metric, start_ns: int, now_ns: int) -> Iterator["otel.Metric"]:
    """One; none without samples. All samples of a family that is no histogram have one name."""
    if not family.samples:
        return
    name = family.name
    temporality = AggregationTemporality.CUMULATIVE
    data: otel.Gauge | otel.Sum | otel.Histogram
    if family.type == "histogram":
        data = otel.Histogram(list(_distributions(family.samples, start_ns, now_ns)), temporality)
    else:
        name = family.samples[0].name
        points = [otel.NumberDataPoint(dict(one.labels), start_ns, now_ns, float(one.value)) for one in family.samples]
        data = otel.Sum(points, temporality, is_monotonic=True) if family.type == "counter" else otel.Gauge(points)
    yield otel.Metric(name, family.documentation, "", data)


def _distributions(samples: Iterable[Sample], start_ns: int, now_ns: int) -> Iterator["otel.HistogramDataPoint"]:
    """Prometheus counts what lies below each bound, OTLP what lies between two."""
    found: dict[tuple[tuple[str, str], ...], list[Sample]] = {}
    for one in samples:
        found.setdefault(tuple((key, value) for key, value in one.labels.items() if key != "le"), []).append(one)
    for labels, ours in found.items():
        below = [(float(one.labels["le"]), int(one.value)) for one in ours if "le" in one.labels]
        total = next((one.value for one in ours if one.name.endswith("_sum")), 0.0)
        yield otel.HistogramDataPoint(
            attributes=dict(labels),
            start_time_unix_nano=start_ns,
            time_unix_nano=now_ns,
            count=below[-1][1],
            sum=total,
            bucket_counts=[below[0][1], *(after - before for (_, before), (_, after) in pairwise(below))],
            explicit_bounds=[bound for bound, _ in below[:-1]],
            min=None,  # type: ignore[arg-type]  # optional in OTLP
            max=None,  # type: ignore[arg-type]
        )
