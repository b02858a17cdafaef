"""What ``history``, ``report`` and ``advise`` share: a job that is named, its journal, its runs."""

import contextlib
import os
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import click

from ckptd.arena.journal_files import found_journals
from ckptd.cli import common
from ckptd.history.goodput import Span, spans
from ckptd.history.runs import Run, runs_of
from ckptd.shared.base.errors import UsageError
from ckptd.shared.base.ids import JobKey, is_job_name, parse_dirname
from ckptd.shared.format.integrity import XXH3
from ckptd.shared.protocol.journal import JOURNAL_DIR, Name
from ckptd.shared.stores.kinds import absolute, open_files
from ckptd.store.journal import Here, read_journal
from ckptd.store.opening import jobs_at
from ckptd.system.config import load_config
from ckptd.system.units import parse_duration_s


class History(NamedTuple):
    """Of one job. spans: where the time of all its runs went. damaged: parts of its journal that cannot be read."""

    key: JobKey
    runs: list[Run]
    spans: list[Span]
    damaged: int

    @property
    def where(self) -> str:
        """The job's location."""
        return f"{self.key.store}/{self.key.job}"


def target(verb: Callable[..., Any]) -> Callable[..., Any]:
    """The argument JOB|PATH and --store, which a verb gets as target and store."""
    option = click.option("--store", metavar="DIR", help="Where JOB is.  [CKPTD_STORE; the setting]")
    return click.argument("target", metavar="JOB|PATH")(option(verb))


def read(target: str, store: str | None) -> History:
    """The history of the job that is named. Raises UsageError where there is no journal, and what is there instead."""
    key = located(target, store)
    with common.store_errors():
        journal = read_journal(open_files(f"{key.store}/{key.job}", XXH3), in_arena(load_config({})[0].arena, key))
    runs = runs_of(journal.entries)
    if not runs:
        raise _nothing(key, journal.damaged)
    return History(key, runs, spans(runs), journal.damaged)


def in_arena(arena: str, key: JobKey) -> dict[Name, Here]:
    """Segments of the job's journal that a daemon of this node keeps: the store gets new ones within half a minute."""
    found = (one for one in found_journals(arena) if one.file.job == key)
    return {one.file.name: Here(one.content, len(one.content)) for one in found}


def since_of(text: str, now: datetime) -> float:
    """Seconds since 1970 of a day, a time, or a duration until now. Raises UsageError."""
    try:
        return now.timestamp() - parse_duration_s(text)
    except ValueError:
        pass
    try:
        return datetime.fromisoformat(text).astimezone().timestamp()
    except ValueError:
        hint = f'a duration or a time, such as "24h" or "{now:%Y-%m-%d}" or "{now:%Y-%m-%dT%H:%M}"'
        raise UsageError(f"--since: {text!r} is no time", hint=hint) from None


def when(at: float) -> str:
    """A time for people, by this machine's clock."""
    return datetime.fromtimestamp(at, tz=UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def chosen(runs: Sequence[Run], numbers: Sequence[int], since: float | None, *, losses: bool) -> list[Run]:
    """Of a job's runs: those of these incarnations, not over before since, with a loss or a restore.

    Raises UsageError for an incarnation that the journal has not.
    """
    known = {number for run in runs for number in run.incarnations}
    if unknown := sorted(set(numbers) - known):
        raise UsageError(f"the journal has no run {unknown[0]}", hint=f"its runs: {', '.join(map(str, sorted(known)))}")
    found = [run for run in runs if not numbers or {*numbers} & {*run.incarnations}]
    found = [run for run in found if since is None or run.end >= since]
    return [run for run in found if run.losses or run.restores] if losses else found


def located(target: str, store: str | None) -> JobKey:
    """The job that is named. Raises UsageError where there is none of that name."""
    if is_job_name(target) and (store is not None or not os.path.isdir(target)):
        config = load_config({})[0]
        place = store or config.store
        here = {one.file.job for one in found_journals(config.arena)} if place is None else set()
        here = {job for job in here if job.job == target}
        if len(here) == 1:  # a daemon of this node has it
            return here.pop()
        if place is None:
            context = click.get_current_context(silent=True)
            verb = context.info_name if context is not None else "status"  # whose store a child reads
            hint = f"ckptd {verb} {target} --store DIR, or the path of the job's directory"
            raise UsageError(f"where is the job {target}? There is no store in the settings", hint=hint)
        place = absolute(place)
        _there(place, target)
        return JobKey(place, target)
    path = absolute(target)
    head, name = os.path.split(path)
    if parse_dirname(name) is not None:  # of one checkpoint: its job is meant
        head, name = os.path.split(head)
    names = _names(f"{head}/{name}")
    if names is None:
        raise UsageError(f"{path}: no such job", hint=f"what is there: ckptd list {head}")
    if JOURNAL_DIR in names:
        return JobKey(head, name)
    jobs = [job for job in names if is_job_name(job) and JOURNAL_DIR in (_names(f"{head}/{name}/{job}") or ())]
    if len(jobs) > 1:
        raise UsageError(f"{path} has {len(jobs)} jobs", hint="one of " + ", ".join(f"{path}/{job}" for job in jobs))
    if not jobs:
        with contextlib.suppress(UsageError):  # it has checkpoints, and no journal yet
            known = jobs_at(path)
            return known[0] if len(known) == 1 else JobKey(head, name)
    return JobKey(path, jobs[0]) if jobs else JobKey(head, name)


def _there(store: str, job: str) -> None:
    if _names(f"{store}/{job}") is None:
        raise UsageError(f"{store} has no job {job}", hint=f"its jobs: ckptd list {store}; another one: --store DIR")


def _names(location: str) -> list[str] | None:
    """Names there, None where there is nothing. Raises CkptdError."""
    with common.store_errors():
        try:
            return open_files(location, XXH3).names()
        except (FileNotFoundError, NotADirectoryError):
            return None


def _nothing(key: JobKey, damaged: int) -> UsageError:
    where = f"{key.store}/{key.job}"
    if damaged:
        what = f"the journal of {where} has no run that can be read: {damaged} damaged"
        return UsageError(what, hint=f"its checkpoints: ckptd verify {where}")
    return UsageError(
        f"{where} has no journal",
        hint=f"a daemon writes it while the job runs, soon after its first save; what is there: ckptd list {where}",
    )
