"""What pages, or runs, for nothing: units that restart, daemons without jobs, alerts that fire between jobs."""

import os
import pathlib
import time

import msgspec
import pytest

from ckptd.doctor import needless
from tests.cluster import ROOT, Node
from tests.unit import a_status

# As systemctl show prints it.
FINE = "Id=ckptd@me.service\nActiveState=active\nSubState=running\nNRestarts=0\nResult=success\n"
ABSENT = "Id=ckptd.service\nActiveState=inactive\nSubState=dead\nNRestarts=0\nResult=success\n"
LOOPS = "Id=ckptd@me.service\nActiveState=activating\nSubState=auto-restart\nNRestarts=41\nResult=exit-code\n"
FAILED = "Id=ckptd.service\nActiveState=failed\nSubState=failed\nNRestarts=5\nResult=start-limit-hit\n"
DAY_S = 24 * 3600.0


def test_a_unit_that_restarts_and_one_that_failed():
    loops, failed = needless.judge_units([FINE, LOOPS, FAILED, ABSENT, ""])
    assert loops.detail == "systemd has started ckptd@me.service again 41 times"
    assert "journalctl -u ckptd@me.service -n 50" in loops.fix
    assert failed.detail == "ckptd.service has failed (start-limit-hit)"
    assert "journalctl --user -u ckptd.service" in failed.fix


def test_units_are_asked_of_systemd_where_there_is_one():
    assert all(text.startswith("Id=") for text in needless.unit_states("nobody-of-that-name") if text)


def test_a_daemon_without_jobs_for_days():
    assert list(needless.judge_idle(None)) == []
    assert list(needless.judge_idle(2 * DAY_S)) == []
    (found,) = needless.judge_idle(4 * DAY_S)
    assert (found.verdict, found.detail) == ("warn", "no job has used the daemon for 4d")


@pytest.mark.process
def test_how_long_no_job_has_used_a_daemon_is_known_from_its_arena(tmp_path):
    with Node(str(tmp_path)) as node:
        node.start()
        status = node.status()
        assert needless.unused_s(status, os.stat(node.arena).st_mtime + 1) < 60
        jobs = pathlib.Path(node.arena, "jobs")
        jobs.mkdir(exist_ok=True)
        os.utime(jobs, (1000, 1000))
        now = time.time() + 5 * DAY_S
        old = msgspec.structs.replace(status, uptime_s=status.uptime_s + 5 * DAY_S)
        assert needless.unused_s(old, now) > 4 * DAY_S
        os.utime(jobs, (now - 60, now - 60))
        assert needless.unused_s(old, now) == pytest.approx(60)
    assert needless.unused_s(a_status.status(), 0.0) is None
    assert needless.unused_s(None, 0.0) is None


OLD = """groups:
  - name: ckptd
    rules:
      - alert: Down
        expr: ckptd_up == 0
        for: 5m
      - alert: Gone
        expr: >
          absent(ckptd_info)
          or vector(0)
        for: 1m
      - expr: ckptd_up == 0 and on (instance) ckptd_ranks_unserved > 0
        alert: Fine
      - record: daemons
        expr: sum(ckptd_up)
      - alert: ExporterDown
        expr: up{job="ckptd"} == 0
"""


def test_alerts_that_fire_between_jobs_are_named_with_their_file(tmp_path):
    rules = tmp_path / "etc/prometheus/rules"
    rules.mkdir(parents=True)
    (rules / "old.yml").write_text(OLD)
    (rules / "ours.yml").write_text((pathlib.Path(ROOT) / "deploy/prometheus/alerts.yml").read_text())
    found = list(needless.judge_alerts(needless.rule_files(str(tmp_path))))
    assert [one.detail for one in found] == [
        f"{rules}/old.yml: '{expr}' fires between jobs, when no training needs a daemon"
        for expr in ("ckptd_up == 0", "> absent(ckptd_info) or vector(0)")
    ]
    assert found[0].fix == "expr: ckptd_ranks_unserved > 0, as in deploy/prometheus/alerts.yml"
    assert list(needless.judge_alerts(needless.rule_files(str(tmp_path / "none")))) == []
