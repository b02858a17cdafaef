"""What Prometheus is told: from a picture, and by a real daemon over HTTP."""

import pathlib
import re
import subprocess
import sys
import urllib.request

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from ckptd.cli.view.metrics import families
from ckptd.daemon import status as picture
from tests import pythons
from tests.cluster import Node
from tests.ports import free_port
from tests.situations import driven
from tests.unit import a_status

GIB = 1 << 30
ROOT = pathlib.Path(__file__).parents[3]


class Told(Collector):
    def __init__(self, status):
        self.status = status

    def collect(self):
        yield from families(self.status)


def samples(text):
    """Values by name and labels (without job and store, which are looked at apart)."""
    found = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation
        for one in family.samples:
            key = (one.name, *sorted(one.labels.items()))
            assert key not in found
            found[key] = one.value
    return found


def of(found, name, job=None, **labels):
    """The one value of that name and job, None when there is none."""
    values = [
        value
        for (key, *pairs), value in found.items()
        if key == name and dict(pairs).get("job_name") == job and labels.items() <= dict(pairs).items()
    ]
    assert len(values) <= 1
    return values[0] if values else None


@pytest.fixture(name="told")
def fixture_told():
    registry = CollectorRegistry()
    registry.register(Told(a_status.status()))
    return samples(generate_latest(registry).decode())


def test_a_busy_daemon(told):
    assert of(told, "ckptd_arena_budget_bytes") == 1200 * GIB
    assert of(told, "ckptd_arena_used_bytes") == 768 * GIB
    assert of(told, "ckptd_refused_messages_total") == 1
    assert (of(told, "ckptd_long_turns_total"), of(told, "ckptd_longest_turn_seconds")) == (3, 0.25)
    assert of(told, "ckptd_store_problem", store="/s") == 1
    assert of(told, "ckptd_info", version="0.1.0", node="node03") == 1


def test_its_jobs(told):
    assert of(told, "ckptd_ranks_alive", "llama-7b") == 15
    assert of(told, "ckptd_slots", "llama-7b") == 48
    assert of(told, "ckptd_slots_in_use", "llama-7b") == 32
    assert of(told, "ckptd_job_errors", "llama-7b") == 1
    assert of(told, "ckptd_drain_done_bytes", "llama-7b") == 150 * GIB
    assert of(told, "ckptd_drain_seconds_left", "llama-7b") == 180.8
    steps = {m: of(told, "ckptd_newest_step", "llama-7b", milestone=m) for m in ("staged", "protected", "durable")}
    assert steps == {"staged": 1300, "protected": 1250, "durable": 1100}
    assert of(told, "ckptd_saves", "llama-7b", end="superseded") == 1
    assert of(told, "ckptd_saves", "llama-7b", end="skipped") == 0
    assert of(told, "ckptd_saves", "tiny", end="skipped") is None
    assert of(told, "ckptd_draining", "tiny") == 0
    assert of(told, "ckptd_drain_bytes", "tiny") is None
    assert of(told, "ckptd_newest_step", "tiny", milestone="staged") is None


def test_damage_that_lasts_is_counted_by_where_it_is():
    registry = CollectorRegistry()
    registry.register(Told(driven.damaged()))
    found = samples(generate_latest(registry).decode())
    damaged = {tier: of(found, "ckptd_damaged", "job", tier=tier) for tier in ("arena", "rebuilt", "pfs")}
    assert damaged == {"arena": 1, "rebuilt": 0, "pfs": 0}
    assert of(found, "ckptd_scrub_damage_total", "job", outcome="found") == 1
    assert of(found, "ckptd_scrub_damage_total", "job", outcome="mended") == 0


def test_how_long_saves_take_and_what_is_not_safe(told):
    assert of(told, "ckptd_save_seconds_bucket", "llama-7b", milestone="staged", le="1.0") == 2
    assert of(told, "ckptd_save_seconds_bucket", "llama-7b", milestone="staged", le="+Inf") == 3
    assert of(told, "ckptd_save_seconds_count", "llama-7b", milestone="staged") == 3
    assert of(told, "ckptd_save_seconds_sum", "llama-7b", milestone="staged") == 4.5
    assert of(told, "ckptd_restore_seconds_count", "llama-7b", tier="arena") == 1
    assert of(told, "ckptd_drain_rate_bytes_per_second_count", "llama-7b") == 1
    assert of(told, "ckptd_save_interval_seconds", "llama-7b") == 20.0
    assert of(told, "ckptd_drain_seconds", "llama-7b") == 34.0
    assert of(told, "ckptd_unsafe", "llama-7b", code="store_slow") == 1
    assert of(told, "ckptd_unsafe", "llama-7b", code="ranks_missing") == 0
    assert of(told, "ckptd_drain_seconds", "tiny") is None


def test_jobs_of_one_name_in_two_stores_are_two():
    here, there = a_status.job(), a_status.job(store="/other", pace=None)
    registry = CollectorRegistry()
    registry.register(Told(a_status.status(jobs=[here, there])))
    found = samples(generate_latest(registry).decode())
    says = {
        store: of(found, "ckptd_unsafe", here.job, code="store_slow", store=store) for store in (here.store, "/other")
    }
    assert says == {here.store: 1, "/other": 0}


def test_where_the_time_went_and_counts_of_all_runs(told):
    assert of(told, "ckptd_effective_training_time_ratio", "llama-7b") == 0.946
    kinds = ("training", "repeated", "stall", "restore", "start", "unexplained")
    seconds = [of(told, "ckptd_wall_time_seconds", "llama-7b", kind=kind) for kind in kinds]
    assert seconds == [9460.0, 200.0, 26.0, 14.0, 300.0, 0.0]
    assert of(told, "ckptd_step_seconds", "llama-7b") == 5.9
    assert of(told, "ckptd_staged_bytes_total", "llama-7b") == 9 * GIB
    assert of(told, "ckptd_drained_bytes_total", "llama-7b") == 3 * GIB
    assert of(told, "ckptd_lost_steps_total", "llama-7b") == 70
    assert of(told, "ckptd_failed_runs_total", "llama-7b") == 2
    losses = {what: of(told, "ckptd_losses_total", "llama-7b", what=what) for what in ("node", "arena", "ranks")}
    assert losses == {"node": 2, "arena": 0, "ranks": 1}
    for name in ("ckptd_effective_training_time_ratio", "ckptd_staged_bytes_total", "ckptd_lost_steps_total"):
        assert of(told, name, "tiny") is None, "its journal is not read yet"


def test_names_and_labels_keep_to_the_rules_whatever_a_job_is_called():
    status = a_status.status()
    job = msgspec.structs.replace(status.jobs[0], store='/s/"quoted"\\\n{x}')
    registry = CollectorRegistry()
    registry.register(Told(msgspec.structs.replace(status, jobs=[job])))
    found = samples(generate_latest(registry).decode())
    assert {dict(pairs).get("store") for (_, *pairs) in found if dict(pairs).get("job_name")} == {'/s/"quoted"\\\n{x}'}


def test_the_page_and_the_alerts_name_what_there_is(told):
    there = {name for name, *_ in told} | {"ckptd_up"}
    there = {re.sub(r"_(bucket|count|sum)$", "", name) for name in there}
    page = set(re.findall(r"`(ckptd_[a-z_]+)`", (ROOT / "docs/metrics.md").read_text()))
    assert page == there | {"ckptd_nodes", "ckptd_nodes_reachable", "ckptd_ranks_unserved"}
    alerts = (ROOT / "deploy/prometheus/alerts.yml").read_text()
    assert {re.sub(r"_(sum|count)$", "", name) for name in re.findall(r"\bckptd_[a-z_]+", alerts)} <= page


def test_what_is_durable_is_reported_however_many_newer_ones_there_are():
    found = [a_status.checkpoint(step, "staged", "staged") for step in range(100, 60, -1)]
    old = [a_status.checkpoint(20, "durable", "durable"), a_status.checkpoint(10, "staged", "staged", protected=True)]
    shown = picture._shown([*found, *old])
    assert [c.step for c in shown] == [*range(100, 68, -1), 20, 10]
    assert picture._shown(found[:3]) == found[:3]


def scrape(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return samples(answer.read().decode())


@pytest.mark.process
def test_a_real_daemon_is_scraped_and_one_that_is_gone_is_said_to_be(tmp_path):
    port = free_port()
    verb = [sys.executable, "-m", "ckptd", "metrics", "--port", str(port)]
    with Node(str(tmp_path)) as node:
        node.start()
        exporter = pythons.Popen(verb, env=node.environ(), stderr=subprocess.PIPE, text=True)
        try:
            assert exporter.stderr.readline() == f"serving http://127.0.0.1:{port}/metrics\n"
            assert of(scrape(port), "ckptd_up") == 1
            assert of(scrape(port), "ckptd_arena_used_bytes") == 0
            second = pythons.run(verb, env=node.environ(), capture_output=True, text=True, timeout=120, check=False)
            assert second.returncode == 2
            assert f"cannot serve metrics at 127.0.0.1 port {port}: Address already in use" in second.stderr
            node.stop()
            assert scrape(port) == {("ckptd_up",): 0, ("ckptd_ranks_unserved",): 0}
            exporter.terminate()
            assert exporter.wait(60) == 0
        finally:
            exporter.kill()
            exporter.wait()
            exporter.stderr.close()


@pytest.mark.process
def test_printed_once(tmp_path):
    with Node(str(tmp_path)) as node:
        node.start()
        found = samples(node.complete(sys.executable, "-m", "ckptd", "metrics", timeout_s=30))
        assert of(found, "ckptd_up") == 1
