"""deploy/grafana: every query of every panel, asked of a real Prometheus that scrapes a real daemon with a job."""

import contextlib
import json
import math
import os
import pathlib
import re
import shutil
import sys
import time
import urllib.parse
import urllib.request

import pytest

from tests.cluster import ROOT, Node, wait_for
from tests.deploy.test_prometheus import FILES, running
from tests.faults.ranks import JOB, MB, Ranks
from tests.ports import free_ports

PROMETHEUS = shutil.which("prometheus")
DASHBOARD = json.loads(pathlib.Path(ROOT, "deploy/grafana/ckptd.json").read_text(encoding="utf-8"))
VARIABLES = {"$job": ".*", "$__rate_interval": "20s"}  # as Grafana puts them in: all jobs; 4 scrapes and more
QUERIES = {
    f"{panel['title']}, {target['refId']}": target["expr"]
    for panel in DASHBOARD["panels"]
    for target in panel["targets"]
}


def filled_in(query):
    for name, value in VARIABLES.items():
        query = query.replace(name, value)
    assert "$" not in query, "a variable that the dashboard does not have"
    return query


def test_it_is_a_dashboard_whose_panels_do_not_overlap():
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24
    defined = {one["name"] for one in DASHBOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD)))
    assert used - {"__rate_interval", "__all"} == defined
    for panel in panels:
        assert panel["description"]
        assert all(target["expr"] and target["legendFormat"] for target in panel["targets"])


@contextlib.contextmanager
def scraped(tmp_path):
    """A job that saves again and again, and a function that asks Prometheus for values."""
    exporter, port = free_ports(2)
    config = pathlib.Path(FILES, "scrape.yml").read_text()
    config = config.replace('"node01:9440", "node02:9440"', f'"127.0.0.1:{exporter}"').replace("15s", "1s")
    (tmp_path / "prometheus.yml").write_text(f"global: {{evaluation_interval: 1s}}\n{config}")

    def values(query):
        """None: it was refused, or not answered."""
        url = f"http://127.0.0.1:{port}/api/v1/query?query={urllib.parse.quote(query)}"
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as reply:
            return [float(one["value"][1]) for one in json.load(reply)["data"]["result"]]
        return None

    serve = [sys.executable, "-m", "ckptd", "metrics", "--port", str(exporter)]
    options = [f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"]
    with (
        Node(str(tmp_path)) as node,
        running(*serve, environ=node.environ()),
        running(PROMETHEUS, *options, f"--web.listen-address=127.0.0.1:{port}"),
    ):
        node.start(CKPTD_DRAIN_BANDWIDTH=str(8 * MB))
        with Ranks(node, 2, nbytes=8 * MB) as ranks:
            yield node, ranks, values


@pytest.mark.skipif(PROMETHEUS is None, reason="no prometheus is installed (Debian: prometheus)")
def test_every_query_of_every_panel_has_data(tmp_path):
    with scraped(tmp_path) as (node, ranks, values):
        ranks.call("connect")
        ranks.call("save", 10)
        ranks.call("wait", 10, "durable")
        ranks.kill()
        wait_for(lambda: (job := node.job(JOB)) and not any(rank.alive for rank in job.ranks))
        with Ranks(node, 2, nbytes=8 * MB) as again:
            again.call("connect")
            again.call("load")
            empty, step, deadline = dict(QUERIES), 20, time.monotonic() + 90
            while empty and time.monotonic() < deadline:
                again.call("save", step)  # the store takes 2 s for each: a drain runs all the time
                step += 10
                time.sleep(1.0)
                found = {name: values(filled_in(query)) for name, query in empty.items()}
                empty = {name: empty[name] for name, got in found.items() if not any(map(_is_number, got or ()))}
            again.call("wait", step - 10, "staged")
    assert empty == {}, "queries without data"


def _is_number(value):
    return not math.isnan(value)


def test_each_metric_of_the_dashboard_stands_in_the_documents():
    page = pathlib.Path(ROOT, "docs/metrics.md").read_text(encoding="utf-8")
    names = {
        re.sub(r"_(bucket|sum|count)$", "", name)
        for query in QUERIES.values()
        for name in re.findall(r"ckptd_[a-z_]+", query)
    }
    assert names
    assert {name for name in names if f"`{name}`" not in page} == set()
    assert os.path.isfile(os.path.join(ROOT, "deploy/grafana/ckptd.json"))
