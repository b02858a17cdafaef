"""Metrics pushed over OTLP: what a collector gets, from a real command beside a real daemon."""

import http.server
import os
import re
import subprocess
import sys
import threading
import time

import msgspec
import pytest

from ckptd.cli.view.metrics import families
from tests import pythons
from tests.cluster import Node, wait_for
from tests.unit import a_status

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
        started = time.time()
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
    assert found["ckptd_refused_messages_total"].sum.is_monotonic
    starts = {start_of(decoder, body) for _, _, body in collector.got}
    assert len(starts) == 1, "a start that wanders is a reset to a collector"
    assert 0 < started - starts.pop() / 1e9 < 60


def start_of(decoder, body):
    (resource,) = decoder.ExportMetricsServiceRequest.FromString(body).resource_metrics
    (found,) = [one for one in resource.scope_metrics[0].metrics if one.name == "ckptd_refused_messages_total"]
    return found.sum.data_points[0].start_time_unix_nano


def told(status, now_ns=1_000_000_000_000_000):
    """Metrics of a push, by name."""
    from ckptd.cli import otlp  # noqa: PLC0415

    data = otlp._data(families(status), now_ns)
    return {metric.name: metric for metric in data.resource_metrics[0].scope_metrics[0].metrics}


def test_names_are_those_of_the_samples_that_prometheus_scrapes():
    pytest.importorskip(METRICS, reason="ckptd[otel] is not installed")
    scraped = {
        re.sub(r"_(bucket|sum|count)$", "", one.name) if family.type == "histogram" else one.name
        for family in families(a_status.status())
        for one in family.samples
    }
    assert {"ckptd_info", "ckptd_refused_messages_total"} <= scraped
    assert set(told(a_status.status())) == scraped


def test_only_what_a_daemon_counts_itself_starts_with_it():
    pytest.importorskip(METRICS, reason="ckptd[otel] is not installed")
    found = told(msgspec.structs.replace(a_status.status(), began_at=900_000.0))
    starts = {name: {point.start_time_unix_nano for point in one.data.data_points} for name, one in found.items()}
    own = {name for name, start in starts.items() if start == {900_000_000_000_000}}
    assert own == {f"ckptd_{one}_total" for one in ("refused_messages", "long_turns", "scrub_bytes", "scrub_damage")}
    assert all(starts[name] == {0} for name in starts.keys() - own), "of a gauge, or of a journal older than the daemon"


def test_histograms_count_between_two_bounds():
    pytest.importorskip(METRICS, reason="ckptd[otel] is not installed")
    (point,) = told(a_status.status())["ckptd_save_seconds"].data.data_points
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
