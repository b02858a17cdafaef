"""deploy/prometheus and what a daemon tells, by Prometheus' own checker."""

import os
import shutil
import subprocess
import sys

import pytest

from tests.cluster import ROOT, Node

FILES = os.path.join(ROOT, "deploy/prometheus")
PROMTOOL = shutil.which("promtool")
pytestmark = pytest.mark.skipif(PROMTOOL is None, reason="no promtool is installed (Debian: prometheus)")


@pytest.mark.parametrize("words", [("config", "scrape.yml"), ("rules", "alerts.yml")], ids=" ".join)
def test_prometheus_takes_it(words):
    what, name = words
    command = [PROMTOOL, "check", what, os.path.join(FILES, name)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SUCCESS" in done.stdout


def test_prometheus_reads_what_a_daemon_tells(tmp_path):
    with Node(str(tmp_path)) as node:
        node.start()
        told = node.complete(sys.executable, "-m", "ckptd", "metrics", timeout_s=30)
    command = [PROMTOOL, "check", "metrics"]
    done = subprocess.run(command, input=told, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
