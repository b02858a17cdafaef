"""What the log says of jobs: each milestone and each end once, read off the catalogue after it has changed."""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ckptd.core.coordinator.save_record import Record
from ckptd.core.coordinator.save_states import State
from ckptd.core.jobs import Job
from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.base.log_line import line
from ckptd.shared.protocol.messages import End, Milestone

_BAD_ENDS = frozenset({End.FAILED, End.ABANDONED, End.SKIPPED})


class Entry(NamedTuple):
    """One line of the log."""

    level: int
    text: str


@dataclass(slots=True)
class _Seen:
    """Of a save: what was said of it."""

    milestone: Milestone | None = None
    state: State = State.STAGING
    failures: int = 0


@dataclass(slots=True)
class _Page:
    """Of a job."""

    incarnation: int = 0
    saves: dict[SaveId, _Seen] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)


class EventLog:
    """Only the daemon that coordinates a job knows of its saves: elsewhere there is nothing to say."""

    def __init__(self) -> None:
        self._pages: dict[JobKey, _Page] = {}

    def news(self, jobs: Mapping[JobKey, Job], now: float) -> Iterator[Entry]:
        """What has changed since the last call. Cheap when nothing has."""
        for key in self._pages.keys() - jobs.keys():
            del self._pages[key]
        for key, job in jobs.items():
            page = self._pages.setdefault(key, _Page())
            yield from _of_session(key.job, job, page)
            records = job.coordinator.facts.records
            for save in page.saves.keys() - records.keys():
                del page.saves[save]
            for save, record in records.items():
                yield from _of_save(key.job, record, page.saves.setdefault(save, _Seen()), job, now)
            yield from _of_parity(key.job, job.coordinator.parity.problems, page)


def _of_session(name: str, job: Job, page: _Page) -> Iterator[Entry]:
    sessions = job.coordinator.sessions
    if sessions.incarnation != page.incarnation and sessions.session:
        page.incarnation = sessions.incarnation
        nodes = len(job.node.membership.nodes)
        text = line("session", job=name, incarnation=sessions.incarnation, ranks=sessions.world_size, nodes=nodes)
        yield Entry(logging.INFO, text)


def _of_save(name: str, record: Record, seen: _Seen, job: Job, now: float) -> Iterator[Entry]:
    facts = {"job": name, "step": record.save.step, "incarnation": record.save.incarnation}
    if record.milestone is not seen.milestone:
        if record.milestone is not None:
            yield Entry(logging.INFO, line(str(record.milestone), **facts, **_how(record, now)))
        seen.milestone = record.milestone
    was, seen.state = seen.state, record.state
    if record.state is not was and record.state is State.DRAINING:
        attempt = record.failures + 1
        yield Entry(logging.INFO, line("draining", **facts, nodes=len(record.drainers), attempt=attempt))
    if record.failures > seen.failures:
        retry = job.coordinator.facts.retry_at
        retry_s = round(max(0.0, retry - now), 1) if retry is not None else None
        text = line("drain failed", **facts, attempt=record.failures, error=record.error, retry_s=retry_s)
        yield Entry(logging.WARNING, text)
    seen.failures = record.failures
    if record.state is not was and record.end is not None and record.end is not End.DURABLE:
        level = logging.WARNING if record.end in _BAD_ENDS else logging.INFO
        yield Entry(level, line(str(record.end), **facts, reason=record.reason or record.error))


def _how(record: Record, now: float) -> dict[str, object]:
    """How much that was, and how long it took: durable since its drain began, else since its first rank had it."""
    if record.milestone is Milestone.DURABLE and record.drain_since is not None:
        seconds = record.drained_s(now)
        return {"bytes": record.nbytes, "seconds": seconds, "bytes_per_s": int(record.nbytes / max(seconds, 1e-6))}
    return {"bytes": record.nbytes, "ranks": len(record.delivered), "seconds": now - record.since}


def _of_parity(name: str, problems: Mapping[str, str], page: _Page) -> Iterator[Entry]:
    if problems == page.problems:
        return
    for node, problem in problems.items():
        if page.problems.get(node) != problem:
            yield Entry(logging.WARNING, line("parity failed", job=name, node=node, error=problem))
    page.problems = dict(problems)
