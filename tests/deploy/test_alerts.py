"""deploy/prometheus/alerts.yml by promtool: no alert in a day of short jobs, and each in its fault.

The series are those that ``ckptd metrics`` makes of a status: of jobs that were driven into a situation.
"""

import itertools
import os
import pathlib
import re
import shutil
import subprocess

import msgspec
import pytest
import yaml

from ckptd.cli.view.metrics import families
from ckptd.core import events as ev
from ckptd.daemon import status as builder
from ckptd.shared.protocol.messages import Cadence
from ckptd.shared.protocol.status import WorkerStatus
from tests.cluster import ROOT
from tests.situations import driven
from tests.unit import a_status
from tests.unit.core import a_job

RULES = os.path.join(ROOT, "deploy/prometheus/alerts.yml")
PROMTOOL = shutil.which("promtool")
USED = set(re.findall(r"\bckptd_[a-z_]+", pathlib.Path(RULES).read_text(encoding="utf-8")))
NAMES = re.findall(r"- alert: (\w+)", pathlib.Path(RULES).read_text(encoding="utf-8"))
(SCRAPES,) = re.findall(r"job_name: (\w+)", pathlib.Path(ROOT, "deploy/prometheus/scrape.yml").read_text())
DAY = 24 * 60  # minutes
SHORT = 20  # of a job
BETWEEN = 10  # of two jobs: no daemon runs
INSTANCE = "node01:9440"

pytestmark = pytest.mark.skipif(PROMTOOL is None, reason="no promtool is installed (Debian: prometheus)")


def exporter(up=1):
    """The series that Prometheus itself keeps of each scrape."""
    return f'up{{job="{SCRAPES}",instance="{INSTANCE}"}}', up


def series(status, up=1, unserved=0):
    """Name and labels, and value, of each series that an alert looks at, of an exporter that answers."""
    yield exporter()
    found = [("ckptd_up", {}, up), ("ckptd_ranks_unserved", {}, unserved)]
    samples = itertools.chain.from_iterable(family.samples for family in families(status)) if status else ()
    found += [(one.name, one.labels, one.value) for one in samples]
    for name, labels, value in found:
        if name in USED:
            text = ",".join(f'{key}="{value}"' for key, value in ({"instance": INSTANCE} | labels).items())
            yield f"{name}{{{text}}}", value


def constant(status, minutes=120, *, staged=0, durable=0, stall_s=0, due=0, **words):
    """The situation lasts. staged, durable: so many saves a minute reach them; stall_s: of a minute.

    due: 60: a save is due all the time, and none becomes durable.
    """
    rates = {
        "drain_due": due,
        'seconds_count.*milestone="staged"': staged,
        'seconds_count.*milestone="durable"': durable,
        'wall_time.*kind="stall"': stall_s,
    }
    for name, value in series(status, **words):
        more = next((rate for words, rate in rates.items() if re.search(words, name)), 0)
        yield {"series": name, "values": f"{value:g}+{more}x{minutes}"}


def played(minutes, *, drain_every_s, drain_s, hangs_from=DAY):
    """Series of a job that saves each minute, and whose drains take drain_s; from a minute on none ends."""
    job = driven.SlowStore(slots_per_rank=8, cadence=Cadence(0, float(drain_every_s)))
    for rank in range(2):
        job.say(ev.RankFound(job=a_job.KEY, rank=rank, session="a", pid=4100 + rank, host="gpu01"))
    job.start()
    found: dict[str, list[str]] = {}
    for minute in range(minutes):
        active = job.facts.active
        if active and minute < hangs_from and job.now - job.facts.records[active].drain_since >= drain_s:
            job.drain(active)
        job.stage_all(driven.save(minute + 1))
        account = driven.on_record(job)
        jobs = builder.jobs(job.catalogue.jobs, job.now, {}, lambda _job, account=account: account)
        for name, value in series(driven.of_jobs(jobs, "gpu01")):
            values = found.setdefault(name, [])
            values += ["_"] * (minute - len(values)) + [f"{value:g}"]
        job.tick(60.0)
    return [{"series": name, "values": " ".join(values)} for name, values in found.items()]


def fired(tmp_path, inputs, minutes):
    """Names of the alerts that fire at some of these minutes, by promtool."""
    none = [{"eval_time": f"{m}m", "alertname": name, "exp_alerts": []} for m in minutes for name in NAMES]
    one = {"interval": "1m", "input_series": list(inputs), "alert_rule_test": none}
    path = tmp_path / "test.yml"
    path.write_text(yaml.safe_dump({"rule_files": [RULES], "evaluation_interval": "1m", "tests": [one]}))
    command = [PROMTOOL, "test", "rules", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    said = done.stdout + done.stderr
    names = set(re.findall(r"alertname: ?(\w+), time", said))
    assert bool(names) == bool(done.returncode), said
    return names


def test_no_alert_in_a_healthy_day_of_many_short_jobs(tmp_path):
    inputs: dict[str, list[str]] = {}
    up = []
    status = driven.healthy()
    for number, begin in enumerate(range(0, DAY, SHORT + BETWEEN)):
        (job,) = status.jobs
        named = msgspec.structs.replace(status, jobs=[msgspec.structs.replace(job, job=f"job-{number}")])
        up.append(f"1+0x{SHORT - 1} 0+0x{BETWEEN - 1}")
        for name, value in series(named):
            if not name.startswith(("up{", "ckptd_up", "ckptd_ranks_unserved")):
                before = f"_x{begin} " if begin else ""
                step = 1 if "_count" in name else 0.5 if 'kind="stall"' in name else 0
                inputs[name] = [f"{before}{value:g}+{step}x{SHORT - 1} stale"]
    always = [
        {"series": exporter()[0], "values": f"1+0x{DAY}"},
        {"series": f'ckptd_up{{instance="{INSTANCE}"}}', "values": " ".join(up)},
        {"series": f'ckptd_ranks_unserved{{instance="{INSTANCE}"}}', "values": f"0+0x{DAY}"},
    ]
    all_series = [*always, *({"series": name, "values": " ".join(values)} for name, values in inputs.items())]
    assert fired(tmp_path, all_series, range(15, DAY, 31)) == set()


def test_no_alert_for_a_healthy_job_that_lasts(tmp_path):
    inputs = constant(driven.healthy(), staged=1, durable=1, stall_s=0.5)
    assert fired(tmp_path, inputs, range(0, 120, 7)) == set()


@pytest.mark.parametrize(("drain_every_s", "drain_s"), [(7200, 600), (7200, 6000), (3600, 3000)])
def test_no_alert_for_a_job_whose_drains_are_rare_or_long(drain_every_s, drain_s, tmp_path):
    inputs = played(5 * 60, drain_every_s=drain_every_s, drain_s=drain_s)
    known = 110  # of a first drain nobody knows how long it is to take
    assert fired(tmp_path, inputs, range(known, 5 * 60, 5)) == set()


def test_a_drain_that_hangs_is_reported_whatever_the_cadence(tmp_path):
    inputs = played(4 * 60, drain_every_s=7200, drain_s=600, hangs_from=120)
    assert fired(tmp_path, inputs, range(180)) == set()
    assert fired(tmp_path, inputs, [220]) == {"CkptdNothingDurable"}


def hung():
    job = driven.healthy().jobs[0]
    worker = WorkerStatus(store=job.store, pid=7, busy=1, idle_s=900.0)
    return msgspec.structs.replace(driven.healthy(), workers=[worker])


def missing():
    (job,) = driven.healthy().jobs
    waits = a_status.checkpoint(
        100,
        "staging",
        ranks=1,
        reason="waits for rank 1: every rank must call save",
        missing=[(1, 1)],
        tiers=[],
        world_size=2,
    )
    return msgspec.structs.replace(
        driven.healthy(), jobs=[msgspec.structs.replace(job, checkpoints=[waits, *job.checkpoints])]
    )


def measured(status):
    """With the histograms and sums that a healthy job has."""
    found = {name: getattr(driven.healthy().jobs[0], name) for name in ("histograms", "goodput", "totals")}
    return msgspec.structs.replace(status, jobs=[msgspec.structs.replace(job, **found) for job in status.jobs])


def dead():
    """Its last samples are of a healthy job."""
    minutes = 30
    for one in constant(driven.healthy(), minutes=minutes - 1, staged=1, durable=1):
        after = "0+0x90" if one["series"] == exporter()[0] else "stale"
        yield {"series": one["series"], "values": f"{one['values']} {after}"}


FAULTS = {
    "CkptdExporterDown": dead,
    "CkptdDown": lambda: constant(None, up=0, unserved=8),
    "CkptdNothingDurable": lambda: constant(driven.healthy(), minutes=130, staged=1, due=60),
    "CkptdDegraded": lambda: constant(measured(driven.node_lost()), staged=1, durable=1),
    "CkptdStore": lambda: constant(hung(), staged=1, durable=1),
    "CkptdRanksMissing": lambda: constant(missing(), staged=1, durable=1),
    "CkptdStoreSlow": lambda: constant(measured(driven.store_slow()), staged=1, durable=1),
    "CkptdDamaged": lambda: constant(driven.damaged(), staged=1, durable=1),
    "CkptdStalls": lambda: constant(driven.healthy(), staged=1, durable=1, stall_s=6),
}


def test_every_alert_has_its_fault():
    assert set(FAULTS) == set(NAMES)


@pytest.mark.parametrize("name", FAULTS)
def test_an_alert_fires_in_its_fault_and_no_other_does(name, tmp_path):
    assert fired(tmp_path, FAULTS[name](), [115]) == {name}


def test_a_daemon_that_left_after_its_last_job_pages_for_nothing(tmp_path):
    assert fired(tmp_path, constant(None, up=0, unserved=0), [115]) == set()
