"""deploy/prometheus and what a daemon tells, by Prometheus itself and its checker."""

import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time
import urllib.request

import pytest

from tests import pythons
from tests.cluster import ROOT, Node, wait_for
from tests.faults.ranks import Ranks
from tests.ports import free_ports

FILES = os.path.join(ROOT, "deploy/prometheus")
PROMTOOL = shutil.which("promtool")
PROMETHEUS = shutil.which("prometheus")
pytestmark = pytest.mark.skipif(PROMTOOL is None, reason="no promtool is installed (Debian: prometheus)")


@pytest.mark.parametrize("words", [("config", "scrape.yml"), ("rules", "alerts.yml")], ids=" ".join)
def test_prometheus_takes_it(words):
    what, name = words
    command = [PROMTOOL, "check", what, os.path.join(FILES, name)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SUCCESS" in done.stdout


def test_prometheus_reads_what_a_daemon_reports(tmp_path):
    with Node(str(tmp_path)) as node:
        node.start()
        told = node.complete(sys.executable, "-m", "ckptd", "metrics", timeout_s=30)
    command = [PROMTOOL, "check", "metrics"]
    done = subprocess.run(command, input=told, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@contextlib.contextmanager
def running(*command, environ=None):
    process = pythons.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)


@pytest.mark.skipif(PROMETHEUS is None, reason="no prometheus is installed")
def test_prometheus_scrapes_a_daemon_by_that_configuration_and_judges_it_by_those_rules(tmp_path):
    exporter, port = free_ports(2)
    config = pathlib.Path(FILES, "scrape.yml").read_text()
    assert 'targets: ["node01:9440", "node02:9440"]' in config
    config = config.replace('"node01:9440", "node02:9440"', f'"127.0.0.1:{exporter}"').replace("15s", "1s")
    (tmp_path / "prometheus.yml").write_text(
        f"global: {{evaluation_interval: 1s}}\nrule_files: [{FILES}/alerts.yml]\n{config}"
    )

    def ask(what):
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/{what}", timeout=5) as reply,
        ):
            return json.load(reply)["data"]

    def value(name):
        found = (ask(f"query?query={name}") or {}).get("result")
        return found[0]["value"][1] if found else None

    def alerts():
        """Pending ones, too."""
        return [alert["labels"]["alertname"] for alert in ask("alerts")["alerts"]]

    serve = [sys.executable, "-m", "ckptd", "metrics", "--port", str(exporter)]
    options = [f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"]
    with (
        Node(str(tmp_path)) as node,
        running(*serve, environ=node.environ()),
        running(PROMETHEUS, *options, f"--web.listen-address=127.0.0.1:{port}"),
    ):
        node.start()
        wait_for(lambda: value("ckptd_up") == "1", 60, every_s=0.2)
        node.stop()
        wait_for(lambda: value("ckptd_up") == "0", 60, every_s=0.2)
        time.sleep(3.0)  # of three scrapes and as many looks
        assert alerts() == [], "nobody needs a daemon"
        node.start()
        with Ranks(node) as ranks:
            ranks.call("connect")
            wait_for(lambda: value("ckptd_ranks_alive") == "1", 60, every_s=0.2)
            node.kill()
            wait_for(lambda: value("ckptd_ranks_unserved") == "1", 60, every_s=0.2)
            wait_for(lambda: "CkptdDown" in alerts(), 60)
