"""A daemon's status as Prometheus metrics: names, units and labels. Pure."""

from collections.abc import Iterator
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.utils import floatToGoString

from ckptd.cli.view.unsafe import RULES, judged
from ckptd.shared.protocol.journal import LOSSES
from ckptd.shared.protocol.messages import End, Milestone, Tier
from ckptd.shared.protocol.status import CheckpointStatus, Histogram, JobStatus, Status, spent

_JOB = ("job_name", "store")  # Prometheus has a label job of its own
STARTED = "start_time_seconds"
# What a daemon counts from its start on, by families; the other counters, and histograms, continue a job's journal.
OF_DAEMON = frozenset({"ckptd_refused_messages", "ckptd_long_turns", "ckptd_scrub_bytes", "ckptd_scrub_damage"})
_HISTOGRAMS: dict[str, tuple[str, str, str]] = {  # by what they are of: name, help, and what its label is called
    "drain_bytes_per_s": ("drain_rate_bytes_per_second", "Of drains that ended well, all nodes together.", ""),
    "stall": ("save_stall_seconds", "Of saves, the longest time that a rank was held up until hand-over.", ""),
    "restore": ("restore_seconds", "Of loads, from the first rank's call to the last one's end.", "tier"),
    **dict.fromkeys(
        map(str, Milestone), ("save_seconds", "Of saves, from the first stall's end to the milestone.", "milestone")
    ),
}


def families(status: Status) -> Iterator[Metric]:
    """Every metric of a daemon. Sizes are bytes, times seconds; what is not known has no sample."""
    info = InfoMetricFamily("ckptd", "This daemon.")
    info.add_metric([], {"version": status.version, "node": status.node, "arena": status.arena})
    yield info
    yield _gauge("uptime_seconds", "Since the daemon began to serve.", status.uptime_s)
    if status.began_at:
        yield _gauge(STARTED, "When the daemon began to serve, since 1970.", status.began_at)
    yield _gauge("arena_budget_bytes", "Most that the arena may hold.", status.budget_nbytes)
    yield _gauge("arena_used_bytes", "Of slots and parity.", status.used_nbytes)
    yield _gauge("errors", "Problems that status shows, beside those of jobs.", len(status.errors))
    refused = CounterMetricFamily("ckptd_refused_messages", "Frames that were no valid message.")
    refused.add_metric([], status.refused_messages)
    yield refused
    turns = CounterMetricFamily("ckptd_long_turns", "Turns of the daemon's loop above 50 ms.")
    turns.add_metric([], status.long_turns)
    yield turns
    yield _gauge("longest_turn_seconds", "The longest turn of the daemon's loop.", status.longest_turn_s)
    yield from _of_stores(status)
    yield from _of_jobs(judged(status))
    yield from _scrubs(status.jobs)
    yield from _histograms(status.jobs)
    yield from _totals(status.jobs)


def _gauge(name: str, help_text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"ckptd_{name}", help_text, value=value)


def _of_stores(status: Status) -> Iterator[Metric]:
    busy = GaugeMetricFamily("ckptd_store_requests", "Requests that the store's worker carries out.", labels=["store"])
    bad = GaugeMetricFamily("ckptd_store_problem", "1 while the store's worker reports a problem.", labels=["store"])
    for worker in status.workers:
        busy.add_metric([worker.store], worker.busy)
        bad.add_metric([worker.store], bool(worker.problem) or worker.silent)
    yield from (busy, bad)


def _scrubs(jobs: list[JobStatus]) -> Iterator[Metric]:
    read = CounterMetricFamily("ckptd_scrub_bytes", "Read again, and verified.", labels=[*_JOB, "tier"])
    found = CounterMetricFamily("ckptd_scrub_damage", "Damage found, and of it made good.", labels=[*_JOB, "outcome"])
    lasts = GaugeMetricFamily("ckptd_damaged", "Damage that is still there.", labels=[*_JOB, "tier"])
    for job in jobs:
        if (scrub := job.scrub) is not None:
            names = [job.job, job.store]
            for tier in (Tier.ARENA, Tier.REBUILT, Tier.PFS):
                lasts.add_metric([*names, tier], sum(one.tier == tier for one in scrub.damaged))
            read.add_metric([*names, "arena"], scrub.memory_nbytes)
            read.add_metric([*names, "pfs"], scrub.store_nbytes)
            found.add_metric([*names, "found"], scrub.found)
            found.add_metric([*names, "mended"], scrub.mended)
    yield from (read, found, lasts)


def _histograms(jobs: list[JobStatus]) -> Iterator[Metric]:
    families: dict[str, HistogramMetricFamily] = {}
    for job in jobs:
        for one in job.histograms:
            name, help_text, label = _HISTOGRAMS[one.what]
            labels = [*_JOB, *([label] if label else [])]
            family = families.setdefault(name, HistogramMetricFamily(f"ckptd_{name}", help_text, labels=labels))
            value = [one.tier or one.what] if label else []
            family.add_metric([job.job, job.store, *value], buckets=_buckets(one), sum_value=one.total)
    yield from families.values()


def _buckets(one: Histogram) -> list[tuple[str, float]]:
    bounds = [*map(floatToGoString, one.bounds), "+Inf"]
    return list(zip(bounds, map(float, accumulate(one.counts)), strict=True))


def _totals(jobs: list[JobStatus]) -> Iterator[Metric]:
    """Of all runs of a job, from its journal."""
    counters = [
        CounterMetricFamily(f"ckptd_{name}", help_text, labels=[*_JOB, *label])
        for name, help_text, *label in (
            ("staged_bytes", "Of saves of all ranks."),
            ("drained_bytes", "Of saves that became durable."),
            ("lost_steps", "Steps that had been done and were not in what was loaded."),
            ("failed_runs", "Runs that ended without their own doing, once the next began."),
            ("losses", "Nodes, arenas and groups of ranks that were lost.", "what"),
        )
    ]
    for job in jobs:
        if (told := job.totals) is not None:
            values = (told.staged_nbytes, told.drained_nbytes, told.lost_steps, told.failed_runs)
            for counter, value in zip(counters, values, strict=False):
                counter.add_metric([job.job, job.store], value)
            for what in LOSSES:
                counters[-1].add_metric([job.job, job.store, what], told.losses.get(what, 0))
    yield from counters


class _Jobs:
    """Families with a sample for each job."""

    def __init__(self) -> None:
        self.families: dict[str, GaugeMetricFamily] = {}

    def add(self, job: JobStatus, name: str, help_text: str, value: float | None, **labels: str) -> None:
        family = self.families.setdefault(name, GaugeMetricFamily(f"ckptd_{name}", help_text, labels=[*_JOB, *labels]))
        if value is not None:
            family.add_metric([job.job, job.store, *labels.values()], value)


def _of_jobs(status: Status) -> Iterator[Metric]:
    found = _Jobs()
    for job in status.jobs:
        found.add(job, "incarnation", "Which life of the job this is.", job.incarnation)
        found.add(job, "job_errors", "Problems of the job that status shows.", len(job.errors))
        found.add(job, "degraded", "Ways in which the job is less safe than asked.", len(job.degraded))
        found.add(job, "world_size", "Ranks of the job.", job.world_size)
        found.add(job, "ranks_alive", "Ranks on this node whose process lives.", sum(r.alive for r in job.ranks))
        found.add(job, "slots", "Slots of this node's ranks.", sum(r.slots for r in job.ranks))
        found.add(job, "slots_in_use", "Slots that hold a checkpoint.", sum(r.slots_in_use for r in job.ranks))
        for end in End if job.ends else ():
            found.add(job, "saves", "Saves by how they ended.", job.ends.get(end.value, 0), end=end.value)
        if job.nodes and job.coordinator in {"", status.node}:  # others know less, and would count the same again
            found.add(job, "nodes", "Nodes of the job, as its coordinator sees them.", len(job.nodes))
            found.add(job, "nodes_reachable", "Those that answer.", sum(node.reachable for node in job.nodes))
        for milestone in Milestone:
            newest = _newest(job.checkpoints, milestone)
            step, age = (newest.step, newest.age_s) if newest is not None else (None, None)
            found.add(job, "newest_step", "The newest checkpoint that reached it.", step, milestone=milestone)
            found.add(job, "newest_age_seconds", "Since that one was staged.", age, milestone=milestone)
        _add_drain(found, job)
        _add_pace(found, job)
        _add_goodput(found, job)
        codes = {one.code for one in status.unsafe if one.is_of(job)}
        for rule in RULES:
            found.add(job, "unsafe", "1 while status says so.", rule.code in codes, code=rule.code)
    return iter(found.families.values())


def _newest(checkpoints: list[CheckpointStatus], milestone: Milestone) -> CheckpointStatus | None:
    """Checkpoints are newest first. What is durable was staged; whether it is protected too it says itself."""
    if milestone is Milestone.PROTECTED:
        return next((c for c in checkpoints if c.protected or c.milestone == milestone), None)
    order = list(Milestone)
    reached = (
        c
        for c in checkpoints
        if c.milestone is not None and order.index(Milestone(c.milestone)) >= order.index(milestone)
    )
    return next(reached, None)


def _add_pace(found: _Jobs, job: JobStatus) -> None:
    if job.pace is not None:
        found.add(job, "save_interval_seconds", "Between saves that are due to be drained.", job.pace.save_every_s)
        found.add(job, "drain_seconds", "What the store takes for a save.", job.pace.drain_s)
        found.add(job, "drain_due_seconds", "Since a save was due, with none durable since.", job.pace.due_s)


def _add_goodput(found: _Jobs, job: JobStatus) -> None:
    if (told := job.goodput) is None:
        return
    ettr = "effective_training_time_ratio"
    found.add(job, ettr, "Of the wall time of the job's runs, the part that counts.", told.ettr)
    for kind, seconds in spent(told).items():
        found.add(job, "wall_time_seconds", "Of all runs, by what it was used for.", seconds, kind=kind)
    found.add(job, "step_seconds", "What a step takes usually, without stalls.", told.step_s)


def _add_drain(found: _Jobs, job: JobStatus) -> None:
    drain = job.drain
    found.add(job, "draining", "1 while a drain runs or waits to be tried again.", drain is not None)
    if drain is not None:
        found.add(job, "drain_bytes", "Of the running drain, all of them.", drain.nbytes)
        found.add(job, "drain_done_bytes", "Of the running drain, written so far.", drain.nbytes_done)
        found.add(job, "drain_bytes_per_second", "Of the running drain.", drain.bytes_per_s)
        found.add(job, "drain_seconds_left", "Of the running drain.", drain.seconds_left)
        found.add(job, "drain_attempt", "Above 1 after failures.", drain.attempt)
