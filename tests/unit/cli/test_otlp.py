"""Metrics pushed over OTLP: what a collector gets, from a real command beside a real daemon."""

import http.server
import os
import subprocess
import sys
import threading

import pytest

from tests import pythons
from tests.cluster import Node, wait_for

pytestmark = pytest.mark.process
METRICS = "opentelemetry.proto.collector.metrics.v1.metrics_service_pb2"


class Collector:
    """An OTLP receiver: keeps what was posted."""

    def __init__(self):
        got = self.got = []

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                got.append((self.path, self.headers.get("Content-Encoding"), body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_):
                pass

        self.server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()


def test_a_collector_gets_what_prometheus_would(tmp_path):
    decoder = pytest.importorskip(METRICS, reason="ckptd[otel] is not installed")
    with Node(str(tmp_path)) as node, Collector() as collector:
        node.start()
        verb = [sys.executable, "-m", "ckptd", "metrics", "--otlp", collector.url, "--interval", "1"]
        path = os.pathsep.join(filter(None, sys.path))  # where this process has found the extra
        pushing = pythons.Popen(verb, env=node.environ(PYTHONPATH=path), stderr=subprocess.PIPE, text=True)
        try:
            assert pushing.stderr.readline() == f"pushing to {collector.url} every 1 s\n"
            wait_for(lambda: len(collector.got) >= 2, 60)
            pushing.terminate()
            assert pushing.wait(60) == 0
        finally:
            pushing.kill()
            pushing.wait()
            pushing.stderr.close()
    path, encoding, body = collector.got[-1]
    assert (path, encoding) == ("/v1/metrics", None)
    (resource,) = decoder.ExportMetricsServiceRequest.FromString(body).resource_metrics
    labels = {one.key: one.value.string_value for one in resource.resource.attributes}
    assert labels["service.name"] == "ckptd"
    assert labels["host.name"]
    found = {one.name: one for one in resource.scope_metrics[0].metrics}
    assert found["ckptd_up"].gauge.data_points[0].as_double == 1
    assert found["ckptd_refused_messages"].sum.is_monotonic


def test_histograms_count_between_two_bounds(monkeypatch):
    pytest.importorskip(METRICS, reason="ckptd[otel] is not installed")
    from ckptd.cli import otlp  # noqa: PLC0415
    from ckptd.cli.view.metrics import families  # noqa: PLC0415
    from tests.unit import a_status  # noqa: PLC0415

    data = otlp._data(families(a_status.status()), 1_000_000_000_000_000)
    (found,) = [m for m in data.resource_metrics[0].scope_metrics[0].metrics if m.name == "ckptd_save_seconds"]
    (point,) = found.data.data_points
    assert (list(point.explicit_bounds), list(point.bucket_counts)) == ([0.5, 1.0], [0, 2, 1])
    assert (point.count, point.sum) == (3, 4.5)
    assert point.attributes["milestone"] == "staged"
    assert (point.min, point.max) == (None, None)


@pytest.mark.parametrize(("words", "told"), [(["--otlp", "node01:4317"], "such as http://127.0.0.1:4318")])
def test_an_address_that_is_none_is_refused(words, told, tmp_path):
    """Where the extra is missing, that is said first."""
    with Node(str(tmp_path)) as node:
        done = pythons.run(
            [sys.executable, "-m", "ckptd", "metrics", *words],
            env=node.environ(), capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
    assert done.returncode == 2
    assert told in done.stderr or "pip install 'ckptd[otel]'" in done.stderr
