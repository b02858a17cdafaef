"""deploy/grafana: every query of every panel, asked of a real Prometheus that scrapes a real daemon with a job."""

import contextlib
import json
import math
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
import urllib.parse
import urllib.request

import pytest
import yaml

from tests.cluster import ROOT, Node, wait_for
from tests.deploy.test_prometheus import FILES, running
from tests.faults.ranks import JOB, MB, Ranks
from tests.ports import free_ports

PROMTOOL = shutil.which("promtool")
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


def of_jobs():
    """Queries of what jobs have."""
    return {name: query for name, query in QUERIES.items() if "job_name=~" in query}


def test_no_query_mixes_jobs():
    """What it shows of all jobs is said of each: a mean, the newest or the oldest of several says nothing of one."""
    mixed = {
        name
        for name, query in of_jobs().items()
        for labels in re.findall(r"\bby \(([^)]*)\)", query) or [""]
        if not {"job_name", "store"} <= set(re.split(r",\s*", labels))
    }
    assert mixed == {"Not safe, A"}, "what some job has: the worst of all is red"
    for name, query in of_jobs().items():
        legends = [t["legendFormat"] for panel in DASHBOARD["panels"] for t in panel["targets"] if t["expr"] == query]
        assert name in mixed or all("{{job_name}}" in one and "{{store}}" in one for one in legends)


def test_what_a_save_adds_to_is_taken_over_an_hour():
    """Saves are rarer than scrapes: what grew within a few of these is nothing nearly always."""
    short = {
        name for name, query in QUERIES.items() if re.search(r"_(bucket|sum|count)\b[^)]*\$__rate_interval", query)
    }
    assert short == set()


def asked(tmp_path, inputs, expected, minute):
    """Queries of panels at that minute, by promtool; expected: values by labels, by query."""
    tests = [
        {
            "expr": filled_in(QUERIES[name]),
            "eval_time": f"{minute}m",
            "exp_samples": [{"labels": labels, "value": value} for labels, value in samples.items()],
        }
        for name, samples in expected.items()
    ]
    one = {"interval": "1m", "input_series": inputs, "promql_expr_test": tests}
    path = tmp_path / "test.yml"
    path.write_text(yaml.safe_dump({"rule_files": [], "evaluation_interval": "1m", "tests": [one]}))
    done = subprocess.run([PROMTOOL, "test", "rules", path], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(PROMTOOL is None, reason="no promtool is installed (Debian: prometheus)")
def test_a_job_that_stands_still_is_seen_beside_a_healthy_one(tmp_path):
    fine, stuck = 'job_name="fine",milestone="durable",store="/s"', 'job_name="stuck",milestone="durable",store="/s"'
    inputs = [
        {"series": f"ckptd_newest_age_seconds{{{fine}}}", "values": "60+0x60"},
        {"series": f"ckptd_newest_age_seconds{{{stuck}}}", "values": "0+60x60"},
        {"series": f"ckptd_newest_step{{{fine}}}", "values": "0+10x60"},
        {"series": f"ckptd_newest_step{{{stuck}}}", "values": "70+0x60"},
    ]
    expected = {
        "Age of the newest checkpoint, A": {f"{{{fine}}}": 60, f"{{{stuck}}}": 3600},
        "Newest step, A": {f"{{{fine}}}": 600, f"{{{stuck}}}": 70},
    }
    asked(tmp_path, inputs, expected, 60)


@pytest.mark.skipif(PROMTOOL is None, reason="no promtool is installed (Debian: prometheus)")
def test_saves_of_each_ten_minutes_have_quantiles_and_rates(tmp_path):
    job = 'job_name="job",store="/s"'
    saves = " ".join(str(minute // 10) for minute in range(71))
    rates = " ".join(str(5000 * (minute // 10)) for minute in range(71))
    name = f'ckptd_save_seconds_bucket{{{job},milestone="staged"'
    inputs = [
        {"series": f'{name},le="0.5"}}', "values": "0+0x70"},
        {"series": f'{name},le="1.0"}}', "values": saves},
        {"series": f'{name},le="+Inf"}}', "values": saves},
        {"series": f"ckptd_drain_rate_bytes_per_second_sum{{{job}}}", "values": rates},
        {"series": f"ckptd_drain_rate_bytes_per_second_count{{{job}}}", "values": saves},
    ]
    expected = {
        "Time to each milestone, A": {'{job_name="job",milestone="staged",store="/s"}': 0.75},
        "Rate of drains, A": {f"{{{job}}}": 5000},
    }
    asked(tmp_path, inputs, expected, 65)


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
